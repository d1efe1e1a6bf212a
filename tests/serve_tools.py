"""A running server on tiny models."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from http_tools import Answer, HttpServer, eventually
from laguna_gguf.http.listening import listen
from laguna_gguf.serve.server import Server
from laguna_gguf.serve.session import ServedSession
from laguna_gguf.serve.settings import Settings
from session_tools import OPTIONS

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HELLO = [{"role": "user", "content": "hello there"}]


@dataclass
class Running(HttpServer):
    """A server in a thread of this process."""

    server: Server
    port: int
    sessions: list[ServedSession] = field(default_factory=list)

    @property
    def session(self) -> ServedSession:
        return self.sessions[0]

    def get(self, path: str, **headers: str) -> Answer:
        return self.request("GET", path, headers=headers)

    def chat(self, **body: Any) -> Answer:
        return self.request("POST", CHAT, {"messages": HELLO, "max_tokens": 8, "temperature": 0} | body)

    def text(self, **body: Any) -> Answer:
        return self.request("POST", TEXT, {"prompt": "hello there", "max_tokens": 8, "temperature": 0} | body)

    def metric(self, name: str) -> float:
        """A metric by name and labels."""
        for line in self.get("/metrics").data.decode().splitlines():
            if line.startswith(f"{name} "):
                return float(line.split()[-1])
        return 0.0

    def idle(self) -> bool:
        """Whether nothing is running or waiting."""
        return not self.metric("laguna_requests_processing") and not self.metric("laguna_requests_deferred")


@contextmanager
def running(
    target: Path,
    drafter: Path,
    settings: Settings | None = None,
    *,
    gate: threading.Event | None = None,
    send_buffer: int | None = None,
    **options: Any,
) -> Iterator[Running]:
    """Run a server; `gate` holds the loading of the model back, send_buffer is the system's for a connection."""
    sessions: list[ServedSession] = []

    def load() -> ServedSession:
        if gate is not None:
            gate.wait()
        sessions.append(ServedSession(str(target), drafter, **(OPTIONS | {"draft_max": 3} | options)))
        return sessions[0]

    listener = listen("127.0.0.1", 0)
    if send_buffer is not None:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    server = Server(load, settings or Settings("tiny"))
    failures: list[BaseException] = []

    def serve() -> None:
        try:
            server.serve_forever(listener)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        here = Running(server, listener.getsockname()[1], sessions)
        if gate is None:
            eventually(lambda: here.get("/health").status == 200)
        yield here
    finally:
        server.should_exit = True
        if gate is not None:
            gate.set()
        thread.join(60)
        listener.close()
    assert not thread.is_alive() and not failures, failures
