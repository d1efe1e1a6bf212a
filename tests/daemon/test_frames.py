"""Hostile frames: whatever arrives, the daemon lives, says why, and serves the next client."""

import os
import random
import socket
import struct
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec
import pytest

from daemon_tools import Daemon
from http_tools import eventually
from laguna_gguf.daemon import protocol
from laguna_gguf.daemon.protocol import Compress, Error, Hello
from laguna_gguf.daemon.streams import Stream
from laguna_gguf.errors import ProtocolError
from scorer_fixtures import random_ids

ANY = protocol.decoder(protocol.Result | protocol.StatsReply | Error | protocol.Welcome)


def read(stream: Stream) -> protocol.Frame | None:
    body = stream.receive(time.monotonic() + 20)
    return None if body is None else protocol.decode(body, ANY)


def framed(body: bytes) -> bytes:
    return struct.pack("<I", len(body)) + body


@pytest.mark.parametrize(
    "data",
    [
        b"\x00\x00\x00\x00",
        b"\xff\xff\xff\xff" + b"x" * 100,
        struct.pack("<I", protocol.MAX_HELLO_BYTES + 1),
        framed(b"\xc1"),
        framed(b"hello, daemon"),
        framed(msgspec.msgpack.encode([1, 2, 3])),
        framed(msgspec.msgpack.encode({"type": "hello"})),
        framed(msgspec.msgpack.encode({"type": "hello", "version": "1"})),
        framed(msgspec.msgpack.encode({"type": "hello", "version": 1, "path": "/etc"})),
        framed(msgspec.msgpack.encode({"type": "stats", "id": 1})),
        framed(b"\x91" * 4000),
        protocol.encode(Hello(99)),
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    ],
)
def test_bad_greetings_are_refused(daemon: Daemon, data: bytes) -> None:
    with daemon.connect(greet=False) as stream:
        stream.send(data)
        reply = read(stream)
        assert isinstance(reply, Error) and reply.code == "protocol" and reply.message
        assert read(stream) is None
    assert daemon.stats()["state"] == "ready"


@pytest.mark.parametrize(
    "body",
    [
        b"\xc1",
        b"\x91" * 3_000_000,
        msgspec.msgpack.encode({"type": "compress", "id": 1}),
        msgspec.msgpack.encode({"type": "compress", "id": 2**70 % 2**63, "keep_ratio": "much", "text": "x"}),
        msgspec.msgpack.encode({"type": "compress", "id": 1, "keep_ratio": 0.1, "text": "x", "path": "/etc/passwd"}),
        b"\x82\xa4type\xa8compress\xa4text\xa2\xff\xfe",
        msgspec.msgpack.encode({"type": "welcome"}),
    ],
)
def test_bad_frames_end_the_connection(daemon: Daemon, body: bytes) -> None:
    with daemon.connect() as stream:
        stream.send(framed(body))
        reply = read(stream)
        assert isinstance(reply, Error) and reply.id is None and reply.code == "protocol"
        assert read(stream) is None


def test_bad_requests_leave_the_connection(daemon: Daemon) -> None:
    bad = [
        Compress(id=1, keep_ratio=0.1),
        Compress(id=2, keep_ratio=0.1, ids=b"abc"),
        Compress(id=3, keep_ratio=0.1, text="a", ids=b"abcd"),
        Compress(id=4, keep_ratio=0.1, text="a b c", required=[(0, 1)] * 65),
        Compress(id=5, keep_ratio=0.1, text="a b c", seconds=-1.0),
        Compress(id=6, keep_ratio=0.1, text="a b c", session="s" * 5000),
        Compress(id=7, keep_ratio=0.1, text="a b c", settings={"segment_probe_gguf": "/etc/passwd"}),
        Compress(id=8, keep_ratio=0.1, text=""),
        Compress(id=9, keep_ratio=0.1, text="x" * 3_000_000),
        Compress(id=10, keep_ratio=1e300, text="a b c"),
        Compress(id=11, keep_ratio=0.1, text="a b c", query=(2**62, -(2**62))),
    ]
    with daemon.connect() as stream:
        for request in bad:
            stream.send(protocol.encode(request))
            reply = read(stream)
            assert isinstance(reply, Error) and reply.id == request.id, reply
        stream.send(protocol.encode(Compress(id=12, keep_ratio=1.0, text="a b c")))
        assert getattr(read(stream), "text", None) == "a b c"


def nested(depth: int) -> bytes:
    """A request whose settings hold arrays inside one another."""
    body = protocol.encode(Compress(id=1, keep_ratio=0.5, text="a b", settings={"select_mode": "#"}))[4:]
    body = body.replace(b"\xa1#", b"\x91" * depth + b"\xc0")
    return struct.pack("<I", len(body)) + body


@pytest.mark.parametrize("depths", [range(100, 1100, 100), range(975, 1000), [10**4, 10**6]])
def test_deep_settings(daemon: Daemon, depths: Iterable[int]) -> None:
    for depth in depths:
        with daemon.connect() as stream:
            stream.send(nested(depth))
            body = stream.receive(time.monotonic() + 20)
            assert body is not None and b"error" in body
    assert daemon.stats()["state"] == "ready"


def test_the_same_id_twice(daemon: Daemon) -> None:
    request = protocol.encode(Compress(id=1, keep_ratio=0.1, ids=random_ids(3000).tobytes()))
    with daemon.connect() as stream:
        stream.send(request + request)
        reply = read(stream)
        assert isinstance(reply, Error) and reply.code == "protocol"
    eventually(lambda: daemon.stats()["running"] == 0)


def test_clients_gone_at_every_stage(daemon: Daemon) -> None:
    hello = protocol.encode(Hello(protocol.VERSION))
    request = protocol.encode(Compress(id=1, keep_ratio=0.1, ids=random_ids(2000).tobytes()))
    whole = hello + request
    cuts = [0, 3, 10, len(hello), len(hello) + 2, len(hello) + 4, len(hello) + 100, len(whole) - 1, len(whole)]
    for cut in cuts:
        for linger in (False, True):
            stream = daemon.connect(greet=False)
            if linger:  # a reset instead of an end
                stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            stream.send(whole[:cut])
            if cut == len(whole):
                time.sleep(0.05)
            stream.close()
    eventually(lambda: daemon.stats()["connections"] == 1 and daemon.stats()["running"] == 0)
    with daemon.client() as client:
        assert client.compress(random_ids(40), keep_ratio=1.0).retained_tokens == 40


def test_idle_and_slow_connections_hold_nobody_up(daemon: Daemon) -> None:
    idle = [daemon.connect(greet=n % 2 == 0) for n in range(200)]
    slow = daemon.connect()
    slow.send(struct.pack("<I", 50 << 20) + b"x" * 100)
    with daemon.client() as client:
        assert client.compress(random_ids(40), keep_ratio=1.0).retained_tokens == 40
        assert client.stats()["connections"] >= 202
    for stream in [*idle, slow]:
        stream.close()
    eventually(lambda: daemon.stats()["connections"] == 1)


def resident(daemon: Daemon) -> int:
    """Bytes of the front that no file backs."""
    text = Path(f"/proc/{daemon.process.pid}/status").read_text()
    return int(text.split("RssAnon:")[1].split()[0]) << 10


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs /proc")
def test_random_frames(daemon: Daemon) -> None:
    rng = random.Random(0)
    good = protocol.encode(Compress(id=1, keep_ratio=0.5, text="a b c d", required=[(0, 1)], session="s"))
    for n in range(300):
        if n == 30:
            before = resident(daemon)
        data = bytearray(good if n % 3 else rng.randbytes(rng.randrange(200)))
        for _ in range(rng.randrange(1, 6)):
            if data:
                data[rng.randrange(len(data))] = rng.randrange(256)
        stream = daemon.connect()
        stream.send(bytes(data[: rng.randrange(len(data) + 1)]))
        stream.close()
    eventually(lambda: daemon.stats()["connections"] == 1)
    assert resident(daemon) < before + (20 << 20)


def test_lengths() -> None:
    with pytest.raises(ProtocolError, match="announces 0 bytes"):
        protocol.length(b"\0\0\0\0")
    with pytest.raises(ProtocolError, match="too long to send"):
        protocol.encode(Compress(id=1, keep_ratio=0.1, ids=bytes(protocol.MAX_FRAME_BYTES + 1)))
