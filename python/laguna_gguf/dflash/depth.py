"""How many tokens the next round drafts."""

from __future__ import annotations

import math
import numbers
from typing import Any, Protocol

from laguna_gguf.dflash.adaptive import AdaptiveDepth
from laguna_gguf.errors import ConfigError

AUTO = "auto"


class Depth(Protocol):
    """A policy: asked before a round, told after it."""

    now: int
    """Drafts of the next round, 0..block_size-1."""
    largest: int
    """The most it ever drafts."""

    @property
    def plain_ahead(self) -> float:
        """Rounds that will surely be plain before one drafts: until then nobody reads the drafter's context."""

    def update(self, drafted: int, accepted: int, ms: float) -> None:
        """A whole round drafted and accepted so many tokens and took so long."""


class FixedDepth:
    """The same depth in every round."""

    def __init__(self, n: int) -> None:
        self.now = self.largest = n

    @property
    def plain_ahead(self) -> float:
        return 0 if self.now else math.inf

    def update(self, drafted: int, accepted: int, ms: float) -> None:
        """Nothing to learn."""


def make_depth(draft_max: int | str, draft_min: int, block_size: int, n_ubatch: int) -> Depth:
    """Policy for the settings of SpecSession; ConfigError says which one cannot work.

    A verify decode has n + 1 rows and must fit in one micro-batch, since only then its rollback is exact.
    """
    deepest = block_size - 1
    draft_max, draft_min = _plain_int(draft_max), _plain_int(draft_min)
    if isinstance(draft_min, bool) or not isinstance(draft_min, int) or draft_min < 0:
        raise ConfigError(f"draft_min is {draft_min!r}; needed an integer >= 0")
    if draft_max == AUTO:
        largest = min(deepest, n_ubatch - 1)
        if draft_min > largest:
            raise ConfigError(f"draft_min is {draft_min}; needed at most {largest} (block_size - 1, n_ubatch - 1)")
        return AdaptiveDepth(draft_min, largest) if largest > 0 else FixedDepth(0)
    if isinstance(draft_max, bool) or not isinstance(draft_max, int) or not 0 <= draft_max <= deepest:
        raise ConfigError(f"draft_max is {draft_max!r}; needed 'auto' or 0..{deepest} (block_size - 1)")
    if draft_min > draft_max:
        raise ConfigError(f"draft_min is {draft_min}; needed at most draft_max ({draft_max})")
    if draft_max >= n_ubatch:
        raise ConfigError(
            f"draft_max is {draft_max}, n_ubatch {n_ubatch}: a round verifies draft_max + 1 rows in one micro-batch; "
            f"needed n_ubatch > {draft_max} (n_batch and n_ctx bound it)"
        )
    return FixedDepth(draft_max)


def _plain_int(value: Any) -> Any:
    """numpy's integers as int; anything else as it is."""
    return int(value) if isinstance(value, numbers.Integral) and not isinstance(value, bool) else value
