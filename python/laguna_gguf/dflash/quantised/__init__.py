"""Quantised Hugging Face checkpoints: which module is stored how, and dequantising it a piece at a time."""

from laguna_gguf.dflash.quantised.declared import Declared, Scheme, parse_declared
from laguna_gguf.dflash.quantised.resolve import Resolved, Weight, resolve
from laguna_gguf.dflash.quantised.weight import QuantisedWeight

__all__ = ["Declared", "QuantisedWeight", "Resolved", "Scheme", "Weight", "parse_declared", "resolve"]
