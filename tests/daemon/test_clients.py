"""PFlashClient and AsyncPFlashClient: the library's answers and errors from another process."""

import asyncio
import gc
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from daemon_tools import Daemon
from http_tools import eventually
from laguna_gguf import AsyncPFlashClient, PFlash, PFlashClient, SelectionSettings
from laguna_gguf.errors import ConfigError, DaemonError, LagunaError, QueryError, SelectionError
from laguna_gguf.pflash.hashing import file_sha256
from scorer_fixtures import random_ids


@pytest.fixture(scope="module")
def library(qwen35: Path) -> Iterator[PFlash]:
    with PFlash(qwen35, settings=SelectionSettings(), n_threads=1, n_threads_batch=1) as loaded:
        yield loaded


@pytest.fixture
def client(daemon: Daemon) -> Iterator[PFlashClient]:
    with daemon.client() as connected:
        yield connected


def test_same_answers_as_the_library(client: PFlashClient, library: PFlash) -> None:
    ids = random_ids(700)
    requests = [
        dict(keep_ratio=0.3),
        dict(keep_ratio=0.2, query=(300, 308), required=[(10, 20)], history=[(50, 58)], suffix_candidates=True),
    ]
    for request in requests:
        ours, theirs = client.compress(ids, **request, trace=True), library.compress(ids, **request)
        assert ours.spans == theirs.spans and ours.text == theirs.text and np.array_equal(ours.ids, theirs.ids)
        assert ours.ids.dtype == np.int32 and (ours.budget, ours.stop_reason) == (theirs.budget, theirs.stop_reason)
        assert ours.retained_mass == pytest.approx(theirs.retained_mass, rel=1e-4)
        assert set(ours.timings) == set(theirs.timings)
        assert ours.trace["selected_chunks"] == theirs.trace["selected_chunks"]
    text = "The river runs by the old mill. " * 30 + "Where is the mill?"
    assert client.compress(text, keep_ratio=0.3).text == library.compress(text, keep_ratio=0.3).text
    assert client.compress(ids.tolist(), keep_ratio=0.3).trace == {}


def test_sessions_travel(client: PFlashClient) -> None:
    ids = random_ids(300, seed=5)
    client.compress(ids, keep_ratio=0.5, session="travels")
    again = client.compress(ids, keep_ratio=0.5, session="travels")
    assert again.timings["scorer_resume"] == 300 and again.timings["scorer_new_tokens"] == 0


def test_settings_travel(daemon: Daemon) -> None:
    with daemon.client(settings={"select_chunk_size": 10}) as client:
        assert client.compress(random_ids(300), keep_ratio=0.1, trace=True).trace["chunk_size"] == 10
    with daemon.client(settings={"select_chunk_size": 0}) as client, pytest.raises(ConfigError, match="CHUNK_SIZE"):
        client.compress(random_ids(300), keep_ratio=0.1)
    with (
        daemon.client(settings={"trace_path": "trace.jsonl"}) as client,
        pytest.raises(ConfigError, match="trace_path"),
    ):
        client.compress(random_ids(300), keep_ratio=0.1)


def test_views_are_a_clients_choice(daemon: Daemon) -> None:
    first = f"<|im_start|>user\n{'The river runs by the mill. ' * 30}Where?<|im_end|>\n<|im_start|>assistant\n"
    second = first + "There.<|im_end|>\n<|im_start|>user\nAnd when?<|im_end|>\n<|im_start|>assistant\n"
    modes = []
    for view in (True, False):
        with daemon.client(settings={"chat_view": view, "chat_recall_min_lift": 9.0}) as client:
            client.compress_chat(first, keep_ratio=0.5, session="view")
            chat = client.compress_chat(second, keep_ratio=0.5, session="view")
            modes.append((chat.timings.get("view") or {}).get("mode"))
    assert modes[0] in ("continue", "rebuild") and modes[1] is None


def test_errors_are_the_librarys(client: PFlashClient) -> None:
    ids = random_ids(300)
    cases: list[tuple[type[LagunaError], dict]] = [
        (ConfigError, dict(keep_ratio=3.0)),
        (ConfigError, dict(keep_ratio=float("nan"))),
        (QueryError, dict(keep_ratio=0.1, query=(5, 2))),
        (SelectionError, dict(keep_ratio=0.1, required=[(5, 2)])),
        (QueryError, dict(keep_ratio=0.1, query="what")),
        (LagunaError, dict(keep_ratio=0.1, required=[(i, i + 1) for i in range(65)])),
        (QueryError, dict(keep_ratio=0.1, history=[(0, 2**40)])),
    ]
    for kind, request in cases:
        with pytest.raises(kind) as caught:
            client.compress(ids, **request)
        if isinstance(caught.value, SelectionError):
            assert caught.value.stop_reason == "invalid_input"
    for bad in ([], [5000], [[1, 2]], [1.5], [2**40], None, "half a pair \ud800"):
        with pytest.raises(LagunaError):
            client.compress(bad, keep_ratio=0.1)
    assert client.compress(ids, keep_ratio=0.5).retained_tokens


@pytest.mark.parametrize(
    "wrong",
    [
        {"keep_ratio": 10**400},
        {"required": None},
        {"history": 5},
        {"required": [5]},
        {"timeout": float("nan")},
        {"timeout": float("inf")},
        {"timeout": 0},
        {"timeout": "soon"},
    ],
)
def test_arguments_that_cannot_travel(client: PFlashClient, wrong: dict[str, Any]) -> None:
    with pytest.raises(LagunaError, match=r"keep_ratio|token positions|timeout"):
        client.compress("The river runs.", **({"keep_ratio": 0.5} | wrong))


def test_what_the_daemon_is(client: PFlashClient, qwen35: Path) -> None:
    assert client.welcome.architecture == "qwen35" and client.welcome.head_sha256 is None
    assert client.welcome.drafter_sha256 == file_sha256(qwen35)
    stats = client.stats()
    assert stats["state"] == "ready" and stats["connections"] >= 1
    client.compress(random_ids(50), keep_ratio=0.5)
    assert client.stats()["completed"] == stats["completed"] + 1


def test_deadline(client: PFlashClient) -> None:
    with pytest.raises(DaemonError, match="not done within"):
        client.compress(random_ids(4000), keep_ratio=0.1, timeout=0.02)
    assert client.compress(random_ids(50), keep_ratio=0.5).retained_tokens
    assert client.stats()["restarts"] == 0


def test_absent_daemon(tmp_path: Path) -> None:
    with pytest.raises(DaemonError, match="pflash_daemon --socket"):
        PFlashClient(tmp_path / "absent.sock").stats()

    async def absent() -> None:
        with pytest.raises(DaemonError):
            await AsyncPFlashClient(tmp_path / "absent.sock").stats()

    asyncio.run(absent())


NO_ADDRESSES = ["", None, 5, "tcp://", "tcp://10.0.0.1:80", "tcp://127.0.0.1:99999", "tcp://127.0.0.1", "x\0y"]


@pytest.mark.parametrize("address", NO_ADDRESSES)
@pytest.mark.parametrize("kind", [PFlashClient, AsyncPFlashClient])
def test_no_addresses(kind: Any, address: Any) -> None:
    with pytest.raises(ConfigError, match=r"needed (a path|tcp://)"):
        kind(address)


def test_a_forked_process_has_a_connection_of_its_own(client: PFlashClient) -> None:
    ids = random_ids(40)
    client.compress(ids, keep_ratio=1.0)
    child = os.fork()
    if child == 0:
        try:
            os._exit(client.compress(ids[:30], keep_ratio=1.0).retained_tokens)
        finally:
            os._exit(1)
    assert client.compress(ids, keep_ratio=1.0).retained_tokens == 40
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 30
    assert client.compress(ids, keep_ratio=1.0).retained_tokens == 40


def test_closing_ends_a_call_of_another_thread(daemon: Daemon) -> None:
    failures: list[Exception] = []
    client = daemon.client()
    client.stats()

    def call() -> None:
        try:
            client.compress(random_ids(8000), keep_ratio=0.1)
        except DaemonError as error:
            failures.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    eventually(lambda: daemon.stats()["running"] == 1)
    client.close()
    thread.join(5)
    assert not thread.is_alive() and len(failures) == 1


def test_event_loops(daemon: Daemon) -> None:
    client = AsyncPFlashClient(daemon.socket)

    async def call() -> int:
        return (await client.compress(random_ids(40), keep_ratio=1.0)).retained_tokens

    assert [asyncio.run(call()) for _ in range(2)] == [40, 40]

    async def with_another_beside() -> None:
        assert await call() == 40
        with pytest.raises(DaemonError, match="another event loop"):
            await asyncio.to_thread(asyncio.run, call())
        assert await call() == 40
        await client.close()

    asyncio.run(with_another_beside())


def test_a_client_that_is_forgotten(daemon: Daemon, caplog: pytest.LogCaptureFixture) -> None:
    async def forget() -> None:
        client = AsyncPFlashClient(daemon.socket)
        await client.stats()
        with pytest.warns(ResourceWarning, match="not closed"):
            del client
        await asyncio.sleep(0.05)

    asyncio.run(forget())
    gc.collect()
    assert not caplog.records
    eventually(lambda: daemon.stats()["connections"] == 1)


def test_a_closed_client(daemon: Daemon) -> None:
    client = daemon.client()
    client.stats()
    client.close()
    client.close()
    with pytest.raises(DaemonError, match="closed"):
        client.stats()


def test_threads_share_a_client(client: PFlashClient) -> None:
    sizes = list(range(40, 52))
    found = {}

    def work(n: int) -> None:
        found[n] = client.compress(random_ids(n), keep_ratio=1.0).retained_tokens

    threads = [threading.Thread(target=work, args=(n,)) for n in sizes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {n: n for n in sizes}


def test_many_requests_on_one_connection(daemon: Daemon) -> None:
    async def run() -> None:
        async with AsyncPFlashClient(daemon.socket) as client:
            sizes = range(30, 42)
            results = await asyncio.gather(*[client.compress(random_ids(n), keep_ratio=1.0) for n in sizes])
            assert [result.retained_tokens for result in results] == list(sizes)
            assert (await client.stats())["state"] == "ready"
            with pytest.raises(QueryError):
                await client.compress(random_ids(20), keep_ratio=0.1, query=(3, 2))

    asyncio.run(run())


def test_cancelling_stops_the_work(daemon: Daemon) -> None:
    async def run() -> float:
        async with AsyncPFlashClient(daemon.socket) as client:
            before = (await client.stats())["cancelled"]
            task = asyncio.create_task(client.compress(random_ids(8000), keep_ratio=0.1))
            await asyncio.sleep(0.1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            began = time.monotonic()
            await client.compress(random_ids(40), keep_ratio=0.5)
            assert (await client.stats())["cancelled"] == before + 1
            return time.monotonic() - began

    assert asyncio.run(run()) < 3  # the whole prompt takes longer


def test_too_many_requests(daemon: Daemon) -> None:
    async def run() -> None:
        async with AsyncPFlashClient(daemon.socket) as client:
            work = [client.compress(random_ids(250), keep_ratio=0.1) for _ in range(20)]
            results = await asyncio.gather(*work, return_exceptions=True)
        refused = [result for result in results if isinstance(result, DaemonError)]
        assert 1 <= len(refused) <= 4 and "waiting already" in str(refused[0])
        assert sum(not isinstance(result, Exception) for result in results) >= 16

    asyncio.run(run())
    eventually(lambda: daemon.stats()["waiting"] == 0)
