"""Conversion of drafter checkpoints to GGUF, and back."""

from laguna_gguf.convert.dflash import convert, convert_dflash
from laguna_gguf.convert.outtypes import HF, OUTTYPES

__all__ = ["HF", "OUTTYPES", "convert", "convert_dflash"]
