"""What a round costs by its parts, each measured alone: drafting n tokens, verifying n + 1 rows.

Their sum by a plain step is the tau at which drafting breaks even, and tau by that sum is what no round can beat.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Any

import llama_cpp

from laguna_gguf.dflash.depth import FixedDepth
from laguna_gguf.dflash.session import SpecSession

IN_A_ROW = 3
"""Timed calls of one size before the next size has its turn."""


def measure_costs(
    session: SpecSession, tokens: Sequence[int], depths: Sequence[int], repetitions: int
) -> list[dict[str, Any]]:
    """Medians in ms by number of drafts n, 0 included, interleaved.

    tokens: a text whose last tokens (1 + the most drafts) stand for anchor and drafts; what comes before is context.
    They should be a real text's: a mixture of experts is cheaper on equal tokens.
    """
    deepest = max(depths)
    context, block = list(tokens[: -(deepest + 1)]), list(tokens[-(deepest + 1) :])
    session.synthetic = None
    session.depth = FixedDepth(deepest)
    session.reset()
    session.eval(context)
    drafter = session.drafter
    session.depth = FixedDepth(0)  # verify alone: nothing is captured
    drafts: dict[int, list[float]] = {n: [] for n in depths if n}
    verifies: dict[int, list[float]] = {n: [] for n in sorted({0, *depths})}
    for _ in range(repetitions):
        for n, times in verifies.items():
            times += _repeated(partial(_verify, session, block[: n + 1]))
        for n, times in drafts.items():
            times += _repeated(partial(drafter.draft, block[0], n))
    session.reset()
    plain = statistics.median(verifies[0])
    rows = []
    for n, times in verifies.items():
        draft, verify = statistics.median(drafts[n]) if n else None, statistics.median(times)
        rows.append(
            {"n": n, "draft_ms": draft, "verify_ms": verify, "break_even_tau": ((draft or 0.0) + verify) / plain}
        )
    return rows


def _repeated(step: Callable[[], object]) -> list[float]:
    """Times of a step that follows its own like, as in a session of fixed depth: the first one builds the graph."""
    times = []
    for _ in range(1 + IN_A_ROW):
        began = perf_counter()
        step()
        times.append((perf_counter() - began) * 1e3)
    return times[1:]


def _verify(session: SpecSession, block: Sequence[int]) -> None:
    start = session.n_tokens
    session.verify(block[0], list(block[1:]))
    llama_cpp.llama_synchronize(session.ctx)
    session.commit(start, 0)
