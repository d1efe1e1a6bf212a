"""The wire of other runtimes: one command a line on standard input, int32 little-endian replies on a file descriptor.

After loading comes 0, or -1 and the end. Commands end with the path of a file of raw int32 token ids:

    compress  <keep x 1000> <query_end> <query_tokens> <path>
    compress2 <keep>        <query_end> <query_tokens> <path>
    compress3 <keep>        <query_end> <query_tokens> <n_spans> <begin> <end> ... <path>
    quit

The reply is 0, the number of kept ids and the ids, or -1, also for a line that is none of these.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import re
import stat
import struct
import sys
from dataclasses import dataclass, field

from laguna_gguf.daemon import options, protocol
from laguna_gguf.daemon.model import LoadError, Model
from laguna_gguf.daemon.protocol import Compress, Span
from laguna_gguf.errors import ConfigError, LagunaError, ProtocolError

logger = logging.getLogger(__name__)

MAX_LINE_BYTES = 1 << 16
FAILED = struct.pack("<i", -1)
READY = struct.pack("<i", 0)

_INTEGER = r"([0-9]{1,10})"
_KEEP = r"([0-9]+\.?[0-9]*(?:[eE][+-]?[0-9]+)?|\.[0-9]+(?:[eE][+-]?[0-9]+)?)"
_COMMAND = {
    b"compress": re.compile(rf"compress {_INTEGER} {_INTEGER} {_INTEGER} (.+)".encode(), re.DOTALL),
    b"compress2": re.compile(rf"compress2 {_KEEP} {_INTEGER} {_INTEGER} (.+)".encode(), re.DOTALL),
    b"compress3": re.compile(rf"compress3 {_KEEP} {_INTEGER} {_INTEGER} {_INTEGER} (.+)".encode(), re.DOTALL),
}
_SPAN = re.compile(rf"{_INTEGER} {_INTEGER} ".encode())


@dataclass(frozen=True)
class Command:
    """A parsed line."""

    keep_ratio: float
    query: Span
    path: bytes
    required: list[Span] = field(default_factory=list)


def parse(line: bytes) -> Command:
    """A line without its end. ProtocolError for anything but a compress command."""
    name = line.split(b" ", 1)[0]
    match = _COMMAND[name].fullmatch(line) if name in _COMMAND else None
    if match is None:
        raise ProtocolError("not a command")
    keep, query_end, query_tokens, *rest = match.groups()
    ratio = int(keep) / 1000 if name == b"compress" else float(keep)
    end, width = int(query_end), int(query_tokens)
    if not 0 <= ratio <= 1 or width < 1:
        raise ProtocolError(f"keep is {ratio}, query_tokens {width}; needed 0 to 1, and at least 1")
    spans, path = _spans(int(rest[0]), rest[1]) if name == b"compress3" else ([], rest[0])
    return Command(ratio, (end - width, end), path, spans)


def _spans(n: int, text: bytes) -> tuple[list[Span], bytes]:
    if n > protocol.MAX_REQUIRED:
        raise ProtocolError(f"{n} spans; at most {protocol.MAX_REQUIRED}")
    spans: list[Span] = []
    for _ in range(n):
        match = _SPAN.match(text)
        if match is None:
            raise ProtocolError(f"needed {n} spans before the path")
        spans.append((int(match[1]), int(match[2])))
        text = text[match.end() :]
    if not text:
        raise ProtocolError("no path behind the spans")
    return spans, text


def read_ids(path: bytes) -> bytes:
    """Token ids of a file, as they are. ProtocolError for a file that is none of ids."""
    try:
        # a pipe or device is not opened: that could block for ever
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise ProtocolError("not a regular file")
        with open(path, "rb") as file:
            data = file.read(4 * protocol.MAX_REQUEST_TOKENS + 1)
    except (OSError, ValueError) as error:
        raise ProtocolError(f"the ids cannot be read: {error}") from error
    if not data or len(data) % 4 or len(data) > 4 * protocol.MAX_REQUEST_TOKENS:
        raise ProtocolError(f"{len(data)} bytes; needed int32 ids, at most {protocol.MAX_REQUEST_TOKENS}")
    return data


def serve(args: argparse.Namespace) -> int:
    """Answer lines until `quit` or the end of the input. Returns the exit code."""
    descriptor = args.stream_fd
    if sys.stdin is None:
        raise ConfigError("--stdio reads commands from standard input, which is closed")
    try:
        os.fstat(descriptor)
    except OSError as error:
        raise ConfigError(f"--stream-fd {descriptor}: {error.strerror}") from error
    try:
        return asyncio.run(_serve(args, descriptor))
    except BrokenPipeError:
        return 1  # nobody reads the replies


async def _serve(args: argparse.Namespace, descriptor: int) -> int:
    try:
        config = options.load_config(args)
    except LagunaError:
        _write(descriptor, FAILED)
        raise
    model = Model(config, residency=args.draft_residency)
    model.start()
    try:
        try:
            await asyncio.shield(model.ready)
        except LoadError:
            _write(descriptor, FAILED)
            raise
        _write(descriptor, READY)
        loop = asyncio.get_running_loop()
        while (line := await loop.run_in_executor(None, _read_line)) is not None and line != b"quit":
            _write(descriptor, await _reply(model, line))
        return 0
    finally:
        await model.stop()


async def _reply(model: Model, line: bytes) -> bytes:
    try:
        command = parse(line)
        request = Compress(
            id=0,
            keep_ratio=command.keep_ratio,
            ids=read_ids(command.path),
            query=command.query,
            required=command.required,
        )
        result = await model.compress(request, "stdio")
    except LagunaError as error:
        logger.warning("-1: %s", error)
        return FAILED
    return struct.pack("<ii", 0, len(result.ids) // 4) + result.ids


def _read_line() -> bytes | None:
    """The next line without its end, b"" for one that is too long; None at the end of the input."""
    line = sys.stdin.buffer.readline(MAX_LINE_BYTES)
    if not line:
        return None
    if line.endswith(b"\n") or len(line) < MAX_LINE_BYTES:
        return line.removesuffix(b"\n")
    while (rest := sys.stdin.buffer.readline(MAX_LINE_BYTES)) and not rest.endswith(b"\n"):
        pass
    return b""


def _write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
