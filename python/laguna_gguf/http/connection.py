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
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from laguna_gguf.http import errors
from laguna_gguf.http.limits import HttpLimits
from laguna_gguf.http.responses import encode

MAX_EARLY_BYTES = 1 << 20
"""Of requests that come before the answer to the one before is out."""


def set_nodelay(connection: Any) -> None:
    """Send small pieces at once; asyncio does this only for sockets that were made with the protocol's number, and
    without it an answer in two pieces waits 40 ms for the client's acknowledgement of the first."""
    if connection is not None and connection.family in (socket.AF_INET, socket.AF_INET6):
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def uvicorn_config(app: Any, limits: HttpLimits, *, shutdown_seconds: int, **more: Any) -> uvicorn.Config:
    """uvicorn with these connections. shutdown_seconds: for answers in progress when the server ends."""
    return uvicorn.Config(
        app,
        http=type("LimitedConnection", (Connection,), {"header_seconds": limits.header_seconds}),
        ws="none",
        lifespan="off",
        log_config=None,
        server_header=False,
        timeout_keep_alive=limits.keep_alive_seconds,  # type: ignore[arg-type]
        timeout_graceful_shutdown=shutdown_seconds,
        **more,
    )


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
        if self._answering() and len(self.conn.trailing_data[0]) > MAX_EARLY_BYTES:
            self.cycle.keep_alive = False  # the connection ends with this answer, whatever else comes
            return
        super().data_received(data)
        self._watch_headers()
        if self._answering():
            # The next request is here before this one's answer is out, and waits in h11's buffer. uvicorn has stopped
            # reading, but then a client that leaves would not be noticed.
            self.flow.resume_reading()

    def _answering(self) -> bool:
        """Whether a whole request is here and its answer is not out."""
        return self.cycle is not None and not self.cycle.response_complete and not self.cycle.more_body

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
