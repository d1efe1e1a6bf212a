"""The front's connections: clients say hello, send requests, and get replies as these are done."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import os
import socket
import struct
from collections import Counter
from collections.abc import Callable
from typing import Any

from laguna_gguf.daemon import protocol
from laguna_gguf.daemon.model import LoadError, Model
from laguna_gguf.daemon.protocol import Cancel, ClientFrame, CodedError, Compress, CompressChat, Hello, Stats
from laguna_gguf.errors import LagunaError, ProtocolError

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 1024
HELLO_SECONDS = 10.0
BODY_SECONDS = 60.0
"""For the rest of a frame once it has begun; between frames a client may be idle for ever."""
SEND_SECONDS = 60.0
"""For a client to take a reply."""
FLUSH_SECONDS = 2.0
"""The same when the daemon ends."""
MAX_PENDING = 32
"""Requests of a connection that have no reply yet."""
MAX_HELD_BYTES = 512 << 20
"""Of all frames together that are being received, or whose requests have no reply yet."""

_HELLO = protocol.decoder(Hello)
_FRAMES = protocol.decoder(ClientFrame)


class Server:
    """Serves the frames' protocol on listening sockets."""

    def __init__(self, model: Model, *, name: str, token: str | None, stats: Callable[[], dict[str, Any]]) -> None:
        """token: what clients of TCP sockets have to send. stats: for the frame of that name."""
        self._model = model
        self._name = name
        self._token = token
        self._stats = stats
        self._servers: list[asyncio.Server] = []
        self._connections: set[asyncio.Task[None]] = set()
        self._open: set[_Connection] = set()
        self._held = 0
        self.counts: Counter[str] = Counter()

    @property
    def n_connections(self) -> int:
        return len(self._connections)

    async def listen(self, listener: socket.socket) -> None:
        """Take connections."""
        start = asyncio.start_unix_server if listener.family == socket.AF_UNIX else asyncio.start_server
        self._servers.append(await start(self._connected, sock=listener, limit=1 << 20))

    def refuse_new(self) -> None:
        """Take no further connections."""
        for server in self._servers:
            server.close()

    async def flush(self) -> None:
        """Let replies that are ready go out."""
        await asyncio.sleep(0)
        with contextlib.suppress(asyncio.TimeoutError):
            replies = [task for connection in self._open for task in connection.pending.values()]
            if replies:
                await asyncio.wait(replies, timeout=FLUSH_SECONDS)

    async def close(self) -> None:
        """End all connections."""
        self.refuse_new()
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        self.counts["connections_total"] += 1
        connection = _Connection(writer)
        if connection.socket.family != socket.AF_UNIX:
            connection.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._open.add(connection)
        try:
            if len(self._connections) > MAX_CONNECTIONS:
                raise CodedError(f"{MAX_CONNECTIONS} clients are connected already", protocol.BUSY)
            await self._serve(reader, connection)
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # gone, or we are ending
        except (asyncio.TimeoutError, LagunaError, LoadError) as error:
            self.counts["refused_connections"] += 1
            if isinstance(error, asyncio.TimeoutError):
                error = ProtocolError("a frame took too long")
            elif isinstance(error, LoadError):
                error = CodedError(str(error), protocol.DRAFTER_LOST)
            logger.debug("a connection is refused: %s", error)
            with contextlib.suppress(OSError, asyncio.TimeoutError, asyncio.CancelledError):
                await connection.send(protocol.error_frame(error))
        except Exception as error:
            logger.error("a connection failed", exc_info=error)
        finally:
            self._connections.discard(task)
            self._open.discard(connection)
            await connection.close()

    async def _serve(self, reader: asyncio.StreamReader, connection: _Connection) -> None:
        await self._greet(reader, connection)
        while True:
            body = await self._receive(reader)
            frame, size = protocol.decode(body, _FRAMES), len(body)
            del body
            if isinstance(frame, Cancel):
                connection.cancel(frame.id)
            elif isinstance(frame, Stats):
                await connection.send(protocol.StatsReply(frame.id, self._stats()))
            else:
                self._check(frame, connection)
                connection.start(frame.id, self._answer(frame, connection), self._hold(size))

    def _check(self, frame: Compress | CompressChat, connection: _Connection) -> None:
        if frame.id in connection.pending or len(connection.pending) >= MAX_PENDING:
            raise ProtocolError(
                f"the request {frame.id} has no free id, or {MAX_PENDING} others have no reply yet; that is too many"
            )

    async def _greet(self, reader: asyncio.StreamReader, connection: _Connection) -> None:
        header = await asyncio.wait_for(reader.readexactly(protocol.HEADER_BYTES), HELLO_SECONDS)
        size = protocol.length(header, protocol.MAX_HELLO_BYTES)
        hello = protocol.decode(await asyncio.wait_for(reader.readexactly(size), HELLO_SECONDS), _HELLO)
        if hello.version != protocol.VERSION:
            raise ProtocolError(f"the client speaks version {hello.version}, this daemon {protocol.VERSION}")
        if not self._admits(connection.socket, hello.token):
            raise CodedError("the token is missing or wrong, or the user is another one", protocol.UNAUTHORIZED)
        # While it loads a client waits here; it may leave meanwhile.
        ready = await asyncio.shield(self._model.ready)
        await connection.send(
            protocol.Welcome(
                version=protocol.VERSION,
                server=self._name,
                architecture=ready.architecture,
                drafter_sha256=ready.drafter_sha256,
                head_sha256=ready.head_sha256,
                probe_sha256=ready.probe_sha256,
            )
        )

    def _admits(self, connection: socket.socket, token: str | None) -> bool:
        if connection.family == socket.AF_UNIX:
            return peer_uid(connection) in (None, 0, os.geteuid())
        return self._token is not None and hmac.compare_digest(self._token.encode(), (token or "").encode())

    async def _receive(self, reader: asyncio.StreamReader) -> bytes:
        header = await reader.readexactly(1)  # as late as the client likes

        async def rest() -> bytes:
            size = protocol.length(header + await reader.readexactly(protocol.HEADER_BYTES - 1))
            if self._held + size > MAX_HELD_BYTES:
                raise CodedError("too many long requests are received or wait; try again later", protocol.BUSY)
            self._held += size
            try:
                return await reader.readexactly(size)
            finally:
                self._held -= size

        return await asyncio.wait_for(rest(), BODY_SECONDS)

    def _hold(self, size: int) -> Callable[[], None]:
        """Count a request's bytes until the returned function is called."""
        self._held += size

        def release() -> None:
            self._held -= size

        return release

    async def _answer(self, frame: Compress | CompressChat, connection: _Connection) -> None:
        number = frame.id
        reply: protocol.Frame
        try:
            protocol.check(frame)
            reply = await self._model.compress(frame, connection)
            reply.id = number
        except LagunaError as error:
            reply = protocol.error_frame(error, number)
        except Exception as error:
            logger.error("a request failed", exc_info=error)
            reply = protocol.error_frame(error, number)
        await connection.send(reply)


class _Connection:
    """The sending half of a connection, and its requests that have no reply yet."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._lock = asyncio.Lock()
        self.pending: dict[int, asyncio.Task[None]] = {}

    @property
    def socket(self) -> socket.socket:
        return self._writer.get_extra_info("socket")

    def start(self, number: int, work: Any, release: Callable[[], None]) -> None:
        """Work on a request; `release` is called when it has ended, however."""
        task = asyncio.create_task(work)
        self.pending[number] = task
        task.add_done_callback(lambda _: release())
        task.add_done_callback(lambda done: self._ended(number, done))

    def cancel(self, number: int) -> None:
        task = self.pending.get(number)
        if task is not None:
            task.cancel()

    async def send(self, frame: protocol.Frame) -> None:
        """One frame. A client that does not take it is dropped."""
        data = protocol.encode(frame)
        async with self._lock:
            self._writer.write(data)
            await asyncio.wait_for(self._writer.drain(), SEND_SECONDS)

    async def close(self) -> None:
        tasks = list(self.pending.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._writer.close()
        with contextlib.suppress(Exception):
            await asyncio.wait_for(self._writer.wait_closed(), 1)

    def _ended(self, number: int, task: asyncio.Task[None]) -> None:
        self.pending.pop(number, None)
        if not task.cancelled() and task.exception() is not None:  # the client did not take its reply
            self._writer.transport.abort()


def peer_uid(connection: Any) -> int | None:
    """User at the other end of a Unix socket; None where the system does not say."""
    if not hasattr(socket, "SO_PEERCRED"):
        return None
    size = struct.calcsize("3i")
    _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return uid
