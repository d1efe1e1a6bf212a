"""The strict selector: which candidates of a prompt are kept within an exact token budget.

Pure functions over ranges of tokens; what the scores mean and where the budget comes from is decided elsewhere
(`candidates`, `budget`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import index
from typing import NamedTuple

from laguna_gguf.errors import SelectionError
from laguna_gguf.pflash.segmentation import segments

BUDGET_ONLY = "budget_only"
TOP_P = "top_p"
MODES = (BUDGET_ONLY, TOP_P)

INVALID_INPUT = "invalid_input"
MANDATORY_EXCEEDS_BUDGET = "mandatory_query_exceeds_budget"
BUDGET_REACHED = "budget_reached"
TOP_P_REACHED = "top_p_reached"
CANDIDATES_EXHAUSTED = "candidates_exhausted"

__all__ = ["Candidate", "Selection", "segments", "select", "split"]


class Candidate(NamedTuple):
    """Tokens [begin, end) of the prompt, kept or dropped as one."""

    ordinal: int
    """Name of the candidate; unique, need not follow the source order."""
    begin: int
    end: int
    score: float
    """Any finite number; below zero counts as zero."""
    mandatory: bool = False


@dataclass(frozen=True)
class Selection:
    """What was kept."""

    ordinals: list[int]
    """In source order, that is by range."""
    retained_tokens: int
    retained_mass: float
    """Share of the optional candidates' weight that was kept, in [0, 1]; 1.0 when nothing was optional."""
    stop_reason: str
    """budget_reached, top_p_reached or candidates_exhausted."""


def select(
    candidates: Iterable[Candidate], budget: int, *, mode: str, top_p: float = 0.95, skip_oversized: bool = False
) -> Selection:
    """Keep all mandatory candidates, then optional ones by descending score (ties: lower ordinal) while they fit.

    `mode` is budget_only or top_p; the latter stops before the first candidate that finds the share `top_p` of the
    optional weight kept already. A candidate that does not fit ends the selection, or with `skip_oversized` is passed
    over. Weights are max(0, score) over the largest score, all equal when no score is positive.

    SelectionError with stop_reason invalid_input: budget <= 0, top_p outside (0, 1], another mode, empty, negative or
    overlapping ranges, duplicate ordinals, scores that are not finite. With stop_reason
    mandatory_query_exceeds_budget: what must be kept does not fit.
    """
    rows, budget = _checked(candidates, budget, mode, top_p)
    kept, room = _mandatory(rows, budget)
    optional = _ranked(row for row in rows if not row.mandatory)
    weights = _weights([row.score for row in optional])
    fill = _fill(optional, weights, room, top_p if mode == TOP_P else None, skip_oversized)
    return _selection(rows, kept | fill.ordinals, _share(fill.mass, weights), fill.stop_reason)


def split(
    head: Iterable[Candidate],
    other: Iterable[Candidate],
    budget: int,
    *,
    fraction: float = 0.5,
    mode: str,
    top_p: float = 0.95,
    skip_oversized: bool = False,
) -> Selection:
    """Two scorers share a budget B: `head` fills max(floor(B * fraction), min(mandatory, B)), `other` the remainder.

    Both lists hold the same candidates, only with other scores. `retained_mass` is measured with the scores of `head`,
    the stop reason is that of the second pass. Errors as in `select`; also invalid_input when the lists differ or
    `fraction` is outside (0, 1).
    """
    rows, budget = _checked(head, budget, mode, top_p)
    others, _ = _checked(other, budget, mode, top_p)
    if [row[:3] + row[4:] for row in rows] != [row[:3] + row[4:] for row in others]:
        raise _invalid("the two scorers rank different candidates; needed the same ordinals, ranges and mandatory ones")
    if not 0 < _number(fraction) < 1:
        raise _invalid(f"the split fraction is {fraction!r}; needed a number in (0, 1)")
    cutoff = top_p if mode == TOP_P else None
    kept, room = _mandatory(rows, budget)
    mandatory = budget - room

    first = _ranked(row for row in rows if not row.mandatory)
    weights = _weights([row.score for row in first])
    share = max(math.floor(budget * fraction), mandatory)
    by_head = _fill(first, weights, share - mandatory, cutoff, skip_oversized)

    rest = _ranked(row for row in others if not row.mandatory and row.ordinal not in by_head.ordinals)
    room -= by_head.tokens
    by_other = _fill(rest, _weights([row.score for row in rest]), room, cutoff, skip_oversized)

    optional = by_head.ordinals | by_other.ordinals
    mass = math.fsum(weight for row, weight in zip(first, weights, strict=True) if row.ordinal in optional)
    return _selection(rows, kept | optional, _share(mass, weights), by_other.stop_reason)


class _Fill(NamedTuple):
    ordinals: set[int]
    tokens: int
    mass: float
    stop_reason: str


def _fill(
    ranked: Sequence[Candidate], weights: Sequence[float], room: int, cutoff: float | None, skip_oversized: bool
) -> _Fill:
    """Keep from the best on; `cutoff` is the share of all weights after which nothing more is wanted."""
    total = sum(weights)  # in the same order as `mass` below, so that everything kept is exactly the share 1
    ordinals: set[int] = set()
    tokens = 0
    mass = 0.0
    stop = CANDIDATES_EXHAUSTED
    for row, weight in zip(ranked, weights, strict=True):
        if cutoff is not None and mass / total >= cutoff:
            return _Fill(ordinals, tokens, mass, TOP_P_REACHED)
        length = row.end - row.begin
        if length > room - tokens:
            stop = BUDGET_REACHED
            if not skip_oversized:
                break
            continue
        ordinals.add(row.ordinal)
        tokens += length
        mass += weight
    return _Fill(ordinals, tokens, mass, stop)


def _mandatory(rows: Sequence[Candidate], budget: int) -> tuple[set[int], int]:
    kept = {row.ordinal for row in rows if row.mandatory}
    needed = sum(row.end - row.begin for row in rows if row.mandatory)
    if needed > budget:
        raise SelectionError(
            f"what must be kept takes {needed} tokens, the budget is {budget}; raise the keep ratio, or require less",
            MANDATORY_EXCEEDS_BUDGET,
        )
    return kept, budget - needed


def _ranked(optional: Iterable[Candidate]) -> list[Candidate]:
    return sorted(optional, key=lambda row: (-max(0.0, row.score), row.ordinal))


def _weights(ranked_scores: Sequence[float]) -> list[float]:
    """Weights of scores in descending order. Divided by the largest, so that no sum overflows."""
    if not ranked_scores:
        return []
    largest = ranked_scores[0]
    return [max(0.0, score) / largest for score in ranked_scores] if largest > 0 else [1.0] * len(ranked_scores)


def _share(mass: float, weights: Sequence[float]) -> float:
    return min(1.0, mass / sum(weights)) if weights else 1.0


def _selection(rows: Sequence[Candidate], ordinals: set[int], mass: float, stop_reason: str) -> Selection:
    kept = [row for row in rows if row.ordinal in ordinals]
    return Selection([row.ordinal for row in kept], sum(row.end - row.begin for row in kept), mass, stop_reason)


def _checked(candidates: Iterable[Candidate], budget: int, mode: str, top_p: float) -> tuple[list[Candidate], int]:
    """The candidates in source order and the budget as int; SelectionError(invalid_input) says what is wrong."""
    if mode not in MODES:
        raise _invalid(f"the selector's mode is {mode!r}; needed {' or '.join(MODES)}")
    if not 0 < _number(top_p) <= 1:
        raise _invalid(f"top_p is {top_p!r}; needed a number in (0, 1]")
    try:
        budget = index(budget)
        rows = [
            Candidate(index(ordinal), index(begin), index(end), float(score), bool(mandatory))
            for ordinal, begin, end, score, mandatory in candidates
        ]
    except (TypeError, ValueError, OverflowError) as error:
        raise _invalid(f"budget, ordinals and ranges are integers and scores numbers: {error}") from error
    if budget <= 0:
        raise _invalid(f"the budget is {budget} tokens; needed at least 1")
    rows.sort(key=lambda row: row.begin)
    if len({row.ordinal for row in rows}) != len(rows):
        raise _invalid("an ordinal occurs twice; needed one for each candidate")
    last = 0
    for ordinal, begin, end, score, _ in rows:
        if not last <= begin < end:
            raise _invalid(
                f"candidate {ordinal} has the range [{begin}, {end}) after {last}; "
                "needed ranges that are not negative, not empty and do not overlap"
            )
        if not math.isfinite(score):
            raise _invalid(f"candidate {ordinal} has the score {score}; needed a finite number")
        last = end
    return rows, budget


def _number(value: float) -> float:
    try:
        return math.nan if isinstance(value, str) else float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan  # fails every range check


def _invalid(message: str) -> SelectionError:
    return SelectionError(message, INVALID_INPUT)
