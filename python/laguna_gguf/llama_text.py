"""Bytes that llama.cpp's tokenizer would answer with an abort."""

from __future__ import annotations

import re

_BEYOND_UNICODE = re.compile(rb"(?:\xf4[\x90-\xbf]|[\xf5-\xf7][\x80-\xbf])[\x80-\xbf]{2}")
"""Four-byte sequences of code points above U+10FFFF."""


def tokenizable(data: bytes) -> bytes:
    """The text with U+FFFD for each byte of a code point above U+10FFFF.

    llama.cpp does the same with all other bytes that are not UTF-8; from these it throws, and the process ends.
    """
    return _BEYOND_UNICODE.sub("\ufffd".encode() * 4, data)
