"""Throws damaged frames and HTTP bodies at a running pflash_daemon: it must live, stay small and serve the next one.

    python tools/fuzz_daemon.py --n 100000

Half of them are frames, half bodies: valid ones with bytes changed, cut, repeated, and values replaced, or plain noise.
Ends with 1 when the daemon died, answered nonsense, grew by more than 20 MB or left a traceback in its log.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench_daemon import connected, free_port
from fake_upstream import fake_upstream
from laguna_gguf import PFlashClient
from laguna_gguf.daemon import protocol
from laguna_gguf.daemon.protocol import Cancel, Compress, CompressChat, Hello, Stats
from laguna_gguf.daemon.streams import Stream
from random_drafter import write_drafter

GROWTH_BYTES = 20 << 20
FRAMES_A_CONNECTION = 20
PATHS = ("/v1/chat/completions", "/v1/completions", "/completion", "/health", "/pflash/1", "/v1/models", "/tokenize")
TEXT = "<|im_start|>user\nWhere?<|im_end|>\n<|im_start|>assistant\n"
ODD: list[Any] = [
    None,
    True,
    -1,
    0,
    2**63,
    1e308,
    "",
    "x" * 300,
    [],
    {},
    [[[[]]]],
    {"a": {"b": []}},
    "\u0000",
    "é" * 99,
]


class Fuzzer:
    """Frames and bodies from one random generator."""

    def __init__(self, seed: int, address: str, port: int) -> None:
        self.rng = random.Random(seed)
        self.address, self.port = address, port

    def frame(self) -> bytes:
        rng = self.rng
        whole = rng.choice(
            [
                lambda: Compress(id=rng.randrange(9), keep_ratio=rng.random(), text=TEXT, required=[(0, 2)]),
                lambda: Compress(id=1, keep_ratio=0.5, ids=rng.randbytes(4 * rng.randrange(20)), session="s"),
                lambda: CompressChat(id=2, rendered_prompt=TEXT, keep_ratio=0.5, compression="auto"),
                lambda: Compress(id=3, keep_ratio=0.5, text=TEXT, settings={"select_chunk_size": rng.randrange(-2, 9)}),
                lambda: Stats(4),
                lambda: Cancel(1),
                lambda: Hello(rng.randrange(3)),
            ]
        )()
        data = bytearray(protocol.encode(whole))
        if rng.random() < 0.2:
            return self.damaged(data)
        body = self.damaged(data[4:])
        return len(body).to_bytes(4, "little") + body

    def body(self) -> bytes:
        rng = self.rng
        value: dict[str, Any] = {
            "messages": [
                {"role": rng.choice(["system", "user"]), "content": "Be brief. " * rng.randrange(4)},
                {
                    "role": "user",
                    "content": rng.choice(["The river runs. " * 4, [{"type": "text", "text": "x " * 30}]]),
                },
            ],
            "prompt": "The river runs by the mill. " * rng.randrange(4),
            "pflash": {"on": rng.random() < 0.1, "keep": 0.5},
            "max_tokens": 3,
        }
        for _ in range(rng.randrange(3)):
            inner = value["messages"] if isinstance(value["messages"], list) else []
            holder = rng.choice([value, *(message for message in inner if isinstance(message, dict))])
            holder[rng.choice(list(holder))] = rng.choice(ODD)
        data = bytearray(json.dumps(value).encode())
        return bytes(data) if rng.random() < 0.5 else self.damaged(data)

    def damaged(self, data: bytearray) -> bytes:
        rng = self.rng
        if rng.random() < 0.05:
            return rng.randbytes(rng.randrange(300))
        for _ in range(rng.randrange(4)):
            if data:
                at = rng.randrange(len(data))
                kind = rng.randrange(4)
                if kind == 0:
                    data[at] = rng.randrange(256)
                elif kind == 1:
                    del data[at : at + rng.randrange(30)]
                elif kind == 2:
                    data[at:at] = data[at : at + rng.randrange(30)]
                else:
                    del data[at:]
        return bytes(data)

    def send_frames(self, n: int) -> None:
        """On one connection, as far as the daemon goes along."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with Stream(connection) as stream, contextlib.suppress(OSError):
            connection.connect(self.address)
            stream.send(protocol.encode(Hello(protocol.VERSION)), time.monotonic() + 20)
            stream.receive(time.monotonic() + 20)
            for _ in range(n):
                stream.send(self.frame(), time.monotonic() + 20)
            if self.rng.random() < 0.3:
                connection.settimeout(0.05)
                connection.recv(1000)

    def send_bodies(self, n: int) -> None:
        """One after another; every answer must be one."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            for _ in range(n):
                path = self.rng.choice(PATHS[:3]) if self.rng.random() < 0.9 else self.rng.choice(PATHS)
                connection.request("POST", path, self.body(), {"Content-Type": "application/json"})
                answer = connection.getresponse()
                data = answer.read()
                said = f"{path}: {answer.status} {data[:300]!r}"
                assert answer.status < 500, said
                assert answer.status < 400 or (b'"message"' in data and json.loads(data)["error"]["type"]), said
        finally:
            connection.close()


def resident(pid: int) -> int:
    """Bytes of a process that no file backs."""
    return int(Path(f"/proc/{pid}/status").read_text().split("RssAnon:")[1].split()[0]) << 10


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, fake_upstream() as upstream:
        drafter = write_drafter(Path(folder) / "drafter.gguf")
        address, port, log = os.path.join(folder, "run", "pflash.sock"), free_port(), Path(folder) / "log"
        command = [sys.executable, "-m", "laguna_gguf.daemon.main", "-t", "1", "--prefill-drafter", str(drafter)]
        command += ["--socket", address, "--upstream", upstream.url, "--port", str(port)]
        with log.open("w") as stderr:
            process = subprocess.Popen(command, stderr=stderr)
        try:
            connected(address).close()
            fuzzer, done, first = Fuzzer(args.seed, address, port), 0, 0
            while done < args.n:
                n = min(FRAMES_A_CONNECTION, args.n - done)
                (fuzzer.send_frames if fuzzer.rng.random() < 0.5 else fuzzer.send_bodies)(n)
                done += n
                if not first and done >= args.n // 10:
                    first = resident(process.pid)
            with PFlashClient(address) as client:
                assert client.compress(TEXT, keep_ratio=1.0).text == TEXT
                stats = client.stats()
            grown = resident(process.pid) - first
            traceback = "Traceback" in log.read_text()
        finally:
            process.terminate()
            code = process.wait(60)
    print(
        json.dumps(
            {
                "sent": done,
                "seconds": round(time.monotonic() - began, 1),
                "grown_bytes": grown,
                "restarts": stats["restarts"],
                "worked_on": stats["requests"],
                "exit_code": code,
                "traceback": traceback,
            }
        )
    )
    return int(traceback or code != 0 or grown > GROWTH_BYTES or stats["restarts"] > 0)


if __name__ == "__main__":
    sys.exit(main())
