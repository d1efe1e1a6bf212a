"""A running server on tiny models, and raw and parsed ways to talk to it."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from laguna_gguf.http.listening import listen
from laguna_gguf.serve.server import Server
from laguna_gguf.serve.session import ServedSession
from laguna_gguf.serve.settings import Settings
from session_tools import OPTIONS

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HELLO = [{"role": "user", "content": "hello there"}]


@dataclass
class Answer:
    """A whole HTTP answer."""

    status: int
    headers: dict[str, str]
    data: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.data)

    @property
    def events(self) -> list[Any]:
        """Server-sent events; the last one must be [DONE]."""
        lines = self.data.decode().split("\n\n")
        assert lines.pop() == ""
        assert all(line.startswith("data: ") for line in lines)
        assert lines.pop() == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines]

    def refused(self, status: int, kind: str = "invalid_request_error", *fragments: str) -> dict[str, Any]:
        """The error object, of this status and type, whose message has these fragments."""
        assert self.status == status, (self.status, self.data[:500])
        error = self.json["error"]
        assert (error["code"], error["type"]) == (status, kind)
        for fragment in fragments:
            assert fragment in error["message"], error["message"]
        return error


@dataclass
class Running:
    """A server in a thread of this process."""

    server: Server
    port: int
    sessions: list[ServedSession] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def session(self) -> ServedSession:
        return self.sessions[0]

    def request(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None, timeout: float = 30
    ) -> Answer:
        """One request on a connection of its own; a body that is not bytes goes as JSON."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
            connection.request(method, path, data, headers or {})
            response = connection.getresponse()
            return Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
        finally:
            connection.close()

    def get(self, path: str, **headers: str) -> Answer:
        return self.request("GET", path, headers=headers)

    def chat(self, **body: Any) -> Answer:
        return self.request("POST", CHAT, {"messages": HELLO, "max_tokens": 8, "temperature": 0} | body)

    def text(self, **body: Any) -> Answer:
        return self.request("POST", TEXT, {"prompt": "hello there", "max_tokens": 8, "temperature": 0} | body)

    def socket(self, data: bytes = b"") -> socket.socket:
        """A connection, with this already sent."""
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=30)
        connection.sendall(data)
        return connection

    def metric(self, name: str) -> float:
        """A metric by name and labels."""
        for line in self.get("/metrics").data.decode().splitlines():
            if line.startswith(f"{name} "):
                return float(line.split()[-1])
        return 0.0

    def idle(self) -> bool:
        """Whether nothing is running or waiting."""
        return not self.metric("laguna_requests_processing") and not self.metric("laguna_requests_deferred")


def raw_post(path: str, body: Any, *, length: int | None = None, headers: str = "") -> bytes:
    """The bytes of a POST."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    size = len(data) if length is None else length
    return f"POST {path} HTTP/1.1\r\nHost: x\r\n{headers}Content-Length: {size}\r\n\r\n".encode() + data


def eventually(check: Callable[[], bool], seconds: float = 15) -> None:
    """Wait until `check()` holds."""
    end = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.01)


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
