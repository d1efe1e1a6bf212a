"""argparse types that the commands share. Each raises ArgumentTypeError with what was needed."""

from __future__ import annotations

import argparse
import re

MAX_INTEGER = 2**31 - 1


def integer(text: str, low: int, high: int, what: str) -> int:
    """An integer in low..high, which is described as `what`."""
    is_plain = re.fullmatch(r"[+-]?[0-9]{1,20}", text) is not None  # int() also takes blanks and 1_000
    value = int(text) if is_plain else low - 1
    if not low <= value <= high:
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
    return value


def number(text: str, low: float, high: float, what: str) -> float:
    """A number in [low, high]."""
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not low <= value <= high:  # false for nan
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
    return value


def count(text: str) -> int:
    """An integer >= 0."""
    return integer(text, 0, MAX_INTEGER, "a number >= 0")


def positive(text: str) -> int:
    """An integer >= 1."""
    return integer(text, 1, MAX_INTEGER, "a number >= 1")


def fraction(text: str) -> float:
    """A number in [0, 1]."""
    return number(text, 0.0, 1.0, "between 0 and 1")


def at_least_zero(text: str) -> float:
    """A number >= 0."""
    return number(text, 0.0, 1e9, "a number >= 0")


def port(text: str) -> int:
    """A TCP port, 0 for a free one."""
    return integer(text, 0, 65535, "a port in 0..65535")


def gpu_layers(text: str) -> int:
    """A number of layers; -1 or 'all' for all."""
    return -1 if text == "all" else integer(text, -1, MAX_INTEGER, "a number or 'all'")
