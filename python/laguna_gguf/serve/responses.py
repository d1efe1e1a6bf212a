"""The answer of a job, or server-sent events while the model generates."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import Any

import anyio
from starlette.responses import Response

from laguna_gguf.errors import RequestError
from laguna_gguf.http import errors
from laguna_gguf.http.responses import (
    Message,
    Receive,
    Send,
    disconnected,
    encode,
    error_response,
    event,
    json_response,
    mark_gone,
)
from laguna_gguf.serve.settings import Limits
from laguna_gguf.serve.worker import Job, Worker

logger = logging.getLogger(__name__)

_EVENT_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx passes events on at once
]


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

        watch = asyncio.create_task(disconnected(receive))
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
            with suppress(RequestError):  # the server is ending; this answer is whole
                await self._job.next()
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
