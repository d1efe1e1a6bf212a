"""Which share of a prompt to keep: by its length, and by how well a session's drafts were accepted."""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass

from laguna_gguf.errors import ConfigError

LOWEST = 0.025
HIGHEST = 0.20

_OLD, _NEW = 0.7, 0.3  # weights in the running mean of acceptance; 1 - 0.7 is more than 0.3 in binary


@dataclass(frozen=True)
class Curve:
    """Keep ratio by prompt length: linear between points, constant outside."""

    points: tuple[tuple[int, float], ...]
    """(tokens, ratio) by ascending tokens."""

    @classmethod
    def parse(cls, text: str) -> Curve:
        """A curve from `TOKENS:RATIO` entries between blanks, such as `8000:0.2 64000:0.05`, in any order.

        ConfigError: no entry, a malformed one, the same length twice, a ratio outside (0, 1].
        """
        if not isinstance(text, str):
            raise ConfigError(f"keep ratio curve: it is {text!r}; needed text such as 8000:0.2 64000:0.05")
        points: dict[int, float] = {}
        for entry in text.split():
            if not re.fullmatch(r"[0-9]{1,12}:([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,3})?", entry, re.ASCII):
                raise ConfigError(f"keep ratio curve: entry {entry!r} is not TOKENS:RATIO, such as 8000:0.2")
            tokens, ratio = int(entry.split(":")[0]), float(entry.split(":")[1])
            if tokens in points:
                raise ConfigError(f"keep ratio curve: {tokens} tokens occur twice in {text!r}")
            if not 0 < ratio <= 1:
                raise ConfigError(f"keep ratio curve: the ratio of {entry!r} is outside (0, 1]")
            points[tokens] = ratio
        if not points:
            raise ConfigError("keep ratio curve: it is empty; needed TOKENS:RATIO entries, such as 8000:0.2 64000:0.05")
        return cls(tuple(sorted(points.items())))

    def ratio(self, n_tokens: int) -> float:
        """Keep ratio of a prompt of `n_tokens`."""
        at = bisect_left(self.points, n_tokens, key=lambda point: point[0])
        if at == 0:
            return self.points[0][1]
        if at == len(self.points):
            return self.points[-1][1]
        (low, first), (high, last) = self.points[at - 1 : at + 1]
        share = (n_tokens - low) / (high - low)
        return first * (1 - share) + last * share  # exact at both ends


@dataclass
class _State:
    ratio: float
    acceptance: float | None = None


class AdaptiveKeepRatio:
    """Keep ratios of sessions, moved by how many drafts the target accepted on the compressed prompt.

    Many accepted drafts mean that the shortened prompt told enough: the next one keeps less; few, that it keeps more.
    The most recently used `capacity` sessions are remembered.
    """

    def __init__(self, capacity: int = 1024) -> None:
        if isinstance(capacity, bool) or not isinstance(capacity, int) or capacity < 1:
            raise ConfigError(f"the capacity is {capacity!r} sessions; needed an integer >= 1")
        self.capacity = capacity
        self._states: OrderedDict[Hashable, _State] = OrderedDict()

    def ratio(self, session: Hashable, configured: float) -> float:
        """Ratio of the session's next prompt; for one without a generation yet the `configured` ratio, held to
        0.025..0.20. ConfigError when that is not in [0, 1]."""
        start = _start(configured)
        state = self._states.get(session)
        if state is None:
            return start
        self._states.move_to_end(session)
        return state.ratio

    def update(self, session: Hashable, acceptance: float, *, configured: float) -> float:
        """A generation on a compressed prompt succeeded with this share of drafts accepted; returns the new ratio.

        The running mean of acceptance decides: above 0.90 and 0.85 the ratio falls by 0.01 and 0.005, below 0.70 and
        0.75 it rises by as much. ConfigError when acceptance is outside [0, 1]; nothing changes then.
        """
        if not _in_unit(acceptance):
            raise ConfigError(f"acceptance is {acceptance!r}; needed a number in [0, 1]")
        start = _start(configured)
        state = self._states.setdefault(session, _State(start))
        self._states.move_to_end(session)
        while len(self._states) > self.capacity:
            self._states.popitem(last=False)
        mean = state.acceptance
        state.acceptance = acceptance if mean is None else _OLD * mean + _NEW * acceptance
        state.ratio = _held(state.ratio + _step(state.acceptance))
        return state.ratio


def _step(acceptance: float) -> float:
    if acceptance > 0.90:
        return -0.01
    if acceptance > 0.85:
        return -0.005
    if acceptance < 0.70:
        return 0.01
    return 0.005 if acceptance < 0.75 else 0.0


def _start(configured: float) -> float:
    if not _in_unit(configured):
        raise ConfigError(f"the configured keep ratio is {configured!r}; needed a number in [0, 1]")
    return _held(float(configured))


def _held(ratio: float) -> float:
    return min(HIGHEST, max(LOWEST, ratio))


def _in_unit(value: float) -> bool:
    try:
        return not isinstance(value, bool | str) and math.isfinite(value) and 0 <= value <= 1
    except TypeError:
        return False
