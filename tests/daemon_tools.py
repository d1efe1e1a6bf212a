"""Daemons as processes, on tiny models, and raw ways to talk to them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from http_tools import HttpServer, eventually
from laguna_gguf import PFlashClient
from laguna_gguf.daemon import protocol
from laguna_gguf.daemon.streams import Stream

COMMAND = [sys.executable, "-m", "laguna_gguf.daemon.main"]
QUICK = ["-t", "1"]


@dataclass
class Daemon(HttpServer):
    """A running `pflash_daemon`."""

    process: subprocess.Popen[str]
    socket: str
    log: Path
    port: int = 0
    """Of the proxy."""

    def client(self, **kwargs: Any) -> PFlashClient:
        return PFlashClient(self.socket, **kwargs)

    def connect(self, *, greet: bool = True) -> Stream:
        """A raw connection, greeted or not."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(20)
        connection.connect(self.socket)
        stream = Stream(connection)
        if greet:
            stream.send(protocol.encode(protocol.Hello(protocol.VERSION)))
            assert stream.receive(time.monotonic() + 20) is not None
        return stream

    def stats(self) -> dict[str, Any]:
        with self.client() as client:
            return client.stats()

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Its exit code."""
        self.process.send_signal(number)
        return self.process.wait(30)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


@contextmanager
def running_daemon(
    folder: Path, *arguments: str, env: dict[str, str] | None = None, upstream: str | None = None
) -> Iterator[Daemon]:
    """A daemon on a socket in `folder` (one level down, private), ended and checked afterwards."""
    port = free_port() if upstream else 0
    if upstream:
        arguments = (*arguments, "--upstream", upstream, "--port", str(port))
    address = str(folder / "run" / "pflash.sock")
    log = folder / "daemon.log"
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [*COMMAND, "--socket", address, *QUICK, *arguments],
            stdin=subprocess.DEVNULL,
            stderr=stderr,
            text=True,
            env=os.environ | (env or {}),
        )
        try:
            daemon = Daemon(process, address, log, port)
            eventually(lambda: os.path.exists(address) or process.poll() is not None)
            assert process.poll() is None, log.read_text()
            if upstream:
                eventually(lambda: _healthy(daemon))
            yield daemon
        finally:
            if process.poll() is None:
                process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                raise
    assert "Traceback" not in log.read_text(), log.read_text()


def _healthy(daemon: Daemon) -> bool:
    try:
        return daemon.request("GET", "/health").status == 200
    except OSError:
        return False
