"""What is kept of a prompt that has been read: candidates, budget, selection, and the target's own count of tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from laguna_gguf.errors import BudgetError
from laguna_gguf.pflash import legacy as chunks
from laguna_gguf.pflash.budget import MAX_ATTEMPTS, Budget, droppable_budget, kept_tokens, tightened
from laguna_gguf.pflash.candidates import (
    Score,
    chunk_size_for,
    cut_chunks,
    fixed_chunks,
    make_candidates,
    merge,
    probe_segments,
)
from laguna_gguf.pflash.probe import SegmentProbe
from laguna_gguf.pflash.scorer import Scores
from laguna_gguf.pflash.scorers import Reading
from laguna_gguf.pflash.segmentation import Span
from laguna_gguf.pflash.selection import (
    BUDGET_ONLY,
    BUDGET_REACHED,
    CANDIDATES_EXHAUSTED,
    Candidate,
    Selection,
    select,
    split,
)
from laguna_gguf.pflash.settings import SelectionSettings

SHORTEST_CHUNK = 32
"""Fixed chunks of a chat become this short where its budget is small."""

CountKept = Callable[[list[Span]], int]
"""Target tokens of the text that spans decode to."""


@dataclass(frozen=True)
class Prompt:
    """A checked prompt and what is asked of it."""

    ids: NDArray[np.int32]
    keep_ratio: float
    """A float32 value."""
    query: Span
    required: Sequence[Span] = ()
    """Sorted, not overlapping; kept whole."""
    suffix_candidates: bool = False
    budget: Budget | None = None
    """Planned for a chat, whose fixed chunks are cut at the edges of what must be kept. None: by whole chunks."""

    @property
    def n_tokens(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class Kept:
    """What is kept, and how that came about."""

    spans: list[Span]
    """Sorted; spans that touch are one."""
    budget: int
    selection: Selection
    candidates: list[Candidate]
    """In source order."""
    chunk_size: int
    """0 with segments of the probe."""
    score: Score
    """What a candidate's score is of its tokens' mass."""
    target_tokens: int | None = None
    """Of the kept text; None where they are not counted."""


def chunk_size(n_tokens: int, settings: SelectionSettings) -> int:
    """Tokens in a fixed chunk of a prompt of n_tokens."""
    return settings.select_chunk_size or chunk_size_for(n_tokens)


def keep(
    prompt: Prompt,
    reading: Reading,
    settings: SelectionSettings,
    probe: SegmentProbe | None,
    *,
    n_target_tokens: int | None = None,
    count_kept: CountKept | None = None,
) -> Kept:
    """The strict selection.

    With n_target_tokens (of the whole prompt) and count_kept, what is kept also fits the same share of target tokens:
    the budget is tightened until its text does, three times at most. SelectionError: what must be kept exceeds the
    budget. BudgetError: no budget meets the ceiling.
    """
    size = chunk_size(prompt.n_tokens, settings)
    budget = prompt.budget or _budget(prompt, size)
    left = budget.tokens - sum(end - begin for begin, end in (prompt.query, *prompt.required))
    spans = _segments(prompt, reading, settings, probe, left)
    if prompt.budget is not None and settings.select_chunk_size is None and left < size:
        size = max(SHORTEST_CHUNK, left // 2)  # of a chat nothing but pins would fit
    result = _select(prompt, reading, settings, budget.tokens, spans, size)
    if n_target_tokens is None or count_kept is None:
        return result
    ceiling, wanted = budget.ceiling(n_target_tokens), budget.tokens
    for attempt in range(MAX_ATTEMPTS + 1):
        count = count_kept(result.spans)
        if count <= ceiling:
            return replace(result, target_tokens=count)
        if attempt < MAX_ATTEMPTS:
            # long segments: a budget that the last selection meets as well would change nothing
            wanted = min(tightened(wanted, ceiling, count), max(1, result.selection.retained_tokens - 1))
            if prompt.budget is not None:  # a chat falls back on what must be kept, which may still fit
                wanted = max(wanted, sum(row.end - row.begin for row in result.candidates if row.mandatory))
            result = _select(prompt, reading, settings, wanted, spans, size)
    raise BudgetError(
        f"the kept text still takes {count} target tokens after {MAX_ATTEMPTS} tighter selections; the ceiling is "
        f"{ceiling} of {n_target_tokens}. Raise the keep ratio"
    )


def keep_chunks(prompt: Prompt, reading: Reading) -> Kept:
    """The chunk selection of Qwen3-0.6B without a strict mode. Neither query nor budget is exact: whole chunks."""
    scores = reading.ranking.mass
    spans = chunks.select_chunks(prompt.ids, scores, prompt.keep_ratio)
    ranges = fixed_chunks(prompt.n_tokens, chunks.CHUNK)
    inside = np.zeros(prompt.n_tokens, dtype=bool)
    for begin, end in spans:
        inside[begin:end] = True
    candidates = make_candidates(scores, ranges, "mean", prompt.query)
    ordinals = [ordinal for ordinal, (begin, _) in enumerate(ranges) if inside[begin]]
    total = float(scores.sum())
    n_kept = int(inside.sum())
    selection = Selection(
        ordinals,
        n_kept,
        float(scores[inside].sum()) / total if total > 0 else 1.0,
        CANDIDATES_EXHAUSTED if n_kept == prompt.n_tokens else BUDGET_REACHED,
    )
    budget = min(prompt.n_tokens, len(ordinals) * chunks.CHUNK)
    return Kept(spans, budget, selection, candidates, chunks.CHUNK, "mean")


def _budget(prompt: Prompt, size: int) -> Budget:
    kept = kept_tokens(prompt.n_tokens, size, prompt.query, prompt.required, suffix_candidates=prompt.suffix_candidates)
    return droppable_budget(prompt.n_tokens, kept, prompt.keep_ratio)


def _chunks(prompt: Prompt, size: int) -> list[Span]:
    if prompt.budget is None:
        return fixed_chunks(prompt.n_tokens, size)
    return cut_chunks(prompt.n_tokens, size, prompt.query, prompt.required)


def _segments(
    prompt: Prompt, reading: Reading, settings: SelectionSettings, probe: SegmentProbe | None, left: int
) -> list[Span] | None:
    """Segments of the probe; None where fixed chunks are to be taken.

    What is longer than half of `left`, the budget beside what must be kept, would hardly ever be kept, so it is cut: a
    long text without units of its own would be lost whole otherwise.
    """
    probed = reading.probed
    if probe is None or probed is None or probed.probe is None:
        return None
    forced = {"at_least": 0} if settings.select_segments == "probe" else {}
    return probe_segments(
        probed.probe,
        prompt.query,
        threshold=probe.threshold,
        min_segment=probe.min_segment,
        max_segment=min(probe.max_segment, max(probe.min_segment, left // 2)),
        required=prompt.required,
        subunit=probed.subunit,
        suffix_candidates=prompt.suffix_candidates,
        **forced,
    )


def _select(
    prompt: Prompt,
    reading: Reading,
    settings: SelectionSettings,
    budget: int,
    segments: list[Span] | None,
    size: int,
) -> Kept:
    spans = _chunks(prompt, size) if segments is None else segments
    wanted: Score = "sum" if settings.select_score == "sum" else "density"
    if settings.select_score == "auto" and segments is None:
        wanted = "sum"
    shown: Score = "mean" if reading.ranking.is_importance else wanted

    def ranked(scores: Scores, how: Score) -> list[Candidate]:
        return make_candidates(
            scores.mass, spans, how, prompt.query, prompt.required, suffix_candidates=prompt.suffix_candidates
        )

    candidates = ranked(reading.ranking, shown)
    choose: Callable[..., Selection] = partial(
        select if reading.second is None else split,
        mode=settings.select_mode or BUDGET_ONLY,
        top_p=settings.select_top_p,
        skip_oversized=segments is not None,
    )
    if reading.second is None:
        selection = choose(candidates, budget)
    else:
        selection = choose(candidates, ranked(reading.second, "mean"), budget, fraction=settings.select_split)
    ranges = {candidate.ordinal: (candidate.begin, candidate.end) for candidate in candidates}
    spans = merge(ranges[ordinal] for ordinal in selection.ordinals)
    return Kept(spans, budget, selection, candidates, size if segments is None else 0, shown)
