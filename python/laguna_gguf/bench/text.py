"""Two figures that keep an acceptance honest: how far a text repeats itself, and which text it was."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np


def repetition(tokens: Sequence[int], n: int = 4) -> float:
    """Share of the n-grams that occurred before. A looping text is easy to draft, so tau means little without this."""
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def output_hash(texts: Iterable[Sequence[int]]) -> str:
    """12 hex digits of SHA-256 over the token ids (int32, little endian) of texts, in order, with their lengths."""
    digest = hashlib.sha256()
    for tokens in texts:
        digest.update(np.array([len(tokens), *tokens], dtype="<i4").tobytes())
    return digest.hexdigest()[:12]
