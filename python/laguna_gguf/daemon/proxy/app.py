"""The proxy's routes: what is compressed, what is the daemon's own, and everything else, which passes through."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import unquote

import anyio
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from laguna_gguf.daemon.model import Model
from laguna_gguf.daemon.protocol import BUSY, DEADLINE, ENDING, CodedError
from laguna_gguf.daemon.proxy import status_page
from laguna_gguf.daemon.proxy.answers import Answer
from laguna_gguf.daemon.proxy.compression import Compressor, Shortened
from laguna_gguf.daemon.proxy.history import History
from laguna_gguf.daemon.proxy.metrics import Metrics
from laguna_gguf.daemon.proxy.upstream import Headers, Upstream
from laguna_gguf.errors import (
    BudgetError,
    ConfigError,
    LagunaError,
    ProtocolError,
    QueryError,
    RequestError,
    SelectionError,
)
from laguna_gguf.http import errors
from laguna_gguf.http.bodies import ClientGone, loads, read_body
from laguna_gguf.http.limits import HttpLimits
from laguna_gguf.http.responses import Receive, Send, disconnected, error_response, json_response, mark_gone

logger = logging.getLogger(__name__)

LIMITS = HttpLimits(body_bytes=64 << 20)

CHATS = frozenset(["/v1/chat/completions", "/chat/completions"])
TEXTS = frozenset(["/v1/completions", "/completion", "/completions"])
OWN = frozenset(["/health", "/metrics", "/pflash"])


class App:
    """An ASGI application."""

    def __init__(
        self,
        upstream: Upstream,
        model: Model,
        compressor: Compressor,
        metrics: Metrics,
        history: History,
        *,
        passthrough_on_error: bool,
        limits: HttpLimits = LIMITS,
    ) -> None:
        self._upstream = upstream
        self._model = model
        self._compressor = compressor
        self._metrics = metrics
        self._history = history
        self._passthrough_on_error = passthrough_on_error
        self._limits = limits

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        try:
            scope = _origin_form(scope)
        except RequestError as error:
            await error_response(error)(scope, receive, send)
            return
        path = scope["path"]
        if path in OWN or path.startswith("/pflash/"):
            response = await self._own(scope)
            await response(scope, receive, send)
            return
        is_ours = scope["method"] == "POST" and path in CHATS | TEXTS
        await self._watched(scope, receive, send, self._compressed if is_ours else self._passed)

    async def _own(self, scope: Any) -> Response:
        path = scope["path"]
        if scope["method"] not in ("GET", "HEAD"):
            return error_response(errors.of_status(405, f"{scope['method']} is not for this path"))
        if path == "/health":
            if self._model.available:
                return json_response({"status": "ok"})
            return error_response(errors.unavailable("Loading model"))
        if path == "/metrics":
            return Response(self._metrics.text(), media_type=CONTENT_TYPE_LATEST)
        return await asyncio.to_thread(status_page.respond, path, self._history, self._model)

    async def _watched(self, scope: Any, receive: Receive, send: Send, work: Any) -> None:
        """Run `work` until it is done or the client leaves, which ends the request to the upstream server too.

        The body is read first, or streamed, by `work` itself; it says when it has all of it.
        """
        answer = Answer(send, self._limits.send_seconds)
        read = asyncio.Event()
        task = asyncio.create_task(work(scope, receive, answer, read))
        watch = asyncio.create_task(_leaving(receive, read))
        try:
            await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done() and not answer.ended:
                mark_gone(scope)
                return
            await task
        except ClientGone:
            mark_gone(scope)
        except TimeoutError:
            logger.info("a client took nothing of its answer for %g s", self._limits.send_seconds)
            mark_gone(scope)
            scope.get("state", {}).get("abort", lambda: None)()
        except ConnectionResetError:
            scope.get("state", {}).get("abort", lambda: None)()
        except LagunaError as error:
            if answer.started:
                raise
            await error_response(refusal(error))(scope, receive, send)
        finally:
            for one in (task, watch):
                one.cancel()
            await asyncio.gather(task, watch, return_exceptions=True)

    async def _passed(self, scope: Any, receive: Receive, answer: Answer, read: asyncio.Event) -> None:
        headers = scope["headers"]
        content, length = _streamed(scope, receive, read)
        if content is None:
            read.set()
        await self._forward(scope, headers, content, answer, length=length)

    async def _compressed(self, scope: Any, receive: Receive, answer: Answer, read: asyncio.Event) -> None:
        headers: Headers = scope["headers"]
        data = await read_body(receive, {k.decode("latin-1"): v.decode("latin-1") for k, v in headers}, self._limits)
        read.set()
        shortened: Shortened | None = None
        body = _parsed(data)
        if body is not None:
            shortened = await self._shorten(scope, body, data, headers)
        if shortened is None:
            await self._forward(scope, headers, data, answer)
            return
        # the answer has to be read, so it must not be packed
        plain = [(name, value) for name, value in headers if name not in (b"accept-encoding", b"content-type")]
        plain += [(b"accept-encoding", b"identity"), (b"content-type", b"application/json")]
        number = self._history.add(scope["path"], shortened)
        try:
            await self._forward(
                scope, plain, shortened.body, answer, timings=shortened.timings, is_amended=_wants_usage(body)
            )
        finally:
            self._history.answered(number, answer.timings)

    async def _shorten(self, scope: Any, body: dict[str, Any], data: bytes, headers: Headers) -> Shortened | None:
        work = self._compressor.chat if scope["path"] in CHATS else self._compressor.text
        try:
            shortened = await work(body, len(data), headers, scope.get("client") and scope["client"][0])
        except LagunaError as error:
            kind = refusal(error)
            self._metrics.count_failure(kind.status)
            logger.warning("a prompt was not compressed: %s", _shown(error))
            if self._passthrough_on_error and not (isinstance(error, RequestError) and error.status < 500):
                return None
            raise
        if shortened is not None:
            self._metrics.count_compression(shortened)
        return shortened

    async def _forward(
        self,
        scope: Any,
        headers: Headers,
        content: bytes | AsyncIterator[bytes] | None,
        answer: Answer,
        *,
        length: bytes | None = None,
        timings: dict[str, Any] | None = None,
        is_amended: bool = False,
    ) -> None:
        path = scope.get("raw_path") or scope["path"].encode()
        if scope.get("query_string"):
            path = path.partition(b"?")[0] + b"?" + scope["query_string"]
        response = await self._upstream.send(scope["method"], path, headers, content, length=length)
        try:
            if timings is None:
                await answer.whole(response)
            else:
                await answer.amended(response, timings, in_streams=is_amended)
        finally:
            with anyio.CancelScope(shield=True), anyio.move_on_after(2):
                await response.aclose()


def refusal(error: LagunaError) -> RequestError:
    """What a client is told: its own mistakes are 400, ours 500, what passes 503."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, CodedError):
        status = 503 if error.code in (BUSY, DEADLINE, ENDING) else 500
        return errors.of_status(status, str(error))
    if isinstance(error, QueryError | SelectionError | BudgetError | ConfigError | ProtocolError):
        return RequestError(str(error))
    return errors.of_status(500, f"{type(error).__name__} while compressing the prompt; the daemon's log says more")


def _origin_form(scope: Any) -> Any:
    """The scope with a path for its target: proxies' clients send whole URLs. RequestError 400 for other targets."""
    target: bytes = scope.get("raw_path") or scope["path"].encode()
    if target.startswith(b"/") or target == b"*":
        return scope
    scheme, _, rest = target.partition(b"://")
    if scheme.lower() not in (b"http", b"https"):
        raise errors.of_status(400, "the request's target is not a path")
    _, slash, path = rest.partition(b"/")
    raw = slash + path or b"/"
    return scope | {"raw_path": raw, "path": unquote(raw.decode("ascii"))}


def _wants_usage(body: dict[str, Any] | None) -> bool:
    options = (body or {}).get("stream_options")
    return isinstance(options, dict) and options.get("include_usage") is True


def _shown(error: LagunaError) -> str:
    """For the log: kind and reason, shortened, since it can quote the prompt."""
    return f"{type(error).__name__}: {str(error)[:200]}"


def _parsed(data: bytes) -> dict[str, Any] | None:
    """The body's object; None for anything else, about which the upstream server will say what it thinks."""
    try:
        value = loads(data)
        if b"\\u" in data:
            json.dumps(value, ensure_ascii=False).encode()  # half a surrogate pair is no text
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _streamed(scope: Any, receive: Receive, read: asyncio.Event) -> tuple[AsyncIterator[bytes] | None, bytes | None]:
    """The body as it comes, and its length where the client tells; (None, None) without one."""
    headers = dict(scope["headers"])
    length = headers.get(b"content-length")
    if length in (None, b"0") and b"transfer-encoding" not in headers:
        return None, length

    async def pieces() -> AsyncIterator[bytes]:
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            more = message.get("more_body", False)
            if message.get("body"):
                yield message["body"]
        read.set()

    return pieces(), length


async def _leaving(receive: Receive, read: asyncio.Event) -> None:
    """Wait until the client is gone; only one may receive, so not before the body is read."""
    await read.wait()
    await disconnected(receive)
