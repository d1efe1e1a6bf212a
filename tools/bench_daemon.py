"""What pflash_daemon adds to a request: over its socket (`ipc`) and for short prompts through its proxy (`latency`).

Random models of the right kind and no size to speak of, so that what is measured is the daemon.

    python tools/bench_daemon.py ipc            a request of 120,000 token ids, wall time less the server's own
    python tools/bench_daemon.py latency        a short chat through the proxy and straight to llama-server, in turns
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from laguna_gguf import PFlashClient
from laguna_gguf.errors import DaemonError
from random_drafter import TINY_QWEN3, TINY_QWEN35, write_drafter

LONG_CONTEXT = replace(TINY_QWEN35, n_embd=32, n_ff=32, full_attention_interval=16, context_length=262_144)
"""Only the scoring block attends, so that reading 120,000 tokens takes a minute and not an hour."""

KEY = "bench"


@contextmanager
def daemon(*arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-m", "laguna_gguf.daemon.main", "-t", "1", *arguments])
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


@contextmanager
def llama_server(model: Path, n_ctx: int = 4096, key: str = KEY) -> Iterator[str]:
    """Address of llama-server (xllamacpp) with a model and an API key."""
    import laguna_gguf.bench.upstream as bench

    settings = {"path": str(model), "n_ctx": n_ctx, "n_batch": 512, "n_ubatch": 512, "n_threads": 1, "n_gpu_layers": 0}
    settings |= {"type_k": 0, "type_v": 0, "flash_attn": False, "swa_full": False, "speculative": "none"}
    program = Path(bench.__file__).with_name("llama_server.py")
    process = subprocess.Popen(
        [sys.executable, str(program), json.dumps(settings | {"api_key": key})],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    try:
        yield json.loads(process.stdout.readline())["address"]
    finally:
        process.communicate()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def connected(address: str) -> PFlashClient:
    """A client of a daemon that may still be starting."""
    deadline = time.monotonic() + 60
    while True:
        client = PFlashClient(address)
        try:
            client.stats()
            return client
        except DaemonError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def ipc(args: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds beside the server's compute, for requests whose session has read the prompt already."""
    with tempfile.TemporaryDirectory() as folder:
        path = write_drafter(Path(folder) / "drafter.gguf", LONG_CONTEXT)
        address = os.path.join(folder, "run", "pflash.sock")
        with daemon("--prefill-drafter", str(path), "--socket", address), connected(address) as client:
            ids = np.random.default_rng(0).integers(3, LONG_CONTEXT.n_vocab, args.tokens).astype(np.int32)
            overheads, computes = [], []
            for _ in range(args.repetitions + 1):
                began = time.perf_counter()
                result = client.compress(ids, keep_ratio=args.keep, session="bench")
                wall = (time.perf_counter() - began) * 1e3
                computes.append(result.timings["compress_ms"])
                overheads.append(wall - computes[-1])
    return {
        "tokens": args.tokens,
        "kept_tokens": result.retained_tokens,
        "first_compute_ms": round(computes[0], 1),
        "compute_ms": round(statistics.median(computes[1:]), 2),
        "overhead_ms_first": round(overheads[0], 2),
        "overhead_ms_median": round(statistics.median(overheads), 2),
        "overhead_ms_min": round(min(overheads), 2),
        "overhead_ms_max": round(max(overheads), 2),
    }


def latency(args: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds that the proxy adds to a short chat of one token."""
    body = {
        "messages": [{"role": "user", "content": "Name the river." * args.words}],
        "max_tokens": 1,
        "temperature": 0,
    }
    headers = {"Authorization": f"Bearer {KEY}"}
    with tempfile.TemporaryDirectory() as folder:
        drafter = write_drafter(Path(folder) / "drafter.gguf")
        chat = write_drafter(Path(folder) / "chat.gguf", TINY_QWEN3)
        port = free_port()
        address = os.path.join(folder, "run", "pflash.sock")
        with llama_server(chat) as upstream:
            arguments = ["--prefill-drafter", str(drafter), "--upstream", upstream, "--port", str(port)]
            with daemon(*arguments, "--socket", address), connected(address), httpx.Client(timeout=60) as client:
                urls = {"direct": upstream, "proxy": f"http://127.0.0.1:{port}"}
                times: dict[str, list[float]] = {name: [] for name in urls}
                for turn in range(args.repetitions + 5):
                    for name, url in urls.items():
                        began = time.perf_counter()
                        client.post(url + "/v1/chat/completions", json=body, headers=headers).raise_for_status()
                        if turn >= 5:
                            times[name].append((time.perf_counter() - began) * 1e3)
    added = [through - direct for through, direct in zip(times["proxy"], times["direct"], strict=True)]
    return {
        "requests": args.repetitions,
        "body_bytes": len(json.dumps(body)),
        "direct_ms_median": round(statistics.median(times["direct"]), 2),
        "proxy_ms_median": round(statistics.median(times["proxy"]), 2),
        "added_ms_median": round(statistics.median(added), 2),
        "added_ms_p95": round(statistics.quantiles(added, n=20)[-1], 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="ipc|latency")
    command = commands.add_parser("ipc")
    command.add_argument("--tokens", type=int, default=120_000)
    command.add_argument("--keep", type=float, default=0.1)
    command.add_argument("-r", "--repetitions", type=int, default=20)
    command.set_defaults(run=ipc)
    command = commands.add_parser("latency")
    command.add_argument("--words", type=int, default=4, help="length of the chat")
    command.add_argument("-r", "--repetitions", type=int, default=200)
    command.set_defaults(run=latency)
    args = parser.parse_args()
    print(json.dumps(args.run(args)))


if __name__ == "__main__":
    main()
