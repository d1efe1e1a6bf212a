"""Clients of every kind at once for a long time; each reply is checked against its request.

    python tools/soak_daemon.py --minutes 30 --clients 8

A client draws its requests at random: token ids over the socket, short chats and long ones through the proxy, and ones
that it leaves alone half-way. Prints counts and latencies by kind; ends with 1 when a reply was wrong or lost.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path

import httpx
import numpy as np

from bench_daemon import connected, free_port
from fake_upstream import fake_upstream
from fuzz_daemon import resident
from laguna_gguf import PFlashClient
from random_drafter import TINY_QWEN35, write_drafter

CHAT = "/v1/chat/completions"


class Client(threading.Thread):
    """One client; `failures` tells what was wrong."""

    def __init__(self, number: int, address: str, port: int, until: float) -> None:
        super().__init__()
        self.rng = random.Random(number)
        self.number, self.address, self.port, self.until = number, address, port, until
        self.times: dict[str, list[float]] = defaultdict(list)
        self.failures: list[str] = []
        self.n = 0

    def run(self) -> None:
        kinds = [self.ids] * 3 + [self.short] * 5 + [self.long] * 2 + [self.leaves]
        url = f"http://127.0.0.1:{self.port}"
        with PFlashClient(self.address) as self.ipc, httpx.Client(base_url=url, timeout=120) as self.http:
            while time.monotonic() < self.until:
                self.n += 1
                kind, began = self.rng.choice(kinds), time.perf_counter()
                try:
                    kind()
                except Exception as error:
                    self.failures.append(f"{kind.__name__}: {type(error).__name__}: {error}")
                    continue
                self.times[kind.__name__].append((time.perf_counter() - began) * 1e3)

    def ids(self) -> None:
        n = self.rng.randrange(20, 400)
        ids = np.random.default_rng(self.rng.randrange(2**32)).integers(3, TINY_QWEN35.n_vocab, n).astype(np.int32)
        result = self.ipc.compress(ids, keep_ratio=0.3)
        kept = np.concatenate([ids[begin:end] for begin, end in result.spans])
        assert np.array_equal(kept, result.ids) and result.timings["drafter_input_tokens"] == n, "another's ids"

    def short(self) -> None:
        self._chat(f"Hello from {self.number}, request {self.n}.")

    def long(self) -> None:
        # upper case: a byte is a token for the drafter as for the server behind, so that no ceiling is a byte too low
        text = "THE RIVER RUNS BY THE OLD MILL. " * self.rng.randrange(20, 40)
        self._chat(f"AND OF {self.number}, REQUEST {self.n}?", text)

    def leaves(self) -> None:
        data = json.dumps({"messages": [{"role": "user", "content": "The river runs. " * 60}]}).encode()
        with socket.create_connection(("127.0.0.1", self.port)) as connection:
            connection.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode())
            connection.sendall(data[: self.rng.randrange(len(data) + 1)])
            time.sleep(self.rng.random() * 0.2)

    def _chat(self, question: str, text: str = "Hello.") -> None:
        body = {"messages": [{"role": "user", "content": text}, {"role": "user", "content": question}]}
        answer = self.http.post(CHAT, json=body, headers={"X-Scenario": "echo"})
        assert answer.status_code == 200, (answer.status_code, answer.text[:200])
        assert answer.json()["echo"] == question, "another's answer"  # short turns are kept whole


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--clients", type=int, default=8)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, fake_upstream() as upstream:
        drafter = write_drafter(Path(folder) / "drafter.gguf")
        address, port, log = os.path.join(folder, "run", "pflash.sock"), free_port(), Path(folder) / "log"
        command = [sys.executable, "-m", "laguna_gguf.daemon.main", "-t", "1", "--prefill-drafter", str(drafter)]
        command += ["--socket", address, "--upstream", upstream.url, "--port", str(port), "--prefill-threshold", "500"]
        with log.open("w") as stderr:
            process = subprocess.Popen([*command, "--prefill-keep-ratio", "0.3"], stderr=stderr)
        try:
            connected(address).close()
            until = time.monotonic() + 60 * args.minutes
            clients = [Client(number, address, port, until) for number in range(args.clients)]
            for client in clients:
                client.start()
            time.sleep(min(60, 6 * args.minutes))
            first = resident(process.pid)
            for client in clients:
                client.join()
            grown = resident(process.pid) - first
            with PFlashClient(address) as last:
                stats = last.stats()
        finally:
            process.terminate()
            code = process.wait(60)
        text = log.read_text()
    failures = [failure for client in clients for failure in client.failures]
    report: dict[str, object] = {}
    for kind in ("ids", "short", "long", "leaves"):
        times = [one for client in clients for one in client.times[kind]]
        cuts = statistics.quantiles(times, n=100) if len(times) > 1 else [0.0] * 99
        report[kind] = {"n": len(times)} | {f"p{p}_ms": round(cuts[p - 1], 1) for p in (50, 95, 99)}
    report |= {"failures": len(failures), "grown_bytes": grown, "restarts": stats["restarts"], "exit_code": code}
    report["traceback"] = "Traceback" in text
    print(json.dumps(report))
    with contextlib.suppress(IndexError):
        print(failures[0], file=sys.stderr)
    return int(bool(failures) or code != 0 or stats["restarts"] > 0 or grown > 20 << 20 or "Traceback" in text)


if __name__ == "__main__":
    sys.exit(main())
