"""From times to figures: one row a test, way of decoding and kind of prompt."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from laguna_gguf.bench.engines import Run
from laguna_gguf.bench.measure import Case, Generations, Promptings
from laguna_gguf.bench.text import output_hash, repetition

ALL = "all"


@dataclass(frozen=True)
class Row:
    """What is printed. Rates in tokens/s over `samples_ts`, one a repetition; None where a figure has no meaning."""

    test: str
    prompts: str
    """Kind of prompt, or "all"."""
    engine: str
    t_s: float
    """Mean over the repetitions, as llama-bench has it."""
    std: float
    tau: float | None
    """Tokens a round, the target's own included."""
    acceptance: float | None
    """Accepted by drafted tokens, 0..1."""
    ratio: float
    """Median over the repetitions of this rate by plain decoding's."""
    n_prompt: int
    n_gen: int
    n_depth: int
    drafted: int
    accepted: int
    draft_ms: float | None = None
    """Mean time of a round spent drafting, and verifying, in ms."""
    verify_ms: float | None = None
    repetition: float | None = None
    """Share of 4-grams that occurred before in the same text, mean over the texts."""
    hash: str | None = None
    """Of the first repetition's token ids; equal hashes are equal texts."""
    identical: str | None = None
    """Texts equal to plain decoding's in the same repetition, "5/6"."""
    baseline: bool = False
    """Whether this is the plain decoding that `ratio` compares with."""
    synthetic: bool = False
    """Drafts were accepted at random (--spec-synth-len): tau and acceptance were asked for, the text is meaningless."""
    samples_ts: tuple[float, ...] = field(default=())

    def as_dict(self) -> dict[str, Any]:
        """Plain types, ready for json."""
        return {**asdict(self), "samples_ts": list(self.samples_ts)}


def generation_rows(case: Case, results: Sequence[Generations]) -> list[Row]:
    """Rows of one case by kind of prompt. Of the ways that decode plainly the fastest is what all are compared with; it
    bears the test's bare name."""
    plain = [result for result in results if result.engine.plain]
    best = max(plain, key=lambda result: statistics.median(_rates(result, ALL)))
    kinds = list(best.runs)
    rows = []
    for result in [best, *(r for r in results if r is not best)]:
        label = "" if result is best else result.engine.label or result.engine.name
        rows += [
            _generation_row(case, result, best, kind, label) for kind in (kinds if len(kinds) == 1 else [*kinds, ALL])
        ]
    return rows


def prompt_rows(case: Case, results: Sequence[Promptings]) -> list[Row]:
    """Rows of one prompt-processing case, compared as those of `generation_rows`."""
    plain = [result for result in results if result.engine.plain]
    best = min(plain, key=lambda result: statistics.median(result.ms))
    rows = []
    for result in [best, *(r for r in results if r is not best)]:
        rates = [case.n_prompt / ms * 1e3 for ms in result.ms]
        label = "" if result is best else result.engine.label or result.engine.name
        rows.append(
            Row(
                test=test_name(case, label),
                prompts=ALL,
                engine=result.engine.name,
                t_s=statistics.fmean(rates),
                std=_std(rates),
                tau=None,
                acceptance=None,
                ratio=statistics.median(b / a for a, b in zip(result.ms, best.ms, strict=True)),
                n_prompt=case.n_prompt,
                n_gen=0,
                n_depth=case.n_depth,
                drafted=0,
                accepted=0,
                baseline=result is best,
                samples_ts=tuple(rates),
            )
        )
    return rows


def test_name(case: Case, label: str) -> str:
    """ "tg128 dflash n=7 @ d4096"."""
    test, _, depth = case.name.partition(" @ ")
    return " ".join(filter(None, [test, label, depth and f"@ {depth}"]))


def _generation_row(case: Case, result: Generations, plain: Generations, kind: str, label: str) -> Row:
    rates, others = _rates(result, kind), _rates(plain, kind)
    repetitions, plain_repetitions = _runs(result, kind), _runs(plain, kind)
    runs = [run for runs in repetitions for run in runs]
    drafted, accepted = sum(run.drafted for run in runs), sum(run.accepted for run in runs)
    same = [
        a.tokens == b.tokens
        for mine, theirs in zip(repetitions, plain_repetitions, strict=True)
        for a, b in zip(mine, theirs, strict=True)
    ]
    drafts = bool(label) and drafted > 0
    rounds = max(sum(run.rounds for run in runs), 1)
    draft_ms, verify_ms = sum(run.draft_ms for run in runs) / rounds, sum(run.verify_ms for run in runs) / rounds
    return Row(
        test=test_name(case, label),
        prompts=kind,
        engine=result.engine.name,
        t_s=statistics.fmean(rates),
        std=_std(rates),
        tau=sum(len(run.tokens) - 1 for run in runs) / rounds if drafts else None,
        acceptance=accepted / drafted if drafts else None,
        ratio=statistics.median(a / b for a, b in zip(rates, others, strict=True)),
        n_prompt=0,
        n_gen=case.n_gen,
        n_depth=case.n_depth,
        drafted=drafted,
        accepted=accepted,
        draft_ms=draft_ms or None,
        verify_ms=verify_ms or None,
        repetition=statistics.fmean(repetition(run.tokens) for run in runs),
        hash=output_hash(run.tokens for run in repetitions[0]),
        identical=None if result.engine.synthetic else f"{sum(same)}/{len(same)}",
        baseline=result is plain,
        synthetic=result.engine.synthetic,
        samples_ts=tuple(rates),
    )


def _runs(result: Generations, kind: str) -> list[list[Run]]:
    """By repetition; the kinds one after the other for "all"."""
    if kind in result.runs:
        return result.runs[kind]
    return [[run for group in groups for run in group] for groups in zip(*result.runs.values(), strict=True)]


def _rates(result: Generations, kind: str) -> list[float]:
    """Tokens/s of each repetition, pooled over its prompts."""
    return [
        1e3 * sum(len(run.tokens) - 1 for run in runs) / sum(run.ms for run in runs) for runs in _runs(result, kind)
    ]


def _std(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0
