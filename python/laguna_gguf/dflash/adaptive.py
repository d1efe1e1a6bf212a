"""Adaptive draft depth: before each round, the depth that is expected to give the most tokens a second.

With s_i the chance that the first i drafts of a round are all accepted, and cost(n) the time of a round with n drafts,

    value(n) = (1 + s_1 + ... + s_n) / cost(n),        n = 0 being plain decoding.

Both sides are measured while text is generated. Costs are kept for every n by itself: they are neither linear nor
monotone in n (six rows can take longer than eight), and change with the context. What drafting cannot win back it must
not spend: while plain decoding is ahead, drafts are only probed in short bursts whose distance grows. A few rounds
say little, so acceptance gets the benefit of the doubt: a burst that looks promising goes on until it is known to be a
loss.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

PRIOR_ACCEPTANCE = 0.7
"""Chance that the next draft of an accepted run is accepted too, before anything is known (a published Laguna mean)."""

PRIOR_WEIGHT = 2.0
"""Observations that the prior counts for."""

MEMORY = 48.0
"""Observations after which an old one counts 1/e; text changes its kind within hundreds of tokens."""

OPTIMISM = 0.3
"""Standard errors by which acceptance is taken to be better than observed; they shrink as observations come in."""

FORGET = 0.5
"""Weight of earlier observations when a burst begins after a plain stretch: the text may have changed its kind."""

COST_MEMORY = 12
"""Rounds over which a cost is averaged."""

STALE, STALE_MEMORY = 100, 3
"""A cost that was not measured for so many rounds is worth so many measurements: the context has grown since."""

SPIKE = 3.0
"""A round slower than so many times the average is held down to it: something else ran on the machine."""

HYSTERESIS = 0.03
"""Another depth must promise so much more than the present one."""

MARGIN = 0.05
"""Drafting must promise so much more than plain decoding: near break-even noise decides, and plain is safe."""

FIRST_DEPTH = 4
"""Where measuring begins: published best depths at batch size 1 lie between 3 and 7."""

PROBE_ROUNDS = 2
"""Drafted rounds of one burst while plain decoding is ahead."""

FIRST_PROBE = 48
LAST_PROBE = 768
"""Tokens of plain decoding before a burst: the first distance, and the largest that doubling leads to."""

EXPLORE_EVERY = 12
"""Rounds between looks at a neighbouring depth while drafting."""

PLAIN_EVERY = 160
"""Rounds between plain rounds while drafting, to keep the cost that drafting is compared with."""


@dataclass
class _Cost:
    """Time of a round in ms: a mean over the last COST_MEMORY rounds, without spikes."""

    mean: float = 0.0
    count: int = 0
    seen: int = 0
    """Round of the last measurement."""

    def add(self, ms: float, now: int) -> None:
        if self.count:
            ms = min(ms, SPIKE * self.mean)
        # the first measurement carries one-time work (graphs are built, memory is touched): a second one replaces it
        window = COST_MEMORY if now - self.seen < STALE else STALE_MEMORY
        keep = 0 if self.count == 1 and ms < self.mean else min(self.count, window - 1)
        self.mean = (self.mean * keep + ms) / (keep + 1)
        self.count += 1
        self.seen = now


class AdaptiveDepth:
    """A depth policy (see depth.py) for the depths smallest..largest; 0 among them is plain decoding."""

    def __init__(self, smallest: int, largest: int) -> None:
        self.largest = largest
        self._depths = list(range(smallest, largest + 1))
        self._costs = {n: _Cost() for n in self._depths}
        self._hits = [PRIOR_WEIGHT * PRIOR_ACCEPTANCE] * (largest + 1)  # by draft number 1..largest
        self._tries = [PRIOR_WEIGHT] * (largest + 1)
        self._round = 0
        self._base = self._nearest(FIRST_DEPTH)  # what the present evidence favours
        self._plan: list[int] = [self._base] * 2 + ([0, 0] if smallest == 0 else [])
        self._plain_tokens = 0
        self._probe_after = FIRST_PROBE
        self._explored = 0
        self.now = self._next()

    @property
    def is_plain(self) -> bool:
        """Whether plain decoding is ahead at present."""
        return self._base == 0

    @property
    def plain_ahead(self) -> float:
        """Rounds that will surely be plain before one drafts."""
        if self.largest == 0:
            return math.inf
        if self.now or self._plan or self._base:
            return 0
        return max(self._probe_after - self._plain_tokens, 0)

    # -- estimates --------------------------------------------------------------------------------------------------

    def acceptance(self, i: int) -> float:
        """Chance that draft i (1-based) is accepted when those before it were."""
        return self._hits[i] / self._tries[i]

    def cost(self, n: int) -> float:
        """Time of a round with n drafts in ms: measured, or on the line between the measured neighbours."""
        if self._costs[n].count:
            return self._costs[n].mean
        known = [m for m in self._depths if self._costs[m].count]
        drafted = [m for m in known if m]
        if not drafted:
            return math.inf
        below = max((m for m in drafted if m < n), default=None)
        above = min((m for m in drafted if m > n), default=None)
        if below is not None and above is not None:
            share = (n - below) / (above - below)
            return (1 - share) * self._costs[below].mean + share * self._costs[above].mean
        if above is not None:  # between plain and the shallowest measured depth: as if drafting cost nothing at first
            low = self._costs[0].mean if 0 in known else 0.0
            return self._costs[above].mean - (self._costs[above].mean - low) * (above - n) / (2 * above)
        first, last = drafted[0], drafted[-1]
        if first == last:  # one depth only: a row costs a small part of the whole
            return self._costs[last].mean * (1 + 0.05 * (n - last))
        slope = (self._costs[last].mean - self._costs[first].mean) / (last - first)
        return self._costs[last].mean + max(slope, 0.0) * (n - last)

    def values(self) -> dict[int, float]:
        """Expected tokens a ms by depth."""
        totals = [1.0]
        run = 1.0
        for i in range(1, len(self._tries)):
            chance = self.acceptance(i)
            if self._tries[i] > PRIOR_WEIGHT:
                error = math.sqrt(max(chance * (1.0 - chance), 0.05) / self._tries[i])
                chance = min(chance + OPTIMISM * error, 1.0)
            run *= chance
            totals.append(totals[-1] + run)
        costs = {n: self.cost(n) for n in self._depths}
        return {n: totals[n] / cost if cost > 0 else 0.0 for n, cost in costs.items()}

    # -- the loop ---------------------------------------------------------------------------------------------------

    def update(self, drafted: int, accepted: int, ms: float) -> None:
        """A round drafted and accepted so many tokens in `ms`; its depth may be another than `.now`."""
        self._round += 1
        if drafted in self._costs:
            self._costs[drafted].add(ms, self._round)
        if drafted == 0 < self.now:  # the session could not draft; what was planned still stands
            return
        decay = math.exp(-1.0 / MEMORY)
        for i in range(1, min(accepted + 1, drafted, len(self._tries) - 1) + 1):
            self._tries[i] = self._tries[i] * decay + 1.0
            self._hits[i] = self._hits[i] * decay + (i <= accepted)
        self._share_with_deeper(min(drafted, len(self._tries) - 1))
        self._plain_tokens = self._plain_tokens + 1 if drafted == 0 else 0
        if drafted or self._base:  # while plain decoding goes on, nothing new is learnt about drafts
            self._decide()
        self.now = self._next()

    def _share_with_deeper(self, drafted: int) -> None:
        """Depths that were never tried take over what the deepest tried one showed."""
        for i in range(drafted + 1, len(self._tries)):
            if self._tries[i] > PRIOR_WEIGHT:
                break
            self._hits[i] = PRIOR_WEIGHT * (self.acceptance(drafted) if drafted else PRIOR_ACCEPTANCE)

    def _decide(self) -> None:
        if self._depths[0] == 0 and not self._costs[0].count:
            return
        worth = self.values()
        if self._depths[0] == 0:
            worth[0] *= 1 + MARGIN
        best = max(self._depths, key=worth.__getitem__)
        if best == self._base:
            return
        if best and worth[best] <= worth[self._base] * (1 + HYSTERESIS):
            return  # back to plain decoding needs no majority
        if best == 0:
            self._plan.clear()
        if self._base == 0:
            self._probe_after = FIRST_PROBE
        self._base = best

    def _next(self) -> int:
        if self._plan:
            return self._plan.pop(0)
        if self._base == 0 and len(self._depths) > 1:
            if self._plain_tokens >= self._probe_after:
                self._probe_after = min(self._probe_after * 2, LAST_PROBE)
                self._forget()
                depth = max(self._depths[1:], key=self.values().__getitem__)
                self._plan = [depth] * (PROBE_ROUNDS - 1)
                return depth
            return 0
        if self._depths[0] == 0 and self._round - self._costs[0].seen >= PLAIN_EVERY:
            return 0
        if self._round % EXPLORE_EVERY == 0:
            return self._neighbour()
        return self._base

    def _forget(self) -> None:
        """Let old observations count less, but never less than the prior."""
        for i, tries in enumerate(self._tries):
            keep = max(FORGET, min(1.0, PRIOR_WEIGHT / tries))
            self._tries[i] *= keep
            self._hits[i] *= keep

    def _neighbour(self) -> int:
        """A depth near the present one whose cost is unknown or old; now and then one far away that was never tried."""
        self._explored += 1
        unseen = [n for n in self._depths if n and not self._costs[n].count]
        if unseen and self._explored % 3 == 0:
            return unseen[len(unseen) // 2]
        place = self._depths.index(self._base)
        reach = 1 + self._explored % 3
        near = [
            self._depths[p] for p in (place + reach, place - reach) if 0 <= p < len(self._depths) and self._depths[p]
        ]
        return min(near, key=lambda n: self._costs[n].seen, default=self._base)

    def _nearest(self, n: int) -> int:
        return min(self._depths, key=lambda depth: abs(depth - n))
