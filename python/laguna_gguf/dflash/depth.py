"""How many tokens the next round drafts."""

from __future__ import annotations

from typing import Protocol

from laguna_gguf.errors import ConfigError

AUTO = "auto"
START = 3
"""First depth of `auto`: published best depths at batch size 1 lie between 3 and 7."""


class Depth(Protocol):
    """A policy: asked before a round, told after it."""

    now: int
    """Drafts of the next round, 0..block_size-1."""

    def update(self, drafted: int, accepted: int) -> None:
        """A round drafted and accepted so many tokens."""


class FixedDepth:
    """The same depth in every round."""

    def __init__(self, n: int) -> None:
        self.now = n

    def update(self, drafted: int, accepted: int) -> None:
        """Nothing to learn."""


class FollowingDepth:
    """One deeper after a fully accepted draft, one shallower after a draft of which less than half was accepted."""

    def __init__(self, smallest: int, largest: int) -> None:
        self._smallest = min(max(smallest, 1), largest)
        self._largest = largest
        self.now = min(max(START, self._smallest), largest)

    def update(self, drafted: int, accepted: int) -> None:
        if drafted < self.now:
            return  # cut short by the end of the text: says nothing about this depth
        if accepted == drafted:
            self.now = min(self.now + 1, self._largest)
        elif accepted * 2 < drafted:
            self.now = max(self.now - 1, self._smallest)


def make_depth(draft_max: int | str, draft_min: int, block_size: int, n_ubatch: int) -> Depth:
    """Policy for the settings of SpecSession; ConfigError says which one cannot work.

    A verify decode has n + 1 rows and must fit in one micro-batch, since only then its rollback is exact.
    """
    deepest = block_size - 1
    if isinstance(draft_min, bool) or not isinstance(draft_min, int) or draft_min < 0:
        raise ConfigError(f"draft_min is {draft_min!r}; needed an integer >= 0")
    if draft_max == AUTO:
        largest = min(deepest, n_ubatch - 1)
        if draft_min > largest:
            raise ConfigError(f"draft_min is {draft_min}; needed at most {largest} (block_size - 1, n_ubatch - 1)")
        return FollowingDepth(draft_min, largest) if largest > 0 else FixedDepth(0)
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
