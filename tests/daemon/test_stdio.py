"""The stdio wire, byte for byte."""

import os
import struct
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from daemon_tools import COMMAND, QUICK
from laguna_gguf import PFlash, SelectionSettings
from laguna_gguf.daemon.stdio import MAX_LINE_BYTES, Command, parse
from laguna_gguf.errors import ProtocolError
from scorer_fixtures import random_ids


class Wire:
    def __init__(self, process: subprocess.Popen[bytes], replies: int) -> None:
        self.process, self.replies = process, replies

    def send(self, line: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line)
        self.process.stdin.flush()

    def read(self, n: int = 1) -> list[int]:
        data = b""
        while len(data) < 4 * n:
            part = os.read(self.replies, 4 * n - len(data))
            assert part, "the replies ended"
            data += part
        return list(struct.unpack(f"<{n}i", data))

    def ask(self, line: bytes) -> list[int] | None:
        """Kept ids, or None for -1."""
        self.send(line + b"\n")
        if self.read() == [-1]:
            return None
        return self.read(self.read()[0])


@contextmanager
def stdio(*arguments: Any, env: dict[str, str] | None = None) -> Iterator[Wire]:
    ours, theirs = os.pipe()
    process = subprocess.Popen(
        [*COMMAND, *QUICK, "--stdio", "--stream-fd", str(theirs), *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        pass_fds=(theirs,),
        env=os.environ | (env or {}),
    )
    os.close(theirs)
    try:
        yield Wire(process, ours)
    finally:
        process.kill()
        process.communicate()
        os.close(ours)


@pytest.fixture
def ids(tmp_path: Path) -> tuple[bytes, np.ndarray]:
    values = random_ids(600)
    path = tmp_path / "ids with blanks .bin"
    values.astype("<i4").tofile(path)
    return os.fsencode(path), values


def test_the_wire(qwen35: Path, ids: tuple[bytes, np.ndarray], tmp_path: Path) -> None:
    path, values = ids
    environment = {"PFLASH_SELECT_CHUNK_SIZE": "20"}
    (tmp_path / "odd").write_bytes(b"12345")
    (tmp_path / "none").write_bytes(b"")
    (tmp_path / "foreign").write_bytes(struct.pack("<3i", 1, 2, 5000))
    os.mkfifo(tmp_path / "fifo")
    pflash = PFlash(qwen35, settings=SelectionSettings(select_chunk_size=20), n_threads=1, n_threads_batch=1)

    def expected(keep: float, query: tuple[int, int], required: Sequence[tuple[int, int]] = ()) -> list[int]:
        return pflash.compress(values, keep_ratio=keep, query=query, required=required).ids.tolist()

    with pflash, stdio("--prefill-drafter", qwen35, env=environment) as wire:
        assert wire.read() == [0]
        assert wire.ask(b"compress 250 600 8 " + path) == expected(0.25, (592, 600))
        assert wire.ask(b"compress2 0.136533333 590 16 " + path) == expected(16384 / 120000, (574, 590))
        assert wire.ask(b"compress2 2.5e-01 600 8 " + path) == expected(0.25, (592, 600))
        spans = [(5, 9), (100, 130)]
        assert wire.ask(b"compress3 0.1 600 8 2 5 9 100 130 " + path) == expected(0.1, (592, 600), spans)
        assert wire.ask(b"compress3 0.1 600 8 0 " + path) == expected(0.1, (592, 600))
        bad = [b"", b" ", b"compress", b"compress 250 600 8", b"compress 250 600 8 ", b"COMPRESS 250 600 8 " + path]
        bad += [b"compress 1001 600 8 " + path, b"compress -1 600 8 " + path, b"compress 250 600 0 " + path]
        bad += [b"compress2 nan 600 8 " + path, b"compress2 1.5 600 8 " + path, b"compress2 0x1 600 8 " + path]
        bad += [b"compress 250 601 8 " + path, b"compress 250 4 8 " + path, b"compress 250 8 8 " + path]
        bad += [b"compress 250 600 600 " + path, b"compress 250 99999999999 8 " + path]
        bad += [b"compress3 0.1 600 8 2 5 9 " + path, b"compress3 0.1 600 8 1 9 5 " + path]
        bad += [b"compress3 0.1 600 8 2 5 9 7 12 " + path, b"compress3 0.1 600 8 1 0 700 " + path]
        bad += [b"compress3 0.1 600 8 65 " + b"0 1 " * 65 + path, b"compress3 0.1 600 8 1 5 9 "]
        bad += [b"compress 250 600 8 " + os.fsencode(tmp_path / name) for name in ("odd", "none", "foreign", "absent")]
        bad += [b"compress 250 600 8 " + os.fsencode(tmp_path / "fifo"), b"compress 250 600 8 /dev/zero"]
        bad += [b"compress 250 600 8 \0", b"\xff\xfe\0", b"compress4 1 2 3 x", b"x" * (3 * MAX_LINE_BYTES), b"quit now"]
        for line in bad:
            assert wire.ask(line) is None, line[:80]
        assert wire.ask(b"compress 250 600 8 " + path) == expected(0.25, (592, 600))
        wire.send(b"quit\n")
        assert wire.process.wait(20) == 0
        assert os.read(wire.replies, 4) == b""
        assert wire.process.stdout is not None and wire.process.stdout.read() == b""


def test_the_end_of_the_input(qwen35: Path, ids: tuple[bytes, np.ndarray]) -> None:
    with stdio("--prefill-drafter", qwen35) as wire:
        assert wire.read() == [0]
        assert wire.process.stdin is not None
        wire.send(b"compress 1000 600 8 " + ids[0])
        wire.process.stdin.close()
        assert wire.read(2) == [0, 600]
        assert wire.read(600) == ids[1].tolist()
        assert wire.process.wait(20) == 0
        wire.process.stdin = None  # for communicate()


def test_a_drafter_that_does_not_load(tmp_path: Path) -> None:
    with stdio("--prefill-drafter", tmp_path / "absent.gguf") as wire:
        assert wire.read() == [-1]
        assert wire.process.wait(20) == 1


def test_a_closed_descriptor(qwen35: Path) -> None:
    result = subprocess.run(
        [*COMMAND, "--stdio", "--stream-fd", "99", "--prefill-drafter", qwen35],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 1 and "--stream-fd 99" in result.stderr and result.stderr.count("\n") == 1


def test_parsed_lines() -> None:
    assert parse(b"compress 50 100 8  two blanks ") == Command(0.05, (92, 100), b" two blanks ")
    assert parse(b"compress3 .5 9 1 1 2 3 4 5") == Command(0.5, (8, 9), b"4 5", [(2, 3)])
    for line in (b"compress\t50 100 8 x", b"compress +5 100 8 x", b"compress2 inf 1 1 x", b"quit"):
        with pytest.raises(ProtocolError):
            parse(line)


def test_no_standard_input(qwen35: Path) -> None:
    command = " ".join([*COMMAND, *QUICK, "--prefill-drafter", str(qwen35), "--stdio", "--stream-fd", "1"])
    ended = subprocess.run(["sh", "-c", f"{command} <&-"], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1 and "standard input" in ended.stderr and "Traceback" not in ended.stderr
