"""`laguna-gguf serve` as a process: it listens at once, says where, and ends cleanly or with one reason."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import soak_serve
from http_tools import Answer, eventually
from laguna_gguf.cli import main
from serve_tools import TEXT, Running


class Process(Running):
    """A server in a process of its own."""

    def __init__(self, process: subprocess.Popen[str], port: int) -> None:
        self.process = process
        self.port = port

    def end(self, number: int) -> tuple[int, str]:
        """The exit code and what is left of stderr after a signal."""
        self.process.send_signal(number)
        assert self.process.stderr is not None
        rest = self.process.stderr.read()
        return self.process.wait(30), rest


@contextmanager
def command(target: Path, drafter: Path, *arguments: str) -> Iterator[Process]:
    argv = [sys.executable, "-m", "laguna_gguf.cli", "serve", "-m", str(target), "-md", str(drafter), "--port", "0"]
    argv += ["-t", "1", "-c", "512", "-ub", "64", *arguments]
    process = subprocess.Popen(argv, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        port = None
        for line in process.stderr:
            if found := re.search(r"listening on http://127\.0\.0\.1:(\d+)", line):
                port = int(found.group(1))
                break
        assert port is not None, process.wait(10)
        yield Process(process, port)
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_starts_and_ends(tiny_target: Path, tiny_drafter: Path, tmp_path: Path, number: int) -> None:
    keys = tmp_path / "keys"
    keys.write_text("file-key\n\n")
    arguments = ("--alias", "mine", "--api-key", "a,b", "--api-key-file", str(keys), "--temp", "0", "--no-draft")
    with command(tiny_target, tiny_drafter, *arguments) as here:
        eventually(lambda: here.get("/health").status == 200, 60)

        def ask(key: str) -> Answer:
            return here.request("POST", TEXT, {"prompt": "x", "max_tokens": 5}, {"Authorization": f"Bearer {key}"})

        answers = [ask(key) for key in ("a", "b", "file-key")]
        assert len({answer.json["choices"][0]["text"] for answer in answers}) == 1  # --temp 0 is the default
        assert answers[0].json["model"] == "mine" and "draft_n" not in answers[0].json["timings"]
        assert ask("c").status == 401
        with here.tcp() as idle:
            code, rest = here.end(number)
            assert idle.recv(10) == b""
        assert code == 0
        assert "Traceback" not in rest and "file-key" not in rest


def test_ends_while_it_works(tiny_target: Path, tiny_drafter: Path) -> None:
    with command(tiny_target, tiny_drafter, "--queue-limit", "4") as here:
        eventually(lambda: here.get("/health").status == 200, 60)
        body = b'{"prompt": "x", "max_tokens": 480, "stream": true, "logit_bias": {"2": -1000, "24": -1000}}'
        request = f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
        with here.tcp(request) as connection, here.tcp(request) as other:
            assert connection.recv(10)
            code, rest = here.end(signal.SIGTERM)
            assert other.recv(10)
        assert code == 0 and "Traceback" not in rest


def test_a_model_that_cannot_be_loaded_ends_it(
    tiny_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from fixtures import write_drafter_dir

    write_drafter_dir(tmp_path / "other", hidden_size=128)
    arguments = ["serve", "-m", str(tiny_target), "-md", str(tmp_path / "other"), "--port", "0", "-c", "512", "-t", "1"]
    assert main(arguments) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("laguna-gguf: error: ") and "128" in error


@pytest.mark.parametrize(
    ("arguments", "code", "fragment"),
    [
        (["-md", "absent"], 1, "absent"),
        (["--port", "70000"], 2, "70000"),
        (["--port", "x"], 2, "x"),
        (["--host", "no.such.host.invalid"], 1, "no.such.host.invalid"),
        (["--api-key", " , "], 1, "--api-key"),
        (["--api-key-file", "/dev/null"], 1, "/dev/null"),
        (["--api-key-file", "absent-file"], 1, "absent-file"),
        (["-np", "2"], 2, "--parallel"),
        (["--queue-limit", "-1"], 2, "--queue-limit"),
        (["--spec-draft-n-max", "99"], 1, "draft_max"),
    ],
)
def test_refused_arguments(
    tiny_target: Path,
    tiny_drafter: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    fragment: str,
) -> None:
    base = ["serve", "-m", str(tiny_target), "-md", str(tiny_drafter), "--port", "0", "-c", "512", "-t", "1"]
    try:
        returned: object = main([*base, *arguments])
    except SystemExit as stop:
        returned = stop.code
    assert returned == code
    assert fragment in capsys.readouterr().err.splitlines()[-1]


def test_port_in_use(tiny_target: Path, tiny_drafter: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["serve", "-m", str(tiny_target), "-md", str(tiny_drafter), "--port", port, "-c", "512"]) == 1
    assert port in capsys.readouterr().err.splitlines()[-1]


def test_needs_a_drafter(tiny_target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["serve", "-m", str(tiny_target), "--no-draft"])
    assert stop.value.code == 2 and "-md" in capsys.readouterr().err


def test_soak(
    tiny_target: Path, tiny_drafter: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["soak_serve.py", "-m", tiny_target, "-md", tiny_drafter, "--requests", "40"]
    monkeypatch.setattr(sys, "argv", [str(part) for part in argv])
    assert soak_serve.main() == 0, capsys.readouterr().out
    assert '"left"' in capsys.readouterr().out
