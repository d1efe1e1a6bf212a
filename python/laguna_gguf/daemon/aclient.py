"""AsyncPFlashClient: PFlashClient for asyncio, with many requests on one connection."""

from __future__ import annotations

import asyncio
import contextlib
import os
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

from laguna_gguf.daemon import protocol, results
from laguna_gguf.daemon.addresses import absent, parse
from laguna_gguf.daemon.client import CONNECT_SECONDS, GRACE_SECONDS
from laguna_gguf.daemon.protocol import Error, Result, StatsReply, Welcome
from laguna_gguf.errors import DaemonError, LagunaError
from laguna_gguf.pflash.compressed import Compressed

_GREETING = protocol.decoder(Welcome | Error)
_REPLIES = protocol.decoder(Result | StatsReply | Error)


class AsyncPFlashClient:
    """Raises what PFlash raises, and DaemonError. Cancelling a call cancels the request in the daemon."""

    def __init__(
        self, address: str | os.PathLike[str], *, token: str | None = None, settings: dict[str, Any] | None = None
    ) -> None:
        """See PFlashClient. The connection is made with the first call; it belongs to the event loop of that call,
        and a call from another loop makes a new one when the first has ended."""
        self._address = parse(address)
        self._token = token
        self._settings = settings
        self._numbers = 0
        self._closed = False
        self._connecting: asyncio.Lock | None = None
        self._link: _Link | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def compress(
        self,
        text_or_ids: Any,
        *,
        keep_ratio: float,
        query: Sequence[int] | None = None,
        required: Iterable[Sequence[int]] = (),
        history: Iterable[Sequence[int]] = (),
        session: str | None = None,
        suffix_candidates: bool = False,
        timeout: float | None = None,
        trace: bool = False,
    ) -> Compressed:
        """See PFlashClient.compress."""
        request = results.compress_request(
            text_or_ids,
            keep_ratio=keep_ratio,
            query=query,
            required=required,
            history=history,
            session=session,
            suffix_candidates=suffix_candidates,
            settings=self._settings,
            timeout=timeout,
            trace=trace,
        )
        return await self._compressed(request)

    async def compress_chat(
        self,
        rendered_prompt: str,
        *,
        keep_ratio: float,
        session: str | None = None,
        pflash_query: str | None = None,
        pflash_required: Sequence[str] = (),
        compression: str = "always",
        threshold: int = 32000,
        target_n_ctx: int | None = None,
        max_tokens: int = 0,
        timeout: float | None = None,
        trace: bool = False,
    ) -> Compressed:
        """See PFlashClient.compress_chat."""
        request = results.chat_request(
            rendered_prompt,
            keep_ratio=keep_ratio,
            session=session,
            pflash_query=pflash_query,
            pflash_required=pflash_required,
            compression=compression,
            threshold=threshold,
            target_n_ctx=target_n_ctx,
            max_tokens=max_tokens,
            settings=self._settings,
            timeout=timeout,
            trace=trace,
        )
        return await self._compressed(request)

    async def stats(self) -> dict[str, Any]:
        """The daemon's counters and state."""
        reply = await self._call(protocol.Stats(0), None)
        return results.stats(reply)

    async def close(self) -> None:
        """End the connection; further calls raise DaemonError."""
        self._closed = True
        if self._link is not None and self._loop is asyncio.get_running_loop():
            await self._link.close()

    def __del__(self) -> None:
        link = getattr(self, "_link", None)
        if link is not None and not link.ended:
            warnings.warn("an AsyncPFlashClient was not closed", ResourceWarning, source=self, stacklevel=2)
            link.abandon()

    async def __aenter__(self) -> AsyncPFlashClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _compressed(self, request: protocol.Compress | protocol.CompressChat) -> Compressed:
        reply = await self._call(request, request.seconds)
        return results.compressed(reply)

    async def _call(
        self, frame: protocol.Compress | protocol.CompressChat | protocol.Stats, seconds: float | None
    ) -> Any:
        self._numbers += 1
        frame.id = self._numbers
        data = protocol.encode(frame)
        link = await self._connected()
        try:
            timeout = None if seconds is None else seconds + GRACE_SECONDS
            return await asyncio.wait_for(link.call(frame.id, data), timeout)
        except asyncio.TimeoutError:
            raise DaemonError(f"the daemon at {self._address} does not answer") from None

    async def _connected(self) -> _Link:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            if self._loop is not None and self._loop.is_running():
                raise DaemonError("the client is used by another event loop; make one for each")
            self._loop, self._link, self._connecting = loop, None, asyncio.Lock()
        assert self._connecting is not None
        async with self._connecting:
            if self._closed:
                raise DaemonError("the client is closed")
            if self._link is None or self._link.ended:
                try:
                    self._link = await asyncio.wait_for(self._connect(), CONNECT_SECONDS)
                except (OSError, asyncio.IncompleteReadError, asyncio.TimeoutError) as error:
                    raise absent(self._address, error) from error
            return self._link

    async def _connect(self) -> _Link:
        address = self._address
        if address.is_tcp:
            reader, writer = await asyncio.open_connection(address.host, address.port, limit=1 << 20)
        else:
            reader, writer = await asyncio.open_unix_connection(address.path, limit=1 << 20)
        try:
            writer.write(protocol.encode(protocol.Hello(protocol.VERSION, self._token)))
            greeting = protocol.decode(await _receive(reader), _GREETING)
            if isinstance(greeting, Error):
                raise protocol.exception(greeting)
        except BaseException:
            writer.close()
            raise
        return _Link(reader, writer)


class _Link:
    """One greeted connection, its requests by id."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._broken = False
        self._task = asyncio.create_task(self._read())

    @property
    def ended(self) -> bool:
        return self._task.done() or self._broken

    async def call(self, number: int, data: bytes) -> Any:
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            self._writer.write(data)
            await self._writer.drain()
            return await answer
        except OSError as error:
            self._broken = True  # which the reading task may not have noticed yet
            raise DaemonError(f"the daemon is gone: {error}") from error
        except asyncio.CancelledError:
            self._writer.write(protocol.encode(protocol.Cancel(number)))
            raise
        finally:
            self._waiting.pop(number, None)

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def abandon(self) -> None:
        """Close without waiting, from any thread."""
        with contextlib.suppress(RuntimeError):  # the loop has ended, and the connection with it
            self._task.get_loop().call_soon_threadsafe(self._task.cancel)

    async def _read(self) -> None:
        error: LagunaError = DaemonError("the connection was closed")
        try:
            while True:
                reply = protocol.decode(await _receive(self._reader), _REPLIES)
                answer = self._waiting.get(reply.id if reply.id is not None else -1)
                if isinstance(reply, Error) and reply.id is None:
                    error = protocol.exception(reply)
                    return
                if answer is None or answer.done():
                    continue  # cancelled meanwhile
                if isinstance(reply, Error):
                    answer.set_exception(protocol.exception(reply))
                else:
                    answer.set_result(reply)
        except (OSError, asyncio.IncompleteReadError):
            error = DaemonError("the daemon is gone: it closed the connection")
        except LagunaError as failure:
            error = failure
        finally:
            self._writer.close()
            for answer in self._waiting.values():
                if not answer.done():
                    answer.set_exception(error)


async def _receive(reader: asyncio.StreamReader) -> bytes:
    return await reader.readexactly(protocol.length(await reader.readexactly(protocol.HEADER_BYTES)))
