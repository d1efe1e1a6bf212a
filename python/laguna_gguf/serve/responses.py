"""Answers as they go out: JSON, or server-sent events while the model generates."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import anyio
from starlette.responses import Response

from laguna_gguf.errors import RequestError
from laguna_gguf.serve import errors
from laguna_gguf.serve.settings import Limits
from laguna_gguf.serve.worker import Job, Worker

logger = logging.getLogger(__name__)

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

_EVENT_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx passes events on at once
]


def encode(value: Any) -> bytes:
    """Compact JSON; llama_cpp's log probabilities are numpy numbers."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=float).encode()


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A value as JSON."""
    return Response(encode(value), status, headers, media_type="application/json")


def error_response(error: RequestError) -> Response:
    """An error in the API's shape."""
    headers = dict(errors.headers(error))
    if error.status in (408, 413):
        headers["Connection"] = "close"  # the rest of the body may still be on its way
    return json_response(errors.body(error), error.status, headers)


def event(data: bytes) -> bytes:
    """One server-sent event."""
    return b"data: " + data + b"\n\n"


class GenerationResponse(Response):
    """The answer of a job. When the client leaves, at whatever moment, the job is cancelled.

    The first event decides about the status; an error after that is an event of its own.
    """

    def __init__(self, worker: Worker, job: Job, limits: Limits) -> None:
        super().__init__()
        self._worker = worker
        self._job = job
        self._limits = limits

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        async def timed(message: Message) -> None:
            with anyio.fail_after(self._limits.send_seconds):
                await send(message)

        watch = asyncio.create_task(_disconnect(receive))
        answer = asyncio.create_task(self._answer(scope, receive, timed))
        try:
            await asyncio.wait({watch, answer}, return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                answer.result()
            else:
                mark_gone(scope)
        except TimeoutError:
            logger.info("a client took nothing of its answer for %g s", self._limits.send_seconds)
            mark_gone(scope)
            scope["state"].get("abort", lambda: None)()
        finally:
            watch.cancel()
            answer.cancel()
            self._worker.cancel(self._job)

    async def _answer(self, scope: Any, receive: Receive, send: Send) -> None:
        try:
            first = await self._job.next()
        except RequestError as error:
            await error_response(error)(scope, receive, send)
            return
        if self._job.request.stream:
            await self._send_events(send, first)
        else:
            await json_response(first)(scope, receive, send)

    async def _send_events(self, send: Send, first: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": _EVENT_HEADERS})
        chunk, last = first, b"[DONE]"
        while chunk is not None:
            await send({"type": "http.response.body", "body": event(encode(chunk)), "more_body": True})
            try:
                chunk = await self._job.next()
            except RequestError as error:
                chunk, last = None, encode(errors.body(error))
        await send({"type": "http.response.body", "body": event(last)})


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def mark_gone(scope: Any) -> None:
    """Note that the client left before its answer was complete."""
    scope.setdefault("state", {})["client_gone"] = True
