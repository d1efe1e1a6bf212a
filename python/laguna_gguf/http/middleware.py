"""What every request passes: the API key, the counting of answers, errors in one shape."""

from __future__ import annotations

import hmac
import logging
from collections.abc import Callable, Sequence
from typing import Any

from starlette.datastructures import Headers

from laguna_gguf.errors import RequestError
from laguna_gguf.http import errors
from laguna_gguf.http.responses import Message, Receive, Send, error_response

logger = logging.getLogger(__name__)

CLIENT_GONE = 499
"""nginx's status for a client that left before its answer was complete; only the metrics show it."""

PUBLIC_PATHS = frozenset({"/health", "/v1/health"})


class ApiKeys:
    """Lets requests through that carry one of the keys, as a bearer token or in X-Api-Key."""

    def __init__(self, app: Any, keys: Sequence[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._keys and scope["path"] not in PUBLIC_PATHS:
            if not self._known(Headers(scope=scope)):
                error = errors.of_status(401, "Invalid API Key")
                await error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _known(self, headers: Headers) -> bool:
        scheme, _, token = headers.get("authorization", "").partition(" ")
        given = [token.strip()] if scheme.lower() == "bearer" else []
        given.append(headers.get("x-api-key", ""))
        found = False
        for candidate in given:
            for key in self._keys:  # all of them, so that the time tells nothing
                found |= hmac.compare_digest(candidate.encode("latin-1"), key)
        return found


class Answers:
    """Counts answers by status, and turns an exception into an error in the API's shape."""

    def __init__(self, app: Any, count: Callable[[str, str], None], paths: frozenset[str]) -> None:
        """count is called with the path, "other" for all that are not among `paths`, and the status."""
        self._app = app
        self._count = count
        self._paths = paths

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status: int | None = None

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except Exception as error:
            logger.error("a request failed", exc_info=error)
            if status is not None:
                raise
            refusal = error if isinstance(error, RequestError) else errors.of_status(500, "internal error")
            await error_response(refusal)(scope, receive, watched)
        finally:
            # Paths of clients' own making would be labels without end.
            path = scope["path"] if scope["path"] in self._paths else "other"
            if status is None or scope.get("state", {}).get("client_gone"):
                status = CLIENT_GONE
            self._count(path, str(status))
