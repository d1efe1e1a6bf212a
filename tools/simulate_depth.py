#!/usr/bin/env python3
"""The adaptive depth controller on published cost models and acceptance profiles, against every fixed depth.

No model is run: a round's time comes from a cost model, its accepted drafts from a profile, both with noise. The
speed-up is against plain decoding of the same number of tokens; all measuring that the controller does is in it. The
best fixed depth is found with hindsight, from the same costs and profiles. --plot draws the curves over fixed depths.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.depth_plot import page
from laguna_gguf.dflash.adaptive import AdaptiveDepth

DEPTHS = range(16)

Cost = Callable[[int], float]
"""Depth -> ms of a round; 0 is a plain step."""


def _table(plain: float, rows: dict[int, float], draft: float) -> Cost:
    """Measured verify times by rows, straight lines between them, plus the drafter's time."""
    known = sorted(rows)

    def cost(n: int) -> float:
        if n == 0:
            return plain
        r = n + 1
        below = max(k for k in known if k <= r)
        above = min(k for k in known if k >= r)
        share = (r - below) / (above - below) if above > below else 0.0
        return (1 - share) * rows[below] + share * rows[above] + draft

    return cost


COSTS: dict[str, Cost] = {
    # a round of 77 ms + 3.1 ms a row against 31 ms a plain step (GB10, reported)
    "77+3.1": lambda n: 31.0 if n == 0 else 77.0 + 3.1 * (n + 1),
    "36+3.6": lambda n: 31.0 if n == 0 else 36.0 + 3.6 * (n + 1),
    # rows nearly free (H200-like)
    "flat": lambda n: 10.0 if n == 0 else 12.0 + 0.12 * (n + 1),
    # gemma3-270m Q4_K_M on two cores: six rows take longer than eight
    "uneven": _table(16.3, {1: 16.3, 2: 26.6, 4: 34.1, 6: 57.2, 8: 49.6, 16: 78.4}, 2.0),
    # the demo pair on two cores: a gain of a few percent at best
    "near": _table(0.44, {1: 0.44, 2: 0.6, 3: 0.74, 4: 0.88, 5: 1.25, 8: 1.6, 16: 3.2}, 0.33),
}

PROFILES: dict[str, list[tuple[float, float]]] = {
    # mixtures: (share of rounds, chance that a draft of such a round is accepted after the ones before it)
    "code": [(0.7, 0.93), (0.3, 0.6)],
    "loops": [(0.6, 0.9), (0.4, 0.45)],
    "prose": [(0.3, 0.75), (0.7, 0.4)],
    "thinking": [(0.2, 0.6), (0.8, 0.25)],
    "adversarial": [(1.0, 0.0)],
}
MIXED = "mixed"  # code and thinking in turns of 400 tokens


def accepted(profile: str, n: int, tokens: int, rng: random.Random) -> int:
    """Accepted drafts of one round of n."""
    if profile == MIXED:
        profile = "code" if tokens // 400 % 2 == 0 else "thinking"
    pick, chance = rng.random(), 0.0
    for share, chance in PROFILES[profile]:  # noqa: B007  (the last one's chance when shares do not add up to 1)
        pick -= share
        if pick < 0:
            break
    run = 0
    while run < n and rng.random() < chance:
        run += 1
    return run


def noise(rng: random.Random) -> float:
    """Factor on a round's time: a few percent, now and then a spike."""
    return rng.lognormvariate(0.0, 0.04) * (3.0 if rng.random() < 0.003 else 1.0)


def run_fixed(cost: Cost, profile: str, n: int, n_tokens: int, seed: int) -> float:
    """ms for n_tokens at a fixed depth."""
    rng = random.Random(seed)
    tokens, ms = 0, 0.0
    while tokens < n_tokens:
        tokens += 1 + accepted(profile, n, tokens, rng)
        ms += cost(n) * noise(rng)
    return ms * n_tokens / tokens


def run_adaptive(cost: Cost, profile: str, n_tokens: int, seed: int) -> tuple[float, float]:
    """(ms for n_tokens, mean depth) with the controller."""
    rng = random.Random(seed)
    depth = AdaptiveDepth(0, 15)
    tokens, ms, depths = 0, 0.0, []
    while tokens < n_tokens:
        n = depth.now
        run = accepted(profile, n, tokens, rng)
        took = cost(n) * noise(rng)
        depth.update(n, run, took)
        tokens, ms = tokens + 1 + run, ms + took
        depths.append(n)
    return ms * n_tokens / tokens, statistics.mean(depths)


def simulate(cost: Cost, profile: str, n_tokens: int, seeds: int) -> dict[str, Any]:
    """Means over seeds: speed-up of the controller and of every fixed depth over plain decoding."""
    plain = [run_fixed(cost, profile, 0, n_tokens, seed) for seed in range(seeds)]
    fixed = {n: statistics.mean(run_fixed(cost, profile, n, n_tokens, seed) for seed in range(seeds)) for n in DEPTHS}
    best = min(fixed, key=lambda n: fixed[n])
    runs = [run_adaptive(cost, profile, n_tokens, seed) for seed in range(seeds)]
    ratios = sorted(p / ms for p, (ms, _) in zip(plain, runs, strict=True))
    best_speedup = statistics.mean(plain) / fixed[best]
    return {
        "speedup": round(statistics.mean(plain) / statistics.mean(ms for ms, _ in runs), 3),
        "worst": round(ratios[0], 3),
        "mean_depth": round(statistics.mean(d for _, d in runs), 2),
        "best_fixed": best,
        "best_fixed_speedup": round(best_speedup, 3),
        "fixed": [round(statistics.mean(plain) / fixed[n], 3) for n in DEPTHS],
        "of_best": round(statistics.mean(plain) / statistics.mean(ms for ms, _ in runs) / best_speedup, 3),
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[256, 4000])
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--plot", type=Path, metavar="SVG", help="draw the rows with the most tokens")
    args = parser.parse_args(argv)
    rows = []
    for n_tokens in args.tokens:
        for cost_name, cost in COSTS.items():
            for profile in [*PROFILES, MIXED]:
                result = simulate(cost, profile, n_tokens, args.seeds)
                rows.append({"tokens": n_tokens, "cost": cost_name, "profile": profile, **result})
    if args.plot:
        drawn = [row for row in rows if row["tokens"] == max(args.tokens)]
        args.plot.write_text(page(drawn, columns=len(PROFILES) + 1), "utf-8")
    if args.json:
        print(json.dumps({"rows": rows}))
        return 0
    print(
        f"{'tokens':>6} {'cost':8} {'profile':12} {'auto':>6} {'worst':>6} {'depth':>6} {'best n':>6} {'best':>6} "
        f"{'of it':>6}"
    )
    for r in rows:
        print(
            f"{r['tokens']:6} {r['cost']:8} {r['profile']:12} {r['speedup']:6.2f} {r['worst']:6.2f} "
            f"{r['mean_depth']:6.2f} {r['best_fixed']:6} {r['best_fixed_speedup']:6.2f} {r['of_best']:6.2f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
