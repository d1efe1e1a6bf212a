"""Addresses of the daemon: the path of a Unix socket, or tcp://127.0.0.1:PORT."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import ipaddress
import os
import socket
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from laguna_gguf.errors import ConfigError, DaemonError

BACKLOG = 512


@dataclass(frozen=True)
class Address:
    """Where the daemon listens: `path`, or `host` and `port`."""

    path: str = ""
    host: str = ""
    port: int = 0

    @property
    def is_tcp(self) -> bool:
        return not self.path

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return self.path or f"tcp://{host}:{self.port}"


def parse(text: str | os.PathLike[str]) -> Address:
    """ConfigError for what is no address, or TCP beyond this machine."""
    try:
        raw = os.fsdecode(text)
    except TypeError:
        raise ConfigError(f"the socket is {text!r}; needed a path, or tcp://127.0.0.1:PORT") from None
    if not raw.startswith("tcp://"):
        path = raw.removeprefix("unix:")
        if not path or "\0" in path:
            raise ConfigError(f"the socket is {raw!r}; needed a path, or tcp://127.0.0.1:PORT")
        return Address(path=path)
    try:
        parts = urlsplit(raw)
        host, port = parts.hostname or "", parts.port
        local = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        local, port = False, None
    if not local or port is None or parts.path or parts.query:
        raise ConfigError(f"{raw!r}: needed tcp://127.0.0.1:PORT; beyond this machine nothing is encrypted")
    return Address(host="127.0.0.1" if host == "localhost" else host, port=port)


def connect(address: Address, timeout: float | None) -> socket.socket:
    """A connection. DaemonError when nobody listens."""
    family = socket.AF_UNIX if not address.is_tcp else socket.AF_INET6 if ":" in address.host else socket.AF_INET
    connection = socket.socket(family, socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout)
        connection.connect((address.host, address.port) if address.is_tcp else address.path)
        if address.is_tcp:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except OSError as error:
        connection.close()
        raise absent(address, error) from error
    return connection


def absent(address: Address, error: Exception) -> DaemonError:
    """Nobody listens."""
    reason = getattr(error, "strerror", None) or error or "no answer in time"
    return DaemonError(f"no daemon at {address}: {reason}; start it with `pflash_daemon --socket {address}`")


@contextlib.contextmanager
def listening(address: Address) -> Iterator[socket.socket]:
    """A listening socket; a Unix socket's file is removed at the end.

    Its folder is created private (0700) where it does not exist, the socket has mode 0600. What a dead daemon left is
    replaced; ConfigError when a live one listens or something else stands there.
    """
    if address.is_tcp:
        try:
            family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
            server = socket.create_server((address.host, address.port), family=family, backlog=BACKLOG)
        except OSError as error:
            raise ConfigError(f"cannot listen on {address}: {error.strerror or error}") from error
        with server:
            yield server
        return
    path = Path(address.path)
    with _bound(path) as server:
        identity = path.stat().st_ino
        try:
            yield server
        finally:
            with contextlib.suppress(OSError):
                if path.lstat().st_ino == identity:  # not one that somebody has put in its place
                    path.unlink()


@contextlib.contextmanager
def _bound(path: Path) -> Iterator[socket.socket]:
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)  # two daemons must not both find the file stale
            _remove_stale(path)
            before = os.umask(0o177)
            try:
                server.bind(str(path))
            finally:
                os.umask(before)
            server.listen(BACKLOG)
        finally:
            os.close(folder)
    except OSError as error:
        server.close()
        reason = "the path is too long for a socket" if "too long" in str(error) else error.strerror or error
        raise ConfigError(f"cannot listen on {path}: {reason}") from error
    except BaseException:
        server.close()
        raise
    with server:
        yield server


def _remove_stale(path: Path) -> None:
    try:
        status = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(status.st_mode):
        raise ConfigError(f"{path} exists and is no socket; remove it, or give another --socket")
    probe = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        probe.settimeout(2)
        probe.connect(str(path))
    except OSError as error:
        if error.errno == errno.ECONNREFUSED:  # nobody listens: its daemon is dead
            path.unlink()
            return
    finally:
        probe.close()
    raise ConfigError(f"a daemon is already listening on {path}; stop it, or give another --socket")
