"""Laguna DFlash speculative decoding and PFlash prompt compression on stock llama.cpp."""

from laguna_gguf._compat import check_installation

check_installation()

from laguna_gguf.convert import convert_dflash  # noqa: E402  (the check comes before anything loads the native half)
from laguna_gguf.dflash.config import DrafterConfig  # noqa: E402
from laguna_gguf.dflash.drafter import DraftBlock, Drafter, load_drafter  # noqa: E402
from laguna_gguf.dflash.session import SpecSession  # noqa: E402
from laguna_gguf.dflash.stats import SpecStats  # noqa: E402
from laguna_gguf.errors import LagunaError  # noqa: E402
from laguna_gguf.pflash.compress import Compressed, PFlash  # noqa: E402
from laguna_gguf.pflash.scorer import Scores  # noqa: E402
from laguna_gguf.pflash.settings import SelectionSettings  # noqa: E402

__all__ = [
    "Compressed",
    "DraftBlock",
    "Drafter",
    "DrafterConfig",
    "LagunaError",
    "PFlash",
    "Scores",
    "SelectionSettings",
    "SpecSession",
    "SpecStats",
    "convert_dflash",
    "load_drafter",
]
