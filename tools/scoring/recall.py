"""How much evidence a selection keeps, by the package's own budget, candidates and selector."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from laguna_gguf.pflash.candidates import fixed_chunks, make_candidates
from laguna_gguf.pflash.segmentation import segments
from laguna_gguf.pflash.selection import BUDGET_ONLY, select

Span = tuple[int, int]

KEEP = (0.05, 0.1, 0.2)
CHUNK = 128
MIN_SEGMENT, MAX_SEGMENT = 16, 256
EVIDENCE_TOKENS = 24
"""Evidence counts as kept when its first tokens, so many at most, are."""


def keep_context(
    mass: ArrayLike, spans: Sequence[Span], budget: int, score: Literal["density", "sum"], *, skip_oversized: bool
) -> list[Span]:
    """Ranges of a context kept within `budget` tokens; nothing of it is pinned."""
    n = spans[-1][1]
    candidates = make_candidates(mass, spans, score, (n, n + 1))
    kept = select(candidates, budget, mode=BUDGET_ONLY, skip_oversized=skip_oversized)
    return [(candidates[i].begin, candidates[i].end) for i in sorted(kept.ordinals)]


def is_kept(evidence: Span, kept: Sequence[Span]) -> bool:
    """Whether the first EVIDENCE_TOKENS of the evidence lie inside of what is kept, over touching ranges."""
    place, end = evidence[0], min(evidence[1], evidence[0] + EVIDENCE_TOKENS)
    for begin, last in kept:
        if begin <= place < last:
            place = last
    return place >= end


def unit_segments(n: int, units: ArrayLike) -> list[Span]:
    """Segments at known unit starts, of the sizes that probes write; chunks where no unit is known."""
    if len(np.asarray(units)) < 2:
        return fixed_chunks(n, CHUNK)
    scores = np.zeros(n, dtype=np.float32)
    scores[np.asarray(units)] = 1.0
    return segments(scores, n, threshold=0.5, min_segment=MIN_SEGMENT, max_segment=MAX_SEGMENT)


def f1(predicted: ArrayLike, wanted: ArrayLike) -> dict[str, float]:
    """Precision, recall and their harmonic mean of exact token positions."""
    found, true = set(np.asarray(predicted).tolist()), set(np.asarray(wanted).tolist())
    both = len(found & true)
    precision, recall = both / max(len(found), 1), both / max(len(true), 1)
    return {"precision": precision, "recall": recall, "f1": 2 * precision * recall / max(precision + recall, 1e-9)}
