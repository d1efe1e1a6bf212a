"""The daemon as a process: its socket, signals, exit codes, and a drafter that dies."""

import asyncio
import os
import signal
import socket
import stat
import subprocess
import threading
import time
from pathlib import Path

import pytest

from daemon_tools import COMMAND, QUICK, running_daemon
from http_tools import eventually
from laguna_gguf import PFlashClient
from laguna_gguf.daemon.fairness import CLIENT_LIMIT, FairQueue
from laguna_gguf.daemon.loading import Load
from laguna_gguf.daemon.model import AUTO, Model
from laguna_gguf.daemon.protocol import CodedError, Compress
from laguna_gguf.errors import DaemonError
from laguna_gguf.pflash.head import export_head
from random_drafter import write_drafter
from scorer_fixtures import random_ids


def run(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *QUICK, *arguments], capture_output=True, text=True, timeout=60, env=os.environ | (env or {})
    )


def test_the_socket_is_private_and_removed(tmp_path: Path, qwen35: Path) -> None:
    with running_daemon(tmp_path, "--prefill-drafter", str(qwen35)) as daemon:
        path = Path(daemon.socket)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        daemon.stats()
        second = run("--socket", daemon.socket, "--prefill-drafter", str(qwen35))
        assert second.returncode == 1 and "already listening" in second.stderr and second.stderr.count("\n") == 1
        assert daemon.stats()["state"] == "ready"
        assert daemon.stop() == 0 and not path.exists()


def test_a_stale_socket_is_replaced_and_other_files_are_not(tmp_path: Path, qwen35: Path) -> None:
    (tmp_path / "run").mkdir()
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(str(tmp_path / "run" / "pflash.sock"))
    stale.close()
    with running_daemon(tmp_path, "--prefill-drafter", str(qwen35)) as daemon:
        eventually(lambda: _answers(daemon.socket))
    (tmp_path / "file").write_text("precious")
    refused = run("--socket", str(tmp_path / "file"), "--prefill-drafter", str(qwen35))
    assert refused.returncode == 1 and "is no socket" in refused.stderr
    assert (tmp_path / "file").read_text() == "precious"


def _answers(address: str) -> bool:
    try:
        with PFlashClient(address) as client:
            return client.stats()["state"] == "ready"
    except DaemonError:
        return False


def test_signals(tmp_path: Path, qwen35: Path) -> None:
    with running_daemon(tmp_path, "--prefill-drafter", str(qwen35)) as daemon:
        with daemon.client() as client:
            client.stats()
            found = []
            thread = threading.Thread(
                target=lambda: found.append(client.compress(random_ids(3000), keep_ratio=0.1).retained_tokens)
            )
            thread.start()
            eventually(lambda: daemon.stats()["running"] == 1)
            daemon.process.send_signal(signal.SIGHUP)
            assert daemon.stats()["running"] == 1
            assert daemon.stop() == 0  # the request in progress is finished first
            thread.join()
            assert found and found[0] > 0
            with pytest.raises(DaemonError):
                client.stats()
    assert not os.path.exists(daemon.socket)


def test_a_killed_drafter_is_started_again(tmp_path: Path, qwen35: Path) -> None:
    with running_daemon(tmp_path, "--prefill-drafter", str(qwen35)) as daemon, daemon.client() as client:
        pid = client.stats()["drafter_pid"]
        failures: list[Exception] = []

        def work() -> None:
            with daemon.client() as other:
                try:
                    other.compress(random_ids(8000), keep_ratio=0.1)
                except DaemonError as error:
                    failures.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        eventually(lambda: client.stats()["running"] == 1)
        os.kill(pid, signal.SIGKILL)
        thread.join(20)
        assert len(failures) == 1 and "died" in str(failures[0])
        assert client.compress(random_ids(40), keep_ratio=1.0).retained_tokens == 40
        os.kill(client.stats()["drafter_pid"], signal.SIGKILL)  # this time while it has nothing to do
        assert client.compress(random_ids(40), keep_ratio=1.0).retained_tokens == 40
        assert client.stats()["restarts"] == 2


def test_a_drafter_that_is_only_there_for_requests(tmp_path: Path, qwen35: Path) -> None:
    arguments = ["--prefill-drafter", str(qwen35), "--draft-residency", "request-scoped"]
    with running_daemon(tmp_path, *arguments) as daemon, daemon.client() as client:
        eventually(lambda: client.stats()["state"] == "unloaded")
        assert client.compress(random_ids(40), keep_ratio=1.0).retained_tokens == 40
        eventually(lambda: client.stats()["state"] == "unloaded")
        assert client.stats()["drafter_pid"] is None and client.stats()["restarts"] == 0


def test_an_idle_drafter_gives_its_memory_back(qwen35: Path) -> None:
    request = Compress(id=0, keep_ratio=1.0, ids=random_ids(40).tobytes())

    async def run() -> None:
        model = Model(Load(str(qwen35), llama={"n_threads": 1}), residency=AUTO, idle_seconds=0.5)
        model.start()
        try:
            await model.ready
            pids = []
            for _ in range(2):
                for _ in range(2):  # closer together than idle_seconds: the same process
                    assert (await model.compress(request, "one")).retained_tokens == 40
                    pids.append(model.stats()["drafter_pid"])
                deadline = time.monotonic() + 15
                while model.state != "unloaded":
                    assert time.monotonic() < deadline, "it kept its memory"
                    await asyncio.sleep(0.02)
                assert model.available and model.stats()["drafter_pid"] is None
            assert pids[0] == pids[1] != pids[2] == pids[3]
            assert model.stats()["restarts"] == 0
        finally:
            await model.stop()

    asyncio.run(run())


def test_tcp_with_a_token(tmp_path: Path, qwen35: Path) -> None:
    (tmp_path / "token").write_text("secret words\n")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    address = f"tcp://127.0.0.1:{port}"
    process = subprocess.Popen(
        [*COMMAND, *QUICK, "--socket", address, "--token-file", str(tmp_path / "token"), "--prefill-drafter", qwen35],
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 20
        while True:
            try:
                with PFlashClient(address, token="secret words") as client:
                    assert client.compress(random_ids(40), keep_ratio=1.0).retained_tokens == 40
                break
            except DaemonError:
                assert time.monotonic() < deadline
                time.sleep(0.05)
        for token in (None, "", "other words", "secret wörds"):
            with pytest.raises(DaemonError, match="token"):
                PFlashClient(address, token=token).stats()
    finally:
        process.terminate()
        assert process.wait(20) == 0


def test_usage_errors() -> None:
    for arguments in ([], ["--prefill-drafter", "x"], ["--stdio"], ["--socket", "tcp://127.0.0.1:1"], ["--nonsense"]):
        result = run(*arguments)
        assert result.returncode == 2 and result.stdout == "", result


def test_refusals_give_one_reason(tmp_path: Path, qwen35: Path) -> None:
    other = write_drafter(tmp_path / "other.gguf", seed=9)
    foreign = tmp_path / "foreign-head.gguf"
    export_head(other, foreign)
    address = str(tmp_path / "x.sock")
    cases = [
        (["--prefill-drafter", str(tmp_path / "absent.gguf")], "not found", {}),
        (["--prefill-drafter", str(foreign)], "architecture", {}),
        (["--prefill-drafter", str(qwen35), "--scoring-head", str(foreign)], "", {}),
        (["--prefill-drafter", str(qwen35)], "PFLASH_SELECT_TOP_P", {"PFLASH_SELECT_TOP_P": "0,5"}),
        (["--prefill-drafter", str(qwen35), "--token-file", str(tmp_path / "absent")], "token file", {}),
    ]
    for arguments, fragment, env in cases:
        result = run("--socket", address, *arguments, env=env)
        assert result.returncode == 1 and result.stdout == "", result
        assert result.stderr.count("\n") == 1 and fragment in result.stderr and "Traceback" not in result.stderr
        assert not os.path.exists(address)
    for arguments in (
        ["--upstream", "http://[::1"],
        ["--upstream", "http://x:99999"],
        ["--upstream", "x", "--host", ""],
    ):
        refused = run("--prefill-drafter", str(qwen35), *arguments)
        assert refused.returncode == 1 and refused.stderr.count("\n") == 1, refused
    demo = run("--socket", address, env={"PFLASH_SCORING_HEAD_GGUF": str(tmp_path / "absent.gguf")})
    assert demo.returncode == 1 and "absent.gguf not found" in demo.stderr  # the environment's, not the demo's own
    long = run("--socket", str(tmp_path / ("x" * 120)), "--prefill-drafter", str(qwen35))
    assert long.returncode == 1 and "too long" in long.stderr


def test_turns_are_fair() -> None:
    line: FairQueue[str] = FairQueue()
    for n in range(3):
        line.put("a", f"a{n}")
    line.put("b", "b0")
    line.put("c", "c0")
    assert line.remove("c", "c0") and not line.remove("c", "c0") and not line.remove("d", "x")
    assert [line.take() for _ in range(4)] == ["a0", "b0", "a1", "a2"]
    assert not len(line) and not line.filled.is_set()


def test_lines_have_limits() -> None:
    line: FairQueue[int] = FairQueue(limit=CLIENT_LIMIT + 1)
    for n in range(CLIENT_LIMIT):
        line.put("a", n)
    with pytest.raises(CodedError, match="waiting already"):
        line.put("a", 0)
    line.put("b", 0)
    with pytest.raises(CodedError):
        line.put("c", 0)
    assert len(line.clear()) == CLIENT_LIMIT + 1
