"""Laguna DFlash speculative decoding and PFlash prompt compression on stock llama.cpp.

llama.cpp is loaded with the first name that needs it, so that processes that only talk to one that has it (the daemon's
front, its clients) stay small and cannot be taken down by it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from laguna_gguf.errors import LagunaError

if TYPE_CHECKING:
    from laguna_gguf.convert import convert_dflash
    from laguna_gguf.daemon.aclient import AsyncPFlashClient
    from laguna_gguf.daemon.client import PFlashClient
    from laguna_gguf.dflash.config import DrafterConfig
    from laguna_gguf.dflash.drafter import DraftBlock, Drafter, load_drafter
    from laguna_gguf.dflash.session import SpecSession
    from laguna_gguf.dflash.stats import SpecStats
    from laguna_gguf.pflash.compress import PFlash
    from laguna_gguf.pflash.compressed import Compressed
    from laguna_gguf.pflash.scorer import Scores
    from laguna_gguf.pflash.settings import SelectionSettings

__all__ = [
    "AsyncPFlashClient",
    "Compressed",
    "DraftBlock",
    "Drafter",
    "DrafterConfig",
    "LagunaError",
    "PFlash",
    "PFlashClient",
    "Scores",
    "SelectionSettings",
    "SpecSession",
    "SpecStats",
    "convert_dflash",
    "load_drafter",
]

_MODULES = {
    "AsyncPFlashClient": "daemon.aclient",
    "Compressed": "pflash.compressed",
    "DraftBlock": "dflash.drafter",
    "Drafter": "dflash.drafter",
    "DrafterConfig": "dflash.config",
    "PFlash": "pflash.compress",
    "PFlashClient": "daemon.client",
    "Scores": "pflash.scorer",
    "SelectionSettings": "pflash.settings",
    "SpecSession": "dflash.session",
    "SpecStats": "dflash.stats",
    "convert_dflash": "convert",
    "load_drafter": "dflash.drafter",
}


def __getattr__(name: str) -> Any:
    if name == "_native":
        # every module gets the native half from here, so it is never loaded before llama_cpp or unchecked
        from laguna_gguf._compat import check_installation

        return check_installation()
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
