"""Daemons as processes, on tiny models, and raw ways to talk to them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from laguna_gguf import PFlashClient
from laguna_gguf.daemon import protocol
from laguna_gguf.daemon.streams import Stream

COMMAND = [sys.executable, "-m", "laguna_gguf.daemon.main"]
QUICK = ["-t", "1"]


def eventually(check: Callable[[], bool], seconds: float = 15) -> None:
    """Wait until `check()` holds."""
    end = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.02)


@dataclass
class Daemon:
    """A running `pflash_daemon`."""

    process: subprocess.Popen[str]
    socket: str
    log: Path

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


@contextmanager
def running_daemon(folder: Path, *arguments: str, env: dict[str, str] | None = None) -> Iterator[Daemon]:
    """A daemon on a socket in `folder` (one level down, private), ended and checked afterwards."""
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
            daemon = Daemon(process, address, log)
            eventually(lambda: os.path.exists(address) or process.poll() is not None)
            assert process.poll() is None, log.read_text()
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
