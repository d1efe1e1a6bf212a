"""uvicorn's HTTP/1.1 connections, with what a server needs whose answers take minutes.

A deadline for headers (uvicorn has none), clients noticed that leave while they wait, errors as JSON, and a way for the
application to drop a connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from laguna_gguf.http import errors
from laguna_gguf.http.limits import HttpLimits
from laguna_gguf.http.responses import encode


def set_nodelay(connection: Any) -> None:
    """Send small pieces at once; asyncio does this only for sockets that were made with the protocol's number, and
    without it an answer in two pieces waits 40 ms for the client's acknowledgement of the first."""
    if connection is not None and connection.family in (socket.AF_INET, socket.AF_INET6):
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


class Connection(H11Protocol):
    """One connection. `scope["state"]["abort"]()` drops it at once."""

    header_seconds = HttpLimits().header_seconds

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        set_nodelay(transport.get_extra_info("socket"))
        self.app_state = {**self.app_state, "abort": transport.abort}
        self._watch_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_watching()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        early = self._answering()
        if not early:
            super().data_received(data)
            self._watch_headers()
            early = self._answering() and bool(self.conn.trailing_data[0])
        if early:
            # Another request before the answer is out. uvicorn would stop reading, and then a client that leaves is
            # not noticed; so it is dropped and the connection ends with this answer. No client in use does this.
            self.cycle.keep_alive = False
            self.cycle.scope["headers"].append((b"connection", b"close"))  # uvicorn repeats it in the answer
            self.flow.resume_reading()

    def _answering(self) -> bool:
        """Whether a whole request is here and its answer is not out."""
        return self.cycle is not None and not self.cycle.response_complete and not self.cycle.more_body

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch_headers()

    def send_400_response(self, msg: str) -> None:
        body = encode(errors.body(errors.of_status(400, msg)))
        head = (
            "HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nconnection: close\r\n"
            f"content-length: {len(body)}\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()

    def _watch_headers(self) -> None:
        if self.conn.their_state is not h11.IDLE or self.transport.is_closing():
            self._stop_watching()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(self.header_seconds, self.transport.close)

    def _stop_watching(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
