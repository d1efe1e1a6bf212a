"""Many requests through a running server, some of whose clients leave at a random moment: no error, flat memory.

    python tools/soak_serve.py --requests 200

Starts `laguna-gguf serve` on the demo pair (or -m and -md) in a process of its own, sends chats and completions,
streamed and not, with up to --clients at a time, and closes a third of the connections at a random moment. Prints one
JSON object. Exit 1 when an answer was not the expected one, when the server's memory grew by more than --allow MiB
after the first quarter of the requests, or when something was left running.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from laguna_gguf.commands.demo import DATA_DIR, DRAFTER_FILE, TARGET_FILE

WARM_UP = 0.25
"""Share of the requests that fill caches and allocators before memory is compared."""


@dataclass
class Tally:
    """What the clients saw."""

    outcomes: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, outcome: str, problem: str | None = None) -> None:
        with self.lock:
            self.outcomes[outcome] += 1
            if problem is not None:
                self.problems.append(problem)


def make_request(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """A path and a body: every kind of request, prompts with and without a common beginning."""
    words = " ".join(
        rng.choice(("def", "class", "return", "import", "self", "value")) for _ in range(rng.randint(1, 60))
    )
    body: dict[str, Any] = {
        "max_tokens": rng.randint(1, 60),
        "stream": rng.random() < 0.5,
        "temperature": rng.choice((0.0, 0.8)),
        "seed": rng.randrange(2**31),
    }
    kind = rng.randrange(5)
    if kind == 0:
        return "/v1/completions", body | {"prompt": words, "stop": ["\n\n"]}
    messages = [{"role": "system", "content": "Write Python."}, {"role": "user", "content": words}]
    if kind == 1:
        body["response_format"] = {"type": "json_object"}
    if kind == 2:
        body |= {"frequency_penalty": 0.3, "logit_bias": {"5": -3}}
    if kind == 3:
        body["stream_options"] = {"include_usage": True}
    return "/v1/chat/completions", body | {"messages": messages}


def ask(port: int, seed: int, tally: Tally) -> None:
    """One request; a third of the clients leave early."""
    rng = random.Random(seed)
    path, body = make_request(rng)
    leaves = rng.random() < 1 / 3
    try:
        if leaves:
            leave(port, path, body, rng)
            tally.add("left")
            return
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        connection.request("POST", path, json.dumps(body))
        response = connection.getresponse()
        data = response.read()
        connection.close()
        whole = data.endswith(b"data: [DONE]\n\n") if body["stream"] else "choices" in json.loads(data)
        if response.status == 503:
            tally.add("503")
        elif response.status == 200 and whole and b'"error"' not in data:
            tally.add("answered")
        else:
            tally.add("wrong", f"{response.status}: {data[-200:]!r}")
    except OSError as error:
        tally.add("wrong", f"{type(error).__name__}: {error}")


def leave(port: int, path: str, body: dict[str, Any], rng: random.Random) -> None:
    """Go away in the middle of the request, before the answer, or in the middle of it; politely or not."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n".encode()
    with socket.create_connection(("127.0.0.1", port), timeout=120) as connection:
        moment = rng.randrange(3)
        if moment == 0:
            connection.sendall((head + data)[: rng.randrange(len(head) + len(data))])
            return
        connection.sendall(head + data)
        if moment == 1:
            time.sleep(rng.random() * 0.1)
        else:
            connection.recv(rng.randint(1, 2000))
        if rng.random() < 0.5:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # a reset


def resident_mib(pid: int) -> float:
    """Anonymous resident memory of a process: what leaks would add to."""
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"RssAnon:\s+(\d+) kB", status)
    return int(found.group(1)) / 1024 if found else 0.0


def metric(port: int, name: str) -> float:
    """A metric without labels."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    return next((float(line.split()[1]) for line in text.splitlines() if line.startswith(name + " ")), 0.0)


@contextmanager
def served(args: argparse.Namespace) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """The server's process and port, once the model is loaded."""
    command = [sys.executable, "-m", "laguna_gguf.cli", "serve", "-m", str(args.model), "-md", str(args.draft_model)]
    command += ["--port", "0", "-c", "512", "-t", str(args.threads), "--spec-draft-n-max", "3", "-ngl", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            log = iter(process.stderr.readline, "")
            port = next((found for line in log if (found := re.search(r"listening on .*:(\d+)", line))), None)
            if port is None or not any("is loaded" in line for line in log):
                raise SystemExit("the server did not start")
            reader = threading.Thread(target=lambda: deque(log, 0))  # a full pipe would stop the server
            reader.start()
            yield process, int(port.group(1))
            process.send_signal(signal.SIGTERM)
            process.wait(60)
            reader.join()
        finally:
            process.kill()


def main() -> int:
    """Run the soak; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("-m", "--model", type=Path, default=DATA_DIR / TARGET_FILE)
    parser.add_argument("-md", "--draft-model", type=Path, default=DATA_DIR / DRAFTER_FILE)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-t", "--threads", type=int, default=1)
    parser.add_argument("--allow", type=float, default=8.0, metavar="MIB", help="growth of memory; default 8")
    args = parser.parse_args()

    tally = Tally()
    n_warm = int(args.requests * WARM_UP)
    with served(args) as (process, port):
        memory = [resident_mib(process.pid)]
        began = time.monotonic()
        for first, last in ((0, n_warm), (n_warm, args.requests)):
            with ThreadPoolExecutor(args.clients) as pool:
                for seed in range(first, last):
                    pool.submit(ask, port, args.seed * 1_000_003 + seed, tally)
            memory.append(resident_mib(process.pid))
        seconds = time.monotonic() - began
        deadline = time.monotonic() + 10
        while (busy := metric(port, "laguna_requests_processing")) and time.monotonic() < deadline:
            time.sleep(0.05)
        tokens = metric(port, "laguna_tokens_predicted_total")

    grown = memory[2] - memory[1]
    report = {
        "requests": args.requests,
        "seconds": round(seconds, 1),
        "outcomes": dict(tally.outcomes),
        "generated_tokens": int(tokens),
        "memory_mib": [round(value, 1) for value in memory],
        "grown_mib": round(grown, 1),
        "left_running": bool(busy),
        "exit_code": process.returncode,
        "problems": tally.problems[:10],
    }
    print(json.dumps(report))
    return 0 if not tally.problems and grown <= args.allow and not busy and process.returncode == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
