"""Listening sockets and signals of a uvicorn server."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from laguna_gguf.errors import ConfigError


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 lets the system choose. Raises ConfigError."""
    if not host:  # to the system it means every address
        raise ConfigError("the host to listen on is empty; give 127.0.0.1, or 0.0.0.0 for every address")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=128)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"cannot listen on {host} port {port}: {reason}") from error


def address(listener: socket.socket) -> str:
    """The URL of a listening socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@contextmanager
def quiet_signals() -> Iterator[None]:
    """uvicorn raises the signal that ended it once more; here the end is a normal one."""
    try:
        before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not the main thread: uvicorn does not handle signals there either
        yield
        return
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
