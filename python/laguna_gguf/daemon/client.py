"""PFlashClient: PFlash in another process of this machine."""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any

from laguna_gguf.daemon import protocol, results
from laguna_gguf.daemon.addresses import connect, parse
from laguna_gguf.daemon.protocol import Compress, CompressChat, Error, Result, StatsReply, Welcome
from laguna_gguf.daemon.streams import Stream
from laguna_gguf.errors import DaemonError, ProtocolError
from laguna_gguf.pflash.compressed import Compressed

CONNECT_SECONDS = 60.0
"""For the connection and the greeting, which comes when the daemon has loaded its drafter."""
GRACE_SECONDS = 5.0
"""Beyond a request's deadline, which the daemon watches itself."""

_GREETING = protocol.decoder(Welcome | Error)
_REPLIES = protocol.decoder(Result | StatsReply | Error)


class PFlashClient:
    """Calls of several threads wait for one another. The connection is made with the first call and, after the daemon
    was restarted, made anew by the next one.

    Raises what PFlash raises, and DaemonError when the daemon is absent, busy or ends while it works.
    """

    def __init__(
        self, address: str | os.PathLike[str], *, token: str | None = None, settings: dict[str, Any] | None = None
    ) -> None:
        """address: the socket's path, or tcp://127.0.0.1:PORT with its token. settings: fields of SelectionSettings
        for this client's requests, instead of the daemon's."""
        self._address = parse(address)
        self._token = token
        self._settings = settings
        self._lock = threading.Lock()
        self._stream: Stream | None = None
        self._pid = os.getpid()
        self._closed = False
        self._numbers = 0
        self._welcome: Welcome | None = None

    @property
    def welcome(self) -> Welcome:
        """What the daemon said of itself: architecture and SHA-256 of drafter, head and probe."""
        with self._lock:
            self._connected()
            assert self._welcome is not None
            return self._welcome

    def compress(
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
        """As PFlash.compress. timeout: seconds, DaemonError behind them. trace: whether to fetch the trace too."""
        return self._compressed(
            results.compress_request(
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
        )

    def compress_chat(
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
        """As PFlash.compress_chat. timeout, trace: see `compress`."""
        return self._compressed(
            results.chat_request(
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
        )

    def stats(self) -> dict[str, Any]:
        """The daemon's counters and state."""
        with self._lock:
            reply = self._call(protocol.Stats(0), None)
        return results.stats(reply)

    def close(self) -> None:
        """End the connection; further calls raise DaemonError."""
        self._closed = True
        self._drop()

    def __enter__(self) -> PFlashClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _compressed(self, request: Compress | CompressChat) -> Compressed:
        with self._lock:
            reply = self._call(request, request.seconds)
        return results.compressed(reply)

    def _call(self, frame: Compress | CompressChat | protocol.Stats, seconds: float | None) -> Result | StatsReply:
        self._numbers += 1
        frame.id = self._numbers
        data = protocol.encode(frame)
        stream = self._connected()
        deadline = None if seconds is None else time.monotonic() + seconds + GRACE_SECONDS
        try:
            stream.send(data, deadline)
            body = stream.receive(deadline)
            if body is None:
                raise ConnectionError("it closed the connection")
            reply = protocol.decode(body, _REPLIES)
        except OSError as error:
            self._drop()
            raise DaemonError(f"the daemon at {self._address} is gone: {error}") from error
        except BaseException:  # an interrupted call; the daemon cancels it when the connection ends
            self._drop()
            raise
        if reply.id != frame.id:
            self._drop()
            if isinstance(reply, Error):
                raise protocol.exception(reply)
            raise ProtocolError(f"the daemon answered request {reply.id} instead of {frame.id}")
        if isinstance(reply, Error):
            raise protocol.exception(reply)
        return reply

    def _connected(self) -> Stream:
        if self._closed:
            raise DaemonError("the client is closed")
        if self._pid != os.getpid():  # a child must not share its parent's connection, nor end it
            self._pid = os.getpid()
            if self._stream is not None:
                self._stream.socket.close()
                self._stream = None
        if self._stream is not None and _ended(self._stream):
            self._drop()
        if self._stream is None:
            deadline = time.monotonic() + CONNECT_SECONDS
            stream = Stream(connect(self._address, CONNECT_SECONDS))
            try:
                stream.send(protocol.encode(protocol.Hello(protocol.VERSION, self._token)), deadline)
                body = stream.receive(deadline)
                if body is None:
                    raise ConnectionError("it closed the connection")
                greeting = protocol.decode(body, _GREETING)
                if isinstance(greeting, Error):
                    raise protocol.exception(greeting)
            except OSError as error:
                stream.close()
                raise DaemonError(f"the daemon at {self._address} does not answer: {error}") from error
            except BaseException:
                stream.close()
                raise
            self._welcome, self._stream = greeting, stream
        return self._stream

    def _drop(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()


def _ended(stream: Stream) -> bool:
    """Whether the connection was closed, or holds something nobody asked for."""
    poll = select.poll()  # select refuses descriptors from 1024 on
    poll.register(stream.socket, select.POLLIN)
    return bool(poll.poll(0))
