"""Conversion of drafter checkpoints to GGUF."""

from laguna_gguf.convert.dflash import convert_dflash
from laguna_gguf.convert.outtypes import OUTTYPES

__all__ = ["OUTTYPES", "convert_dflash"]
