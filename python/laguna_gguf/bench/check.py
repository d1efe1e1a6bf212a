"""`bench --check`: is the text with drafts the text without, and if not, is rounding the reason?

Decoding several rows together rounds differently from decoding one, in llama.cpp with or without a drafter. So two runs
may part where two tokens are almost equally likely. At the first difference the gap between the plain run's two best
logits is compared with what batch shapes do to the logits at that very place, measured there.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import llama_cpp
import numpy as np
from numpy.typing import NDArray

from laguna_gguf.bench.engines import Run, SessionEngine
from laguna_gguf.bench.text import output_hash, repetition
from laguna_gguf.dflash.session import SpecSession

SHAPES = (2, 3, 5, 8, 16)
"""Rows of the last decode that are compared with one row."""


@dataclass(frozen=True)
class Divergence:
    """The first difference of a text from the plain one. Logits in the model's own units."""

    position: int
    """Index of the token in the text."""
    gap: float
    """Between the plain run's two best logits there."""
    batch_difference: float
    """Largest change of any logit there between batch shapes."""

    @property
    def excused(self) -> bool:
        """Whether rounding can be the reason."""
        return self.gap <= self.batch_difference


@dataclass(frozen=True)
class Checked:
    """One prompt at one depth; rates in tokens/s, one a repetition."""

    prompt: int
    label: str
    run: Run
    plain: Run
    rates: tuple[float, ...]
    plain_rates: tuple[float, ...]
    divergence: Divergence | None

    @property
    def ok(self) -> bool:
        return self.divergence is None or self.divergence.excused

    def as_dict(self) -> dict[str, Any]:
        """Plain types, ready for json; the keys of a bench row and those of the check."""
        run, divergence = self.run, self.divergence
        return {
            "test": f"check {self.prompt} {self.label}",
            "t_s": statistics.fmean(self.rates),
            "std": statistics.stdev(self.rates) if len(self.rates) > 1 else 0.0,
            "plain_t_s": statistics.fmean(self.plain_rates),
            "tau": (len(run.tokens) - 1) / run.rounds if run.rounds else None,
            "acceptance": run.accepted / run.drafted if run.drafted else None,
            "ratio": statistics.median(a / b for a, b in zip(self.rates, self.plain_rates, strict=True)),
            "identical": divergence is None,
            "first_difference": divergence.position if divergence else None,
            "gap": divergence.gap if divergence else None,
            "batch_difference": divergence.batch_difference if divergence else None,
            "ok": self.ok,
            "repetition": repetition(run.tokens),
            "hash": output_hash([run.tokens]),
            "plain_hash": output_hash([self.plain.tokens]),
        }


def check(
    session: SpecSession, depths: Iterable[int | str], prompts: Sequence[Sequence[int]], n: int, repetitions: int
) -> list[Checked]:
    """n greedy tokens after each prompt, plainly and at each depth, through the same session."""
    plain_engine = SessionEngine(session, 0)
    engines = [SessionEngine(session, depth) for depth in depths]
    for engine in (plain_engine, *engines):
        engine.generate(prompts[0], min(n, 16))
    results = []
    for number, prompt in enumerate(prompts, 1):
        plain: list[Run] = []
        runs: list[list[Run]] = [[] for _ in engines]
        for _ in range(repetitions):
            plain.append(plain_engine.generate(prompt, n))
            for engine, mine in zip(engines, runs, strict=True):
                mine.append(engine.generate(prompt, n))
        for engine, mine in zip(engines, runs, strict=True):
            results.append(
                Checked(
                    number,
                    engine.label,
                    mine[0],
                    plain[0],
                    _rates(mine),
                    _rates(plain),
                    _divergence(plain_engine, engine, prompt, plain[0].tokens, mine[0].tokens),
                )
            )
    return results


def _rates(runs: Sequence[Run]) -> tuple[float, ...]:
    return tuple(1e3 * (len(run.tokens) - 1) / run.ms for run in runs)


def _divergence(
    plain_engine: SessionEngine, engine: SessionEngine, prompt: Sequence[int], plain: Sequence[int], text: Sequence[int]
) -> Divergence | None:
    differs = [i for i, (a, b) in enumerate(zip(plain, text, strict=True)) if a != b]
    if not differs:
        return None
    tokens = [*prompt, *plain[: differs[0]]]
    one = _last_logits(plain_engine, tokens, len(prompt), 1)
    others = [_last_logits(plain_engine, tokens, len(prompt), rows) for rows in SHAPES if rows < len(tokens)]
    others.append(_last_logits(engine, tokens, len(tokens), 0))  # a prompt is decoded in other pieces when captured
    second, first = np.sort(one)[-2:]
    difference = max(float(np.abs(other - one).max()) for other in others)
    return Divergence(differs[0], float(first - second), difference)


def _last_logits(engine: SessionEngine, tokens: Sequence[int], n_prompt: int, rows: int) -> NDArray[np.float32]:
    """Logits [n_vocab] after `tokens`: the prompt at once, then one by one, then the last `rows` in one decode."""
    session = engine.session
    engine.begin(0)
    first = len(tokens) - rows
    session.eval(tokens[: min(n_prompt, first)])
    for i in range(n_prompt, first):
        session.eval(tokens[i : i + 1])
    if rows:
        session.eval(tokens[first:])
    return np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(session.ctx, -1), (session.n_vocab(),)).copy()
