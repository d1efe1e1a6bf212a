"""Raw and parsed ways to talk to a server of the package that runs on this machine."""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

KINDS = {401: "authentication_error", 404: "not_found_error", 503: "unavailable_error"}
"""Types of errors by status, where they are not those of all such statuses."""


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

    def refused(self, status: int, *fragments: str, kind: str | None = None) -> dict[str, Any]:
        """The error object, in OpenAI's shape: of this status and type, with these fragments in its message."""
        assert self.status == status, (self.status, self.data[:500])
        error = self.json["error"]
        kind = kind or KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
        assert (error["code"], error["type"]) == (status, kind), error
        for fragment in fragments:
            assert fragment in error["message"], error["message"]
        return error


class HttpServer:
    """Base of what listens on `port`."""

    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

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

    def tcp(self, data: bytes = b"") -> socket.socket:
        """A connection, with this already sent."""
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=30)
        connection.sendall(data)
        return connection


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
        time.sleep(0.02)
