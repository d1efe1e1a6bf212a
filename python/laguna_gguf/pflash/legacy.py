"""Chunk selection of Qwen3-0.6B drafters, used where no strict mode is set.

Chunks of 32 tokens: the first 8 and the last 24 are kept, then those that repeat a 4-gram of the prompt's last 96
tokens, then the best by mean score.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from laguna_gguf.errors import SelectionError
from laguna_gguf.pflash.budget import check_keep_ratio
from laguna_gguf.pflash.candidates import fixed_chunks, merge, range_scores
from laguna_gguf.pflash.segmentation import Span

CHUNK = 32
HEAD_CHUNKS = 8
TAIL_CHUNKS = 24
ANCHOR_TOKENS = 96
ANCHOR_LENGTH = 4


def select_chunks(ids: ArrayLike, scores: ArrayLike, keep_ratio: float) -> list[Span]:
    """Kept spans, merged and in source order; max(1, floor(n_chunks * ratio)) chunks of `ids` int [n].

    `scores` [n] is any importance. SelectionError (invalid_input): no tokens, another length, scores not finite.
    """
    tokens = np.asarray(ids, dtype=np.int64)
    importance = np.asarray(scores, dtype=np.float64)
    if tokens.ndim != 1 or not tokens.size or importance.shape != tokens.shape:
        raise SelectionError(
            f"ids have the shape {tokens.shape}, scores {importance.shape}; needed the same [n] with n >= 1",
            "invalid_input",
        )
    if not np.isfinite(importance).all():
        raise SelectionError("scores hold a value that is not finite", "invalid_input")
    chunks = fixed_chunks(tokens.size, CHUNK)
    wanted = max(1, math.floor(len(chunks) * check_keep_ratio(keep_ratio)))
    head, tail = _forced(wanted, len(chunks))
    means = range_scores(importance, chunks, "mean")
    anchored = _anchored(tokens, len(chunks))
    # lexsort's last key counts most: forced chunks, then anchored ones, then the mean, then the source order
    forced = np.zeros(len(chunks), dtype=bool)
    forced[:head] = True
    forced[len(chunks) - tail :] = True
    order = np.lexsort((np.arange(len(chunks)), -means, ~anchored, ~forced))
    return merge(chunks[chunk] for chunk in order[:wanted])


def _forced(wanted: int, n_chunks: int) -> tuple[int, int]:
    """Chunks kept at both ends, in the proportion 8 : 24 when there is no room for all of them."""
    if HEAD_CHUNKS + TAIL_CHUNKS <= wanted:
        return min(HEAD_CHUNKS, n_chunks), min(TAIL_CHUNKS, n_chunks)
    head = wanted * HEAD_CHUNKS // (HEAD_CHUNKS + TAIL_CHUNKS)
    return head, wanted - head


def _anchored(tokens: NDArray[np.int64], n_chunks: int) -> NDArray[np.bool_]:
    flags = np.zeros(n_chunks, dtype=bool)
    before = max(0, tokens.size - ANCHOR_TOKENS)
    if tokens.size - before < ANCHOR_LENGTH or before < ANCHOR_LENGTH:
        return flags
    grams = np.lib.stride_tricks.sliding_window_view(tokens, ANCHOR_LENGTH)
    wanted = {tuple(gram) for gram in grams[before:].tolist()}
    # only starts whose first token occurs in the tail can match, which leaves few to look up one by one
    starts = np.flatnonzero(np.isin(tokens[: before - ANCHOR_LENGTH + 1], tokens[before:]))
    for start in starts.tolist():
        if tuple(grams[start].tolist()) in wanted:
            flags[start // CHUNK] = True
            flags[(start + ANCHOR_LENGTH - 1) // CHUNK] = True
    return flags
