"""Measuring: every repetition runs every way of decoding on every prompt, one after the other.

Interleaved like this, a machine that slows down for a minute slows all of them down, and the ratios of one repetition
stay comparable.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from laguna_gguf.bench.engines import Engine, Generator, Run
from laguna_gguf.bench.prompts import Prompts, filler

logger = logging.getLogger(__name__)

WARM_UP_TOKENS = 16

T = TypeVar("T")


@dataclass(frozen=True)
class Case:
    """One test in llama-bench's sense: n_prompt tokens processed or n_gen generated, n_depth of context before."""

    n_prompt: int = 0
    n_gen: int = 0
    n_depth: int = 0

    @property
    def name(self) -> str:
        test = f"pp{self.n_prompt}" if self.n_prompt else f"tg{self.n_gen}"
        return f"{test} @ d{self.n_depth}" if self.n_depth else test


@dataclass
class Generations:
    """Runs of one engine in one case: by kind, then by repetition, one Run a prompt."""

    engine: Generator
    runs: dict[str, list[list[Run]]] = field(default_factory=lambda: defaultdict(list))


@dataclass
class Promptings:
    """Milliseconds of one engine in one prompt-processing case, by repetition."""

    engine: Engine
    ms: list[float] = field(default_factory=list)


def measure_generation(
    engines: Sequence[Generator], case: Case, prompts: Prompts, repetitions: int
) -> list[Generations]:
    """Generate case.n_gen tokens after each prompt (behind case.n_depth tokens of filler) with each engine."""
    depth = filler(prompts, case.n_depth)
    results = [Generations(engine) for engine in engines]
    first = next(iter(prompts.values()))[0]
    for engine in engines:
        engine.generate(first, min(case.n_gen, WARM_UP_TOKENS))
    for repetition in range(repetitions):
        logger.info("%s, repetition %d of %d", case.name, repetition + 1, repetitions)
        for kind, group in prompts.items():
            for result in results:
                result.runs[kind].append([])
            for number, prompt in enumerate(group):
                for result in _rotated(results, repetition):
                    run = result.engine.generate(depth + prompt, case.n_gen, seed=repetition * len(group) + number)
                    result.runs[kind][-1].append(run)
    return results


def measure_prompt(engines: Sequence[Engine], case: Case, prompts: Prompts, repetitions: int) -> list[Promptings]:
    """Process case.n_prompt tokens behind case.n_depth others with each engine."""
    tokens = filler(prompts, case.n_depth + case.n_prompt)
    before, prompt = tokens[: case.n_depth], tokens[case.n_depth :]
    results = [Promptings(engine) for engine in engines]
    for engine in engines:
        engine.process(prompt)
    for repetition in range(repetitions):
        logger.info("%s, repetition %d of %d", case.name, repetition + 1, repetitions)
        for result in _rotated(results, repetition):
            result.ms.append(result.engine.process(prompt, before))
    return results


def longest(cases: Sequence[Case], prompts: Prompts) -> int:
    """Context that the cases need, in tokens."""
    prompt = max(len(tokens) for group in prompts.values() for tokens in group)
    return max(case.n_depth + (case.n_prompt or prompt + case.n_gen) + 1 for case in cases)


def _rotated(results: list[T], by: int) -> list[T]:
    """Whoever runs first in one repetition does not in the next: its neighbours warm caches and cores for it."""
    by %= len(results)
    return results[by:] + results[:by]
