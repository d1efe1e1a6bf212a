"""Request bodies: read within limits, parsed as JSON that later code can trust in shape."""

from __future__ import annotations

import json
import math
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import anyio

from laguna_gguf.errors import RequestError
from laguna_gguf.http.limits import HttpLimits

Receive = Callable[[], Awaitable[Mapping[str, Any]]]

DRAIN_SECONDS = 2.0
"""How long a body that is too large is still read: a client that is sending does not see an answer."""


class ClientGone(Exception):
    """The client closed the connection."""


async def read_body(receive: Receive, headers: Mapping[str, str], limits: HttpLimits) -> bytes:
    """The whole body. Raises RequestError 413 or 408, ClientGone."""
    declared = headers.get("content-length", "0")
    parts: list[bytes] = []
    size = int(declared) if declared.isdecimal() else 0
    too_large = size > limits.body_bytes
    size = 0
    with anyio.move_on_after(DRAIN_SECONDS if too_large else limits.body_seconds) as deadline:
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            part, more = message.get("body", b""), message.get("more_body", False)
            size += len(part)
            if not too_large and size > limits.body_bytes:
                too_large = True
                parts.clear()
                deadline.deadline = anyio.current_time() + DRAIN_SECONDS
            if not too_large:
                parts.append(part)
    if too_large:
        raise RequestError(f"the body is larger than {limits.body_bytes} bytes", 413)
    if deadline.cancelled_caught:
        raise RequestError(f"the body did not arrive within {limits.body_seconds:g} s", 408)
    return b"".join(parts)


def loads(data: bytes | str) -> Any:
    """JSON that can be written again. ValueError for anything else, infinite numbers among it."""
    return json.loads(data, parse_constant=_refuse_constant, parse_float=_finite)


def parse_object(data: bytes, limits: HttpLimits) -> dict[str, Any]:
    """The body's JSON object. Raises RequestError for anything else, infinite numbers and text that is not Unicode."""
    try:
        value = json.loads(data.decode("utf-8"), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise RequestError(f"the body is not UTF-8 (byte {error.start})") from error
    except RecursionError as error:
        raise RequestError(f"the body nests deeper than {limits.json_depth} levels") from error
    except ValueError as error:
        raise RequestError(f"the body is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise RequestError(f"the body is a JSON {type_name(value)}; needed an object")
    _check_values(value, limits.json_depth)
    return value


def type_name(value: object) -> str:
    """JSON's name for a value's type."""
    names = {dict: "object", list: "array", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is too large a number")
    return value


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _check_values(value: Any, depth: int) -> None:
    level = [value]
    for _ in range(depth + 1):
        inner: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                inner.extend(item)
                inner.extend(item.values())
            elif isinstance(item, list):
                inner.extend(item)
            elif isinstance(item, str):
                _check_text(item)
            elif isinstance(item, float) and not math.isfinite(item):
                raise RequestError("the body has a number that is too large")
        if not inner:
            return
        level = inner
    raise RequestError(f"the body nests deeper than {depth} levels")


def _check_text(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(
            f"a string of the body holds half a surrogate pair (\\u{ord(text[error.start]):04x})"
        ) from error
