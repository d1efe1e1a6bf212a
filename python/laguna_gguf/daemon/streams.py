"""A blocking connection that carries frames, as the clients and the model process use it."""

from __future__ import annotations

import contextlib
import socket
import time

from laguna_gguf.daemon import protocol


class Stream:
    """Frames over a connected socket. One thread may send while another receives."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection

    def send(self, data: bytes, deadline: float | None = None) -> None:
        """Send an encoded frame. OSError when the other side is gone, TimeoutError when it does not take it in time."""
        self._set_timeout(deadline)
        self.socket.sendall(data)

    def receive(self, deadline: float | None = None) -> bytearray | None:
        """The body of the next frame; None when the connection ended between frames.

        deadline: as time.monotonic(). TimeoutError when it passes, ConnectionError when the connection ended inside a
        frame, ProtocolError for one that is too long.
        """
        header = self._read(protocol.HEADER_BYTES, deadline)
        if header is None:
            return None
        body = self._read(protocol.length(bytes(header)), deadline)
        if body is None:
            raise ConnectionError("the connection ended inside a frame")
        return body

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)  # wakes a thread that is receiving; closing alone does not
        self.socket.close()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self, n_bytes: int, deadline: float | None) -> bytearray | None:
        data = bytearray(n_bytes)
        view, done = memoryview(data), 0
        while done < n_bytes:
            if deadline is not None:
                self._set_timeout(deadline)
            n = self.socket.recv_into(view[done:])
            if n == 0:
                if done == 0:
                    return None
                raise ConnectionError("the connection ended inside a frame")
            done += n
        return data

    def _set_timeout(self, deadline: float | None) -> None:
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left <= 0:
            raise TimeoutError("no answer before the deadline")
        self.socket.settimeout(left)
