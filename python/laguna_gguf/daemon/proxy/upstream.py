"""The server behind the proxy."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any
from urllib.parse import urlsplit

import httpx

from laguna_gguf.errors import ConfigError, RequestError
from laguna_gguf.http.errors import of_status

logger = logging.getLogger(__name__)

Headers = Sequence[tuple[bytes, bytes]]

CONNECT_SECONDS = 5.0
HELPER_SECONDS = 60.0
"""For /apply-template, /tokenize and /props."""

_HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization te trailer trailers transfer-encoding upgrade "
    b"proxy-connection".split()
)
_OURS = frozenset([b"host", b"content-length", b"expect"])
_OF_A_BODY = frozenset(
    b"content-type content-encoding content-digest digest accept accept-encoding range if-match if-none-match "
    b"if-modified-since if-unmodified-since if-range".split()
)
"""Headers that say something of the client's own request, and nothing to a helper endpoint."""
_NOT_THERE = frozenset([404, 405, 501])


class Upstream:
    """Requests to the server behind. Headers of clients, keys among them, go through and into no log."""

    def __init__(self, url: str) -> None:
        """ConfigError for what is no http(s) URL."""
        try:
            parts = urlsplit(url)
            _ = parts.port  # ValueError for what is none
        except ValueError as error:
            raise ConfigError(f"--upstream is {url!r}: {error}; needed http://HOST:PORT") from error
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ConfigError(f"--upstream is {url!r}; needed http://HOST:PORT")
        self._base = httpx.URL(url.rstrip("/"))
        self._client = httpx.AsyncClient(
            timeout=httpx.Timeout(None, connect=CONNECT_SECONDS),
            # A connection that is kept may be closed by the server just as it is used again, and then nobody can tell
            # whether it has begun to generate. A new one costs less than a millisecond.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
            trust_env=False,  # a proxy of the environment has no business on this machine
            follow_redirects=False,
        )

    async def close(self) -> None:
        await self._client.aclose()

    async def send(
        self,
        method: str,
        target: bytes,
        headers: Headers,
        content: bytes | AsyncIterator[bytes] | None,
        *,
        length: bytes | None = None,
    ) -> httpx.Response:
        """Send a request; the answer's body is still to be read, and the answer to be closed.

        target: path and query as the client sent them. length: of streamed content where it is known. RequestError 502
        when the server cannot be reached.
        """
        sent = _without_hops(headers, _OURS)
        if length is not None:
            sent.append((b"content-length", length))
        request = httpx.Request(method, self._base, headers=sent, content=content)
        request.method = method  # httpx would write it in capitals, and put a path in order
        request.extensions["target"] = self._base.raw_path.rstrip(b"/") + target
        try:
            return await self._client.send(request, stream=True)
        except httpx.HTTPError as error:
            raise unreachable(error) from error

    async def ask(self, path: str, body: dict[str, Any], headers: Headers) -> Any:
        """The JSON answer of a helper endpoint, asked with the client's headers. RequestError for anything else."""
        data = json.dumps(body, ensure_ascii=False).encode("utf-8", "surrogatepass")
        return await self._answer("POST", path, headers, data)

    async def context_size(self, headers: Headers) -> int | None:
        """Tokens of one slot's context, where the server tells."""
        try:
            props = await self._answer("GET", "/props", headers)
            n_ctx = props["default_generation_settings"]["n_ctx"]
        except (RequestError, KeyError, TypeError):
            return None
        return n_ctx if isinstance(n_ctx, int) and n_ctx > 0 else None

    async def _answer(self, method: str, path: str, headers: Headers, data: bytes | None = None) -> Any:
        sent = _without_hops(headers, _OURS | _OF_A_BODY)
        if data is not None:
            sent.append((b"content-type", b"application/json"))
        url = self._base.copy_with(path=self._base.path.rstrip("/") + path)
        request = httpx.Request(method, url, headers=sent, content=data)
        request.extensions["timeout"] = httpx.Timeout(HELPER_SECONDS, connect=CONNECT_SECONDS).as_dict()
        try:
            response = await self._client.send(request)
        except httpx.HTTPError as error:
            raise unreachable(error) from error
        if response.status_code != 200:
            raise refused(response.status_code, response.content, path)
        try:
            return response.json()
        except ValueError as error:
            raise of_status(502, f"the upstream server's answer to {path} is not JSON") from error


def unreachable(error: httpx.HTTPError) -> RequestError:
    """502, with the kind of failure and no address."""
    logger.warning("the upstream server cannot be reached: %s", error or type(error).__name__)
    return of_status(502, f"the upstream server cannot be reached ({type(error).__name__})")


def refused(status: int, body: bytes, path: str) -> RequestError:
    """The upstream server's own refusal, as it would have been for the request itself."""
    try:
        error = json.loads(body)["error"]
        message, kind = str(error["message"]), str(error.get("type", ""))
    except (ValueError, KeyError, TypeError):
        message, kind = f"the upstream server answers {path} with status {status}", ""
    if status in _NOT_THERE:
        return of_status(
            502,
            f"the upstream server has no {path} ({status}: {message}); needed llama-server's /apply-template and "
            "/tokenize. In front of another server compress with PFlashClient, or set --prefill-compression off",
        )
    refusal = of_status(status if status >= 400 else 502, message)
    return RequestError(message, refusal.status, kind or refusal.kind)


def passed_on(
    headers: Iterable[tuple[bytes, bytes]], *, drop: frozenset[bytes] = frozenset()
) -> list[tuple[bytes, bytes]]:
    """Headers of an answer as the client gets them."""
    return _without_hops([(name.lower(), value) for name, value in headers], drop)


def _without_hops(headers: Headers, drop: frozenset[bytes]) -> list[tuple[bytes, bytes]]:
    """Without `drop`, and what concerns one connection only: the usual ones and those that Connection names."""
    named = {name.strip().lower() for key, value in headers if key == b"connection" for name in value.split(b",")}
    gone = _HOP_BY_HOP | drop | named
    return [(name, value) for name, value in headers if name not in gone]
