"""Cutting a prompt into the segments that the selector ranks, at boundaries that a segment probe found."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import index

import numpy as np
from numpy.typing import ArrayLike, NDArray

from laguna_gguf.errors import SelectionError

Span = tuple[int, int]


def segments(
    scores: ArrayLike,
    n: int,
    *,
    threshold: float,
    min_segment: int,
    max_segment: int,
    forced: Iterable[int] = (),
    subunit: ArrayLike | None = None,
) -> list[Span]:
    """Segments [begin, end) that cover tokens [0, n).

    `scores` [n]: how likely a unit of text starts at each token, in [0, 1]; a score above `threshold` is a boundary.
    Boundaries closer than `min_segment` to the cut before them are dropped; `forced` cuts (0..n) never are. A piece
    longer than `max_segment` is cut again at the first of the best positive scores (`subunit` [n] where given) that
    leave at least half of max_segment before and min_segment on both sides, else after max_segment tokens.

    SelectionError (stop_reason invalid_input): n < 1, arrays of another shape or with values that are not finite,
    threshold outside (0, 1), min_segment < 1, max_segment < min_segment, a forced cut outside 0..n.
    """
    try:
        n, shortest, longest = index(n), index(min_segment), index(max_segment)
        cuts = sorted({index(cut) for cut in forced})
        threshold = float(threshold)
    except (TypeError, ValueError) as error:
        raise _invalid(f"lengths and cuts are integers, the threshold is a number: {error}") from error
    if n < 1 or not 1 <= shortest <= longest:
        raise _invalid(
            f"n is {n}, min_segment {shortest}, max_segment {longest}; "
            "needed n >= 1 and 1 <= min_segment <= max_segment"
        )
    if not 0 < threshold < 1:
        raise _invalid(f"the boundary threshold is {threshold}; needed a number in (0, 1)")
    if cuts and not 0 <= cuts[0] <= cuts[-1] <= n:
        raise _invalid(f"forced cuts run from {cuts[0]} to {cuts[-1]}; needed cuts in 0..{n}")
    unit = _scores(scores, n, "scores")
    inner = unit if subunit is None else _scores(subunit, n, "subunit scores")

    edges = _edges(np.flatnonzero(unit > threshold).tolist(), [cut for cut in cuts if 0 < cut < n], shortest)
    pieces: list[Span] = []
    for begin, end in zip([0, *edges], [*edges, n], strict=True):
        _divide(inner, begin, end, shortest, longest, pieces)
    return pieces


def _edges(natural: Sequence[int], forced: Sequence[int], shortest: int) -> list[int]:
    kept: list[int] = []
    always = set(forced)
    last = 0
    for cut in sorted(always.union(natural)):
        if cut in always or cut - last >= shortest:
            kept.append(cut)
            last = cut
    return kept


def _divide(scores: NDArray, begin: int, end: int, shortest: int, longest: int, pieces: list[Span]) -> None:
    while end - begin > longest:
        low = begin + max(shortest, longest // 2)
        high = min(end - shortest, begin + longest)
        cut = begin + longest
        if low <= high:
            best = low + int(np.argmax(scores[low : high + 1]))
            if scores[best] > 0:
                cut = best
        pieces.append((begin, cut))
        begin = cut
    pieces.append((begin, end))


def _scores(values: ArrayLike, n: int, what: str) -> NDArray:
    try:
        array = np.asarray(values)
        if np.iscomplexobj(array):
            raise TypeError("they are complex")
        if not np.issubdtype(array.dtype, np.floating):
            array = array.astype(np.float64)
    except (TypeError, ValueError) as error:
        raise _invalid(f"{what} are not numbers: {error}") from error
    if array.shape != (n,):
        raise _invalid(f"{what} have the shape {array.shape}; needed ({n},)")
    if not np.isfinite(array).all():
        raise _invalid(f"{what} hold a value that is not finite")
    return array


def _invalid(message: str) -> SelectionError:
    return SelectionError(message, "invalid_input")
