"""Daemons as processes, on tiny models, and raw ways to talk to them."""

from __future__ import annotations

import http.client
import json
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
class Answer:
    """A whole HTTP answer."""

    status: int
    headers: dict[str, str]
    data: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.data)

    def refused(self, status: int, fragment: str = "") -> None:
        """It is an error in OpenAI's shape, of this status."""
        assert self.status == status, (self.status, self.data[:500])
        error = self.json["error"]
        assert error["code"] == status and error["type"] and fragment in error["message"], error


@dataclass
class Daemon:
    """A running `pflash_daemon`."""

    process: subprocess.Popen[str]
    socket: str
    log: Path
    port: int = 0
    """Of the proxy."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def request(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None, timeout: float = 30
    ) -> Answer:
        """One request to the proxy on a connection of its own; a body that is not bytes goes as JSON."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
            connection.request(method, path, data, headers or {})
            response = connection.getresponse()
            return Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
        finally:
            connection.close()

    def tcp(self, data: bytes = b"") -> socket.socket:
        """A connection to the proxy, with this already sent."""
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=30)
        connection.sendall(data)
        return connection

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
