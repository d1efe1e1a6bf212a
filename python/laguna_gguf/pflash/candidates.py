"""From masses to candidates: chunks, scores of ranges, and which ranges must be kept."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from operator import index
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from laguna_gguf.errors import QueryError, SelectionError
from laguna_gguf.pflash.segmentation import Span, segments
from laguna_gguf.pflash.selection import INVALID_INPUT, Candidate

MIN_BOUNDARIES = 4
"""A probe that finds fewer boundaries in the context has not understood the text; fixed chunks do better."""

MAX_REQUIRED = 64
"""Required spans that a caller may give. Pins derived from a chat are not limited."""

Score = Literal["sum", "density", "mean"]


def chunk_size_for(n_tokens: int) -> int:
    """Tokens in a fixed chunk of a prompt of `n_tokens`, where no size is configured."""
    if n_tokens < 500:
        return 128
    return 512 if n_tokens < 3000 else 1024


def fixed_chunks(n_tokens: int, size: int) -> list[Span]:
    """Chunks of `size` tokens from the start on; the last one may be shorter."""
    return [(begin, min(begin + size, n_tokens)) for begin in range(0, n_tokens, size)]


def cut_chunks(n_tokens: int, size: int, query: Span, required: Iterable[Span]) -> list[Span]:
    """Fixed chunks, cut where the query and pinned spans begin and end, so that a role header in a chunk does not keep
    all of it."""
    cuts = {*range(0, n_tokens, size), n_tokens, *forced_cuts(query, required)}
    return list(pairwise(sorted(cuts)))


def forced_cuts(query: Span, required: Iterable[Span] = ()) -> list[int]:
    """Where segments must be cut, so that only what has to be kept is kept: both edges of query and required spans."""
    return sorted({edge for span in (query, *required) for edge in span})


def probe_segments(
    scores: ArrayLike,
    query: Span,
    *,
    threshold: float,
    min_segment: int,
    max_segment: int,
    required: Iterable[Span] = (),
    subunit: ArrayLike | None = None,
    suffix_candidates: bool = False,
    at_least: int = MIN_BOUNDARIES,
) -> list[Span] | None:
    """Segments of a probed prompt, or None when its context has fewer than `at_least` boundaries.

    The context is what stands before the query, with `suffix_candidates` also what follows it. Elsewhere no boundary is
    taken. Arguments and errors otherwise as in `segmentation.segments`.
    """
    inside = np.array(scores, dtype=np.float32)  # a copy
    n = inside.size
    inside[query[0] : query[1] if suffix_candidates else n] = 0.0
    if int((inside[1:] > float(threshold)).sum()) < at_least:
        return None
    return segments(
        inside,
        n,
        threshold=threshold,
        min_segment=min_segment,
        max_segment=max_segment,
        forced=forced_cuts(query, required),
        subunit=subunit,
    )


def range_scores(mass: ArrayLike, spans: Sequence[Span], score: Score) -> NDArray[np.float64]:
    """Scores [n_spans] of token ranges: the `sum` of their mass, or mass per token (`density`, and `mean`, which is
    the same of an importance that does not sum to 1)."""
    values = np.asarray(mass, dtype=np.float64)
    edges = np.asarray(spans, dtype=np.int64).reshape(-1, 2)
    if not len(edges):
        return np.zeros(0)
    # reduceat sums [edge[i], edge[i+1]); every second of these is a range, and the zero lets the last one end at n
    sums = np.add.reduceat(np.append(values, 0.0), edges.ravel())[::2]
    return sums if score == "sum" else sums / (edges[:, 1] - edges[:, 0])


def mix(masses: ArrayLike, weights: ArrayLike) -> NDArray[np.float64]:
    """Mass [n] of several query windows, from the mass [n_windows, n] and the weight [n_windows] of each."""
    return np.average(np.asarray(masses, dtype=np.float64), axis=0, weights=np.asarray(weights, dtype=np.float64))


def lifts(mass: ArrayLike, spans: Sequence[Span]) -> NDArray[np.float64]:
    """How many times more mass a token of each range has than under uniform attention [n_spans]; mass sums to 1."""
    return range_scores(mass, spans, "density") * np.asarray(mass).size


def overlaps(spans: Sequence[Span], others: Sequence[Span]) -> NDArray[np.bool_]:
    """For each of `spans` whether it shares a token with one of `others`, which are sorted and do not overlap."""
    edges = np.asarray(spans, dtype=np.int64).reshape(-1, 2)
    if not len(edges) or not others:
        return np.zeros(len(edges), dtype=bool)
    pinned = np.asarray(others, dtype=np.int64)
    first = np.searchsorted(pinned[:, 1], edges[:, 0], side="right")  # the first of others that ends behind the begin
    begins = np.append(pinned[:, 0], np.iinfo(np.int64).max)
    return begins[first] < edges[:, 1]


def mandatory(
    spans: Sequence[Span], query: Span, required: Sequence[Span] = (), *, suffix_candidates: bool = False
) -> NDArray[np.bool_]:
    """Which ranges must be kept: those that overlap the query or a required span, and all that end behind the query
    unless the suffix consists of candidates. `required` is sorted and does not overlap."""
    kept = overlaps(spans, [query]) | overlaps(spans, required)
    if not suffix_candidates and len(spans):
        kept |= np.asarray(spans, dtype=np.int64)[:, 1] > query[1]
    return kept


def make_candidates(
    mass: ArrayLike,
    spans: Sequence[Span],
    score: Score,
    query: Span,
    required: Sequence[Span] = (),
    *,
    suffix_candidates: bool = False,
) -> list[Candidate]:
    """Candidates of `spans`, numbered in source order."""
    scores = range_scores(mass, spans, score).tolist()
    flags = mandatory(spans, query, required, suffix_candidates=suffix_candidates).tolist()
    return [
        Candidate(ordinal, begin, end, value, flag)
        for ordinal, ((begin, end), value, flag) in enumerate(zip(spans, scores, flags, strict=True))
    ]


def merge(spans: Iterable[Span]) -> list[Span]:
    """The same tokens as sorted spans that neither overlap nor touch; empty spans vanish."""
    merged: list[Span] = []
    for begin, end in sorted(spans):
        if begin >= end:
            continue
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def check_required(required: Iterable[Sequence[int]], n_tokens: int) -> list[Span]:
    """A caller's required spans: at most 64, ordered, in range, not empty, not overlapping; else SelectionError."""
    try:
        spans = [(index(begin), index(end)) for begin, end in required]
    except (TypeError, ValueError) as error:
        raise _invalid(f"a required span is a pair of token positions: {error}") from error
    if len(spans) > MAX_REQUIRED:
        raise _invalid(f"{len(spans)} required spans; at most {MAX_REQUIRED} are accepted (join those that touch)")
    last = 0
    for begin, end in spans:
        if not last <= begin < end <= n_tokens:
            raise _invalid(
                f"required span [{begin}, {end}) after {last} in {n_tokens} tokens; "
                "needed ordered spans in range that are not empty and do not overlap"
            )
        last = end
    return spans


def check_query(query: Sequence[int], n_tokens: int, limit: int) -> Span:
    """A query span of 1..`limit` tokens with at least one token before it; else QueryError."""
    try:
        begin, end = (index(edge) for edge in query)
    except (TypeError, ValueError) as error:
        raise QueryError(f"the query is {query!r}; needed a pair of token positions") from error
    if not 0 < begin < end <= n_tokens or end - begin > limit:
        raise QueryError(
            f"the query is [{begin}, {end}) of {n_tokens} tokens; needed 1 to {limit} tokens inside the prompt with at "
            "least one token before them"
        )
    return begin, end


def _invalid(message: str) -> SelectionError:
    return SelectionError(message, INVALID_INPUT)
