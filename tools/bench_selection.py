"""What planning and selecting a long prompt cost, without a model.

    python tools/bench_selection.py [--tokens 120000] [-r 5]

Prints the shortest and the longest of the repetitions in ms: a query plan of one long turn and of 10,000 turns, and
cutting at probe boundaries, scoring and selecting.
"""

import argparse
import time
from collections.abc import Callable

import numpy as np

from laguna_gguf.pflash.candidates import make_candidates, probe_segments
from laguna_gguf.pflash.query import plan
from laguna_gguf.pflash.selection import select

BYTES_PER_TOKEN = 4


def chat(n_tokens: int, turns: int) -> str:
    """A Qwen chat of about so many tokens, with user and assistant turns of equal length."""
    words = "word " * max(1, n_tokens * BYTES_PER_TOKEN // turns // 5)
    roles = ("user", "assistant")
    parts = [f"<|im_start|>{roles[i % 2]}\n{words}<|im_end|>\n" for i in range(turns)]
    return "".join(parts) + "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"


def planning(n_tokens: int, turns: int) -> Callable[[], str]:
    text = chat(n_tokens, turns)
    offsets = np.linspace(0, len(text), n_tokens + 1).astype(np.int32)

    def run() -> str:
        result = plan(text, offsets)
        return f"{len(result.turns)} turns"

    return run


def selecting(n_tokens: int) -> Callable[[], str]:
    rng = np.random.default_rng(0)
    mass = rng.random(n_tokens)
    mass /= mass.sum()
    probe = (rng.random(n_tokens) ** 4).astype(np.float32)
    query = (n_tokens - 1, n_tokens)

    def run() -> str:
        spans = probe_segments(probe, query, threshold=0.855, min_segment=12, max_segment=64) or []
        rows = make_candidates(mass, spans, "density", query)
        select(rows, n_tokens // 10, mode="budget_only", skip_oversized=True)
        return f"{len(rows)} segments"

    return run


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=120_000)
    parser.add_argument("-r", "--repetitions", type=int, default=5)
    args = parser.parse_args()
    jobs = {
        "plan, one long turn": planning(args.tokens, 1),
        "plan, 10,000 turns": planning(args.tokens, 10_000),
        "segments, scores, selection": selecting(args.tokens),
    }
    for name, job in jobs.items():
        times = []
        for _ in range(args.repetitions):
            began = time.perf_counter()
            what = job()
            times.append((time.perf_counter() - began) * 1e3)
        print(f"{name:30} {min(times):7.1f} {max(times):7.1f} ms   {what}")


if __name__ == "__main__":
    main()
