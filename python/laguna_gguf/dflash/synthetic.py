"""Synthetic acceptance, for benchmarks: a coin decides which drafts are accepted, not the target.

With random weights, or prompts that say nothing, real acceptance is meaningless; the cost of a round is not. The
definition is that of llama-server's --spec-synth-len: each draft of an accepted run is accepted with one probability p,
chosen so that a round with the most drafts K brings L tokens on average,

    1 + p + p^2 + ... + p^K = L.

A round with fewer drafts than K keeps p and so brings fewer tokens. The generated text is not the target's.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import llama_cpp

from laguna_gguf.dflash.stats import SpecStats
from laguna_gguf.errors import ConfigError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SyntheticStats(SpecStats):
    """SpecStats of a session with synthetic acceptance: tau and acceptance were asked for, not measured."""

    spec_synth_len: float
    """Tokens a round that were asked for."""

    @classmethod
    def of(cls, stats: SpecStats, spec_synth_len: float) -> SyntheticStats:
        values = {field.name: getattr(stats, field.name) for field in dataclasses.fields(SpecStats)}
        return cls(**values, spec_synth_len=spec_synth_len)


class SyntheticAcceptance:
    """Decides for each draft of a round, in order, whether it counts as accepted."""

    def __init__(self, mean_length: float, n_max: int, is_end: Callable[[int], bool]) -> None:
        """mean_length: tokens a round (L). n_max: most drafts a round (K). is_end: end-of-generation tokens, which are
        not accepted since they would end the benchmark. Raises ConfigError as `acceptance_probability` does."""
        self.mean_length = float(mean_length)
        self.probability = acceptance_probability(mean_length, n_max)
        self._is_end = is_end
        self._random = random.Random(0)

    def seed(self, seed: int) -> None:
        """Begin a sequence of decisions that the seed determines."""
        self._random.seed(seed)

    def decide(self, sampled: int, drafted: int | None) -> tuple[int, bool]:
        """(token to emit, whether it is the accepted draft), from the target's own token and the draft, if any."""
        if drafted is not None and self._random.random() < self.probability and not self._is_end(drafted):
            return drafted, True
        return sampled, False


def make_synthetic(mean_length: float | None, n_max: int, model: Any) -> SyntheticAcceptance | None:
    """For a llama_model and a depth policy that drafts at most n_max; None for real acceptance. Says so in the log."""
    if mean_length is None:
        return None
    vocab = llama_cpp.llama_model_get_vocab(model)
    acceptance = SyntheticAcceptance(mean_length, n_max, lambda token: llama_cpp.llama_vocab_is_eog(vocab, token))
    logger.warning(
        "synthetic acceptance is on (%g tokens a round with %d drafts): for benchmarks; the text is not the model's",
        mean_length,
        n_max,
    )
    return acceptance


def acceptance_probability(mean_length: Any, n_max: int) -> float:
    """The p in 0..1 with 1 + p + ... + p^n_max = mean_length; ConfigError outside 1..n_max + 1 or without drafts."""
    number = isinstance(mean_length, (int, float)) and not isinstance(mean_length, bool)
    if number and n_max < 1:
        raise ConfigError(f"spec_synth_len is {mean_length!r} but nothing is drafted; needed draft_max >= 1 or 'auto'")
    if not number or not math.isfinite(mean_length) or not 1 <= mean_length <= n_max + 1:
        raise ConfigError(
            f"spec_synth_len is {mean_length!r}; needed a number of tokens a round in 1..{n_max + 1} (most drafts + 1)"
        )
    if mean_length == n_max + 1:
        return 1.0
    low, high = 0.0, 1.0
    for _ in range(60):
        p = (low + high) / 2
        if sum(p**i for i in range(n_max + 1)) < mean_length:
            low = p
        else:
            high = p
    return low
