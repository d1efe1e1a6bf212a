"""What scoring a prompt costs, on a random drafter of 24 blocks (about 300 MB in f16) or a file of yours.

    python tools/bench_scorer.py prefill      scoring against a full llama.cpp prefill of the same tokens, interleaved
    python tools/bench_scorer.py score        the score step alone at 32,768 tokens, against the trunk
    python tools/bench_scorer.py resume       a turn of 200 new tokens after 20,000, against the first
    python tools/bench_scorer.py wide         120,000 stored keys, four windows of 512 rows: time and memory

Without --model the random file is written to a temporary folder (or kept where --cache says).
"""

import argparse
import json
import resource
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import llama_cpp
import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parent))

from laguna_gguf.pflash.scorer import Scorer
from laguna_gguf.pflash.trunk import Trunk
from random_drafter import DrafterShape, write_drafter

SHAPE = DrafterShape(
    n_layer=24,
    n_embd=640,
    n_ff=2304,
    n_head=5,
    n_head_kv=1,
    head_dim=256,
    n_rot=64,
    n_vocab=4096,
    context_length=262144,
    state_size=128,
    n_k_heads=5,
    n_v_heads=5,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("prefill", "score", "resume", "wide"))
    parser.add_argument("--model", type=Path, help="a qwen35 GGUF instead of the random one")
    parser.add_argument("--cache", type=Path, help="where the random file is kept for the next run")
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("-n", "--tokens", type=int, help="prompt length; default by part")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = args.model or args.cache or Path(folder) / "random-qwen35-f16.gguf"
        if not path.exists():
            write_drafter(path, SHAPE, dtype="f16")
        part: Callable[..., dict[str, Any]] = globals()[f"measure_{args.part}"]
        result = {"file_mb": round(path.stat().st_size / 1e6), "threads": args.threads}
        print(json.dumps(result | part(path, args)))


def random_tokens(n: int, seed: int = 0) -> NDArray[np.int32]:
    return np.random.default_rng(seed).integers(300, SHAPE.n_vocab, n).astype(np.int32)


def make_scorer(path: Path, args: argparse.Namespace, sessions: int = 0) -> Scorer:
    trunk = Trunk(str(path), n_sequences=sessions + 1, n_threads=args.threads, n_threads_batch=args.threads)
    return Scorer(trunk)


def measure_prefill(path: Path, args: argparse.Namespace) -> dict[str, Any]:
    ids = random_tokens(args.tokens or 4096)
    llama = llama_cpp.Llama(
        str(path), n_ctx=len(ids), n_threads=args.threads, n_threads_batch=args.threads, verbose=False
    )
    scorer = make_scorer(path, args)

    def prefill() -> None:
        llama.reset()
        llama.eval(ids.tolist())

    def score() -> None:
        scorer.score(ids, query=(len(ids) - 8, len(ids)), windows=[(len(ids) - 50, len(ids) - 42, 1.0)])

    warm = ids[:512]
    llama.eval(warm.tolist())
    scorer.score(warm, query=(500, 508))
    times: dict[str, list[float]] = {"prefill": [], "score": []}
    for _ in range(args.rounds):
        for name, run in (("prefill", prefill), ("score", score)):
            began = perf_counter()
            run()
            times[name].append(perf_counter() - began)
    ratios = [s / p for s, p in zip(times["score"], times["prefill"], strict=True)]
    return {
        "tokens": len(ids),
        "prefill_s": [round(t, 2) for t in times["prefill"]],
        "score_s": [round(t, 2) for t in times["score"]],
        "ratio": round(median(ratios), 3),
    }


def measure_score(path: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Only the attention of two windows over 32,768 stored keys (of random taps), against the trunk.

    The trunk runs a quarter of that and counts four times, less than it would take: its attention grows faster.
    """
    n, read = 32768, args.tokens or 8192
    scorer = make_scorer(path, args)
    ids = random_tokens(read)
    trunk_s = scorer.score(ids, query=(read - 8, read)).forward_ms / 1e3 * n / read
    native, width = scorer._native, scorer.trunk.file.n_embd
    rng = np.random.default_rng(0)
    store = native.new_store()
    for _ in range(n // 512):
        native.append(rng.standard_normal((512, width), dtype=np.float32), store)
    windows = [(rng.standard_normal((8, width), dtype=np.float32), [(0, n - 8)]) for _ in range(2)]
    times = []
    for _ in range(args.rounds):
        began = perf_counter()
        native.mass(store, windows)
        times.append(perf_counter() - began)
    return {
        "tokens": n,
        "trunk_s": round(trunk_s, 2),
        "score_step_s": round(median(times), 3),
        "share": round(median(times) / trunk_s, 4),
    }


def measure_resume(path: Path, args: argparse.Namespace) -> dict[str, Any]:
    n, new = args.tokens or 20000, 200
    ids = random_tokens(n + new * args.rounds)
    scorer = make_scorer(path, args, sessions=1)
    scorer.trunk.context.reserve(len(ids))
    times = []
    for turn in range(args.rounds + 1):
        end = n + turn * new
        began = perf_counter()
        scores = scorer.score(ids[:end], query=(end - 8, end), session="a")
        times.append(perf_counter() - began)
        assert scores.new_tokens == (new if turn else n)
    later = median(times[1:])
    return {
        "first_tokens": n,
        "first_s": round(times[0], 2),
        "new_tokens": new,
        "later_s": round(later, 3),
        "share": round(later / times[0], 4),
    }


def measure_wide(path: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Random taps instead of a trunk: only what the scorer itself does and keeps."""
    n, rows = args.tokens or 120_000, 512
    scorer = make_scorer(path, args)
    native, width = scorer._native, scorer.trunk.file.n_embd
    rng = np.random.default_rng(0)
    store = native.new_store()
    before = _resident()
    began = perf_counter()
    for _ in range(n // 500):
        native.append(rng.standard_normal((500, width), dtype=np.float32), store)
    keys_s = perf_counter() - began
    held = _resident()
    windows = [(rng.standard_normal((rows, width), dtype=np.float32), [(0, n - 1000)]) for _ in range(4)]
    began = perf_counter()
    native.mass(store, windows)
    return {
        "tokens": store.n_tokens,
        "rows": 4 * rows,
        "keys_s": round(keys_s, 2),
        "mass_s": round(perf_counter() - began, 2),
        "keys_mb": round((held - before) / 1e6),
        "peak_above_keys_mb": round((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - held) / 1e6),
    }


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


if __name__ == "__main__":
    main()
