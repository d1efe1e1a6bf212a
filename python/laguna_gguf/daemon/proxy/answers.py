"""Answers of the upstream server on their way to the client."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from typing import Any

import anyio
import httpx

from laguna_gguf.daemon.proxy.upstream import passed_on
from laguna_gguf.http.bodies import loads
from laguna_gguf.http.errors import body as error_body
from laguna_gguf.http.errors import of_status
from laguna_gguf.http.responses import Send, encode, event

logger = logging.getLogger(__name__)

MAX_ANSWER_BYTES = 64 << 20
"""Longest answer that timings are added to; longer ones pass as they are."""
MAX_EVENT_BYTES = 16 << 20
"""The same for one event of a stream."""

Timings = dict[str, Any]

_LENGTH = frozenset([b"content-length"])


class Answer:
    """An answer that is being passed on.

    `started` tells whether the client has its status, `broken` whether the upstream server ended in the middle.
    """

    def __init__(self, send: Send, seconds: float) -> None:
        """seconds: for the client to take one piece."""
        self._send = send
        self._seconds = seconds
        self.started = False
        self.ended = False
        """Whether it has all of it."""
        self.broken = False
        self.timings: Timings = {}
        """The upstream server's own, of an answer that was amended."""

    async def whole(self, response: httpx.Response) -> None:
        """Byte for byte, as it comes."""
        await self._start(response, passed_on(response.headers.raw))
        is_stream = _is_events(response)
        try:
            async for piece in response.aiter_raw():
                await self._piece(piece)
        except httpx.HTTPError as error:
            self._lost(error)
            if is_stream:
                await self._piece(_lost_event())
            else:
                raise ConnectionResetError("the upstream server ended in the middle of its answer") from error
        await self._end()

    async def amended(self, response: httpx.Response, timings: Timings, *, in_streams: bool) -> None:
        """With `timings` inside its usage; of a stream inside the chunk that has one, if `in_streams`."""
        if response.status_code != 200:
            await self.whole(response)
        elif _is_events(response):
            await self._amended_events(response, timings if in_streams else None)
        else:
            await self._amended_object(response, timings)

    async def _amended_object(self, response: httpx.Response, timings: Timings) -> None:
        parts: list[bytes] = []
        size = 0
        stream = response.aiter_raw()
        try:
            async for piece in stream:
                parts.append(piece)
                size += len(piece)
                if size > MAX_ANSWER_BYTES:
                    break
        except httpx.HTTPError as error:
            self._lost(error)
            raise of_status(502, "the upstream server ended in the middle of its answer") from error
        if size > MAX_ANSWER_BYTES:
            await self._start(response, passed_on(response.headers.raw))
            for piece in parts:
                await self._piece(piece)
            async for piece in stream:
                await self._piece(piece)
            await self._end()
            return
        data = b"".join(parts)
        self.timings = _own_timings(data)
        data = with_timings(data, timings, always=True)
        headers = passed_on(response.headers.raw, drop=_LENGTH)
        await self._start(response, [*headers, (b"content-length", str(len(data)).encode())])
        await self._piece(data)
        await self._end()

    async def _amended_events(self, response: httpx.Response, timings: Timings | None) -> None:
        await self._start(response, passed_on(response.headers.raw, drop=_LENGTH))
        try:
            async for piece in _events(response.aiter_raw()):
                if b'"timings"' in piece:
                    self.timings = _own_timings(piece.strip().removeprefix(b"data:"))
                await self._piece(piece if timings is None else amended_event(piece, timings))
        except httpx.HTTPError as error:
            self._lost(error)
            await self._piece(_lost_event())
        await self._end()

    def _lost(self, error: httpx.HTTPError) -> None:
        self.broken = True
        logger.warning("the upstream server ended in the middle of its answer: %s", type(error).__name__)

    async def _start(self, response: httpx.Response, headers: list[tuple[bytes, bytes]]) -> None:
        if not 100 <= response.status_code < 600:
            raise of_status(502, f"the upstream server answers with the status {response.status_code}")
        self.started = True
        await self._send({"type": "http.response.start", "status": response.status_code, "headers": headers})

    async def _piece(self, data: bytes) -> None:
        if data:
            with anyio.fail_after(self._seconds):
                await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def _end(self) -> None:
        self.ended = True
        await self._send({"type": "http.response.body", "body": b""})


def with_timings(data: bytes, timings: Timings, *, always: bool = False) -> bytes:
    """A JSON object with usage.timings.pflash; unchanged where it is none, or has no usage and not `always`."""
    try:
        value = loads(data)
    except (ValueError, RecursionError):
        return data
    if not isinstance(value, dict):
        return data
    usage = value.get("usage")
    if not isinstance(usage, dict):
        if not always or usage is not None:
            return data
        usage = value["usage"] = {}
    inner = usage.setdefault("timings", {})
    if not isinstance(inner, dict):
        return data
    inner["pflash"] = timings
    return encode(value)


def amended_event(data: bytes, timings: Timings) -> bytes:
    """One event, with its blank line; unchanged unless it holds a usage."""
    if b'"usage"' not in data:
        return data
    body = data.strip(b"\r\n")
    if not body.startswith(b"data:") or b"\n" in body:
        return data
    payload = body[len(b"data:") :].strip()
    changed = with_timings(payload, timings)
    return data if changed is payload else event(changed)


async def _events(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Whole events, with the blank line that ends them; what is too long passes in pieces."""
    pending = b""
    async for piece in pieces:
        pending += piece
        while (end := _event_end(pending)) > 0:
            yield pending[:end]
            pending = pending[end:]
        if len(pending) > MAX_EVENT_BYTES:
            yield pending
            pending = b""
    if pending:
        yield pending


def _event_end(data: bytes) -> int:
    """Bytes of the first whole event; 0 where there is none."""
    ends = [at + len(mark) for mark in (b"\n\n", b"\r\n\r\n") if (at := data.find(mark)) >= 0]
    return min(ends, default=0)


def _own_timings(data: bytes) -> Timings:
    try:
        timings = json.loads(data)["timings"]
    except (ValueError, RecursionError, LookupError, TypeError):
        return {}
    return timings if isinstance(timings, dict) else {}


def _is_events(response: httpx.Response) -> bool:
    return response.headers.get("content-type", "").startswith("text/event-stream")


def _lost_event() -> bytes:
    return event(encode(error_body(of_status(502, "the upstream server ended in the middle of its answer"))))
