"""Answers as they go out: JSON, and the pieces of server-sent events."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from starlette.responses import Response

from laguna_gguf.errors import RequestError
from laguna_gguf.http import errors

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


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


async def disconnected(receive: Receive) -> None:
    """Wait until the client is gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


def mark_gone(scope: Any) -> None:
    """Note that the client left before its answer was complete."""
    scope.setdefault("state", {})["client_gone"] = True
