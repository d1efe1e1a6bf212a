"""Clients that leave, wait, stall or come in crowds: generation stops, the queue is bounded, nothing is left behind."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from http_tools import eventually, raw_post
from laguna_gguf.serve.settings import Limits, Settings
from serve_tools import CHAT, HELLO, TEXT, Running, running

LONG = {"prompt": "hello there", "max_tokens": 480, "temperature": 0}


class Brake:
    """Slows the session's rounds down, and counts them."""

    def __init__(self, here: Running, monkeypatch: pytest.MonkeyPatch, seconds: float = 0.02) -> None:
        self.rounds = 0
        verify = here.session.verify

        def slowly(*args: Any) -> None:
            self.rounds += 1
            time.sleep(seconds)
            verify(*args)

        monkeypatch.setattr(here.session, "verify", slowly)

    def stopped(self, more: int = 2) -> None:
        """No more than so many rounds begin from now on."""
        before = self.rounds
        time.sleep(0.3)
        assert self.rounds <= before + more


@pytest.fixture
def brake(server: Running, monkeypatch: pytest.MonkeyPatch) -> Brake:
    return Brake(server, monkeypatch)


@pytest.fixture
def waiting(server: Running, brake: Brake) -> Iterator[socket.socket]:
    """A long generation that keeps the model busy until its client is closed."""
    with server.tcp(raw_post(TEXT, LONG)) as connection:
        eventually(lambda: brake.rounds > 0)
        yield connection


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("how", ["close", "reset", "half"])
def test_client_leaves_while_the_model_works(server: Running, brake: Brake, stream: bool, how: str) -> None:
    connection = server.tcp(raw_post(TEXT, LONG | {"stream": stream}))
    eventually(lambda: brake.rounds > 3)
    if stream:
        assert connection.recv(100).startswith(b"HTTP/1.1 200")
    if how == "reset":
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    if how == "half":
        connection.shutdown(socket.SHUT_WR)
    else:
        connection.close()
    eventually(server.idle, 2)
    brake.stopped(0)
    connection.close()


def test_client_leaves_during_a_long_prompt(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    decode, decodes = server.session._target.decode, []

    def slowly(tokens: Any, **kwargs: Any) -> None:
        decodes.append(len(tokens))
        time.sleep(0.2)
        decode(tokens, **kwargs)

    monkeypatch.setattr(server.session._target, "decode", slowly)
    monkeypatch.setattr(server.session._target, "n_batch", 32)
    prompt = list(range(30, 310)) + list(range(40, 190))
    with server.tcp(raw_post(TEXT, LONG | {"prompt": prompt})):
        eventually(lambda: len(decodes) > 1)
    eventually(server.idle, 2)
    assert len(decodes) < 6 < len(prompt) // 32


def test_client_leaves_the_queue(server: Running, brake: Brake, waiting: socket.socket) -> None:
    others = [server.tcp(raw_post(CHAT, {"messages": HELLO, "stream": i % 2 == 0, "max_tokens": 4})) for i in range(5)]
    eventually(lambda: server.metric("laguna_requests_deferred") == 5)
    for connection in others[1:4]:
        connection.close()
    eventually(lambda: server.metric("laguna_requests_deferred") == 2)
    waiting.close()
    assert others[0].recv(100).startswith(b"HTTP/1.1 200")
    assert others[4].recv(100).startswith(b"HTTP/1.1 200")
    for connection in (others[0], others[4]):
        connection.close()


def test_leaving_is_counted(server: Running, brake: Brake) -> None:
    gone = f'laguna_requests_total{{path="{TEXT}",status="499"}}'
    before = server.metric(gone)
    for stream in (False, True):
        with server.tcp(raw_post(TEXT, LONG | {"stream": stream})):
            rounds = brake.rounds
            eventually(lambda rounds=rounds: brake.rounds > rounds + 1)
    eventually(lambda: server.metric(gone) == before + 2)


def test_pipelined_requests(server: Running, brake: Brake) -> None:
    """What comes before the answer is out waits, and the client is still noticed when it leaves."""
    short = {"prompt": "x", "max_tokens": 2}
    last = raw_post(TEXT, short, headers="Connection: close\r\n")
    with server.tcp(raw_post(TEXT, short) * 2 + last) as connection:
        connection.settimeout(10)
        data = b"".join(iter(lambda: connection.recv(4096), b""))
    assert data.count(b"HTTP/1.1 200") == 3
    for at_once in (True, False):
        rounds = brake.rounds
        connection = server.tcp(raw_post(TEXT, LONG) * (2 if at_once else 1))
        eventually(lambda rounds=rounds: brake.rounds > rounds + 5)
        if not at_once:
            connection.sendall(raw_post(TEXT, LONG))
            time.sleep(0.1)
        connection.close()
        eventually(server.idle, 2)


def test_answers_keep_their_order_and_connection(server: Running) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    for n in range(5):
        connection.request("POST", TEXT, json.dumps({"prompt": "x", "max_tokens": 1 + n, "stream": n % 2 == 0}))
        response = connection.getresponse()
        assert response.status == 200 and response.read()
    connection.close()


def test_crowd(server: Running) -> None:
    """50 clients at once, a queue of 32: everybody gets an answer or a 503 that says when to come back."""

    def ask(n: int) -> Any:
        return server.text(max_tokens=4, stream=n % 2 == 0, seed=n)

    with ThreadPoolExecutor(50) as pool:
        answers = list(pool.map(ask, range(50)))
    served = [answer for answer in answers if answer.status == 200]
    refused = [answer for answer in answers if answer.status != 200]
    assert len(served) >= 33
    for answer in refused:
        answer.refused(503, "waiting")
        assert int(answer.headers["retry-after"]) > 0
    streamed = [answer for answer in served if answer.headers["content-type"].startswith("text/event-stream")]
    texts = {"".join(chunk["choices"][0]["text"] for chunk in answer.events) for answer in streamed}
    assert len(texts) == 1 and texts == {a.json["choices"][0]["text"] for a in served if a not in streamed}


# Servers with settings of their own.


def test_queue_limit(tiny_target: Path, tiny_drafter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(tiny_target, tiny_drafter, Settings("tiny", limits=Limits(queue=1))) as here:
        brake = Brake(here, monkeypatch)
        with here.tcp(raw_post(TEXT, LONG)), here.tcp(raw_post(TEXT, LONG)):
            eventually(lambda: brake.rounds > 0 and here.metric("laguna_requests_deferred") == 1)
            refused = here.text()
            refused.refused(503)
            assert refused.headers["retry-after"]
            assert here.get("/health").status == 200
        eventually(here.idle)
        assert here.text(max_tokens=2).status == 200


def test_stalled_clients(tiny_target: Path, tiny_drafter: Path) -> None:
    """Headers, bodies and answers that do not get on are given up; others are served meanwhile."""
    limits = Limits(header_seconds=0.5, body_seconds=0.5, send_seconds=0.5)
    with running(tiny_target, tiny_drafter, Settings("tiny", limits=limits)) as here:
        silent, slow_header = here.tcp(), here.tcp(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n")
        slow_body = here.tcp(raw_post(TEXT, b'{"prompt"', length=100))
        second = here.tcp(raw_post(TEXT, {"prompt": "x", "max_tokens": 1}))
        assert b"200 OK" in second.recv(4096)
        second.sendall(b"GET /health HT")
        assert here.text(max_tokens=2).status == 200
        for connection in (silent, slow_header, second):
            while connection.recv(4096):
                pass
            connection.close()
        assert slow_body.recv(4096).startswith(b"HTTP/1.1 408")
        slow_body.close()


def test_client_that_does_not_read(tiny_target: Path, tiny_drafter: Path) -> None:
    limits = Limits(send_seconds=0.5)
    with running(tiny_target, tiny_drafter, Settings("tiny", limits=limits), send_buffer=2048) as here:
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        connection.connect(("127.0.0.1", here.port))
        ends = {str(token): -1e4 for token in range(25)}
        body = {"prompt": "x", "max_tokens": 500, "stream": True, "timings_per_token": True, "logit_bias": ends}
        connection.sendall(raw_post(TEXT, body))
        gone = f'laguna_requests_total{{path="{TEXT}",status="499"}}'
        eventually(lambda: here.metric(gone) == 1)
        eventually(lambda: len(here.server.server_state.connections) <= 1)
        connection.close()
        assert here.text(max_tokens=2).status == 200


def test_loading(tiny_target: Path, tiny_drafter: Path) -> None:
    gate = threading.Event()
    with running(tiny_target, tiny_drafter, Settings("tiny", api_keys=("k",)), gate=gate) as here:
        for path in ("/health", "/v1/health"):
            answer = here.get(path)
            assert answer.status == 503 and answer.headers["retry-after"]
            assert answer.json == {"error": {"code": 503, "message": "Loading model", "type": "unavailable_error"}}
        key = {"Authorization": "Bearer k"}
        here.request("POST", CHAT, {"messages": HELLO}, key).refused(503, "Loading")
        assert here.request("GET", "/v1/models", headers=key).status == 200
        assert here.request("GET", "/metrics", headers=key).status == 200
        gate.set()
        eventually(lambda: here.get("/health").status == 200)
        assert here.get("/v1/health").json == {"status": "ok"}
        assert here.request("POST", CHAT, {"messages": HELLO, "max_tokens": 2}, key).status == 200


@pytest.mark.parametrize("stream", [False, True])
def test_ending_tells_those_who_wait(
    tiny_target: Path, tiny_drafter: Path, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    with running(tiny_target, tiny_drafter) as here:
        brake = Brake(here, monkeypatch)
        with ThreadPoolExecutor(2) as pool:
            answers = [pool.submit(here.request, "POST", TEXT, LONG | {"stream": stream}) for _ in range(2)]
            eventually(lambda: brake.rounds > 2 and here.metric("laguna_requests_deferred") == 1)
            here.server.should_exit = True
            for answer in (future.result() for future in answers):
                if answer.status == 503:
                    answer.refused(503, "ending")
                else:
                    assert stream and '"unavailable_error"' in answer.data.decode()
    assert here.session._closed
