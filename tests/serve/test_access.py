"""API keys, CORS, metrics, and bytes that are not HTTP."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from http_tools import eventually
from laguna_gguf.serve.settings import Settings
from serve_tools import CHAT, HELLO, Running, running

KEYS = ("first-key", "second-kéy")
BODY = {"messages": HELLO, "max_tokens": 2}


@pytest.fixture(scope="module")
def locked(tiny_target: Path, tiny_drafter: Path) -> Iterator[Running]:
    """A server with keys, for the pages of one origin."""
    settings = Settings("tiny", api_keys=KEYS, cors_origins=("http://localhost:3000",))
    with running(tiny_target, tiny_drafter, settings) as here:
        yield here


def test_keys(locked: Running, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        for headers in (
            {"Authorization": "Bearer first-key"},
            {"authorization": "bearer  first-key"},
            {"X-Api-Key": "first-key"},
            {"X-Api-Key": "second-kéy".encode().decode("latin-1")},
            {"Authorization": "Bearer wrong", "X-Api-Key": "first-key"},
        ):
            assert locked.request("POST", CHAT, BODY, headers).status == 200, headers
        wrong = ["", "Bearer", "Bearer ", "Bearer first", "Bearer first-key2", "first-key", "Basic first-key"]
        for value in wrong:
            answer = locked.request("POST", CHAT, BODY, {"Authorization": value})
            answer.refused(401, "API Key")
        for path in ("/v1/models", "/metrics", "/nothing"):
            locked.get(path).refused(401)
        for path in ("/health", "/v1/health"):
            assert locked.get(path).status == 200
    assert "first-key" not in caplog.text


def test_cors(locked: Running, server: Running) -> None:
    ask = {"Origin": "http://localhost:3000", "Access-Control-Request-Method": "POST"}
    preflight = locked.request("OPTIONS", CHAT, headers=ask | {"Access-Control-Request-Headers": "authorization"})
    assert preflight.status == 200
    assert preflight.headers["access-control-allow-origin"] == "http://localhost:3000"
    answer = locked.get("/health", Origin="http://localhost:3000")
    assert answer.headers["access-control-allow-origin"] == "http://localhost:3000"
    for answer in (
        locked.get("/health", Origin="http://example.com"),
        server.get("/health", Origin="http://localhost:3000"),
        server.request("OPTIONS", CHAT, headers=ask),
    ):
        assert "access-control-allow-origin" not in answer.headers


def test_metrics(server: Running) -> None:
    def values() -> dict[str, float]:
        families = text_string_to_metric_families(server.get("/metrics").data.decode())
        return {
            sample.name + "".join(f" {value}" for value in sample.labels.values()): sample.value
            for family in families
            for sample in family.samples
        }

    before = values()
    answer = server.text(prompt="something to count", max_tokens=30).json
    server.text(temperature=-1)
    server.get("/no/such/path")
    eventually(lambda: server.idle() and values()["laguna_prompt_tokens_total"] > before["laguna_prompt_tokens_total"])
    after = values()

    def grown(name: str) -> float:
        return after[name] - before.get(name, 0)

    timings = answer["timings"]
    assert grown("laguna_prompt_tokens_total") == timings["prompt_n"]
    assert grown("laguna_prompt_tokens_cached_total") == timings["cache_n"]
    assert grown("laguna_tokens_predicted_total") == timings["predicted_n"]
    assert grown("laguna_prompt_seconds_total") == pytest.approx(timings["prompt_ms"] / 1e3)
    assert grown("laguna_tokens_predicted_seconds_total") == pytest.approx(timings["predicted_ms"] / 1e3)
    assert grown("laguna_spec_decode_num_draft_tokens_total") == timings["draft_n"] > 0
    assert grown("laguna_spec_decode_num_accepted_tokens_total") == timings["draft_n_accepted"]
    assert 0 < grown("laguna_spec_decode_num_drafts_total") <= timings["draft_n"]
    by_position = [after[name] for name in after if name.startswith("laguna_spec_decode_num_accepted_tokens_per_pos")]
    assert sum(by_position) == after["laguna_spec_decode_num_accepted_tokens_total"]
    assert by_position == sorted(by_position, reverse=True)
    assert after["laguna_draft_max_now"] == 3
    assert after["laguna_requests_processing"] == after["laguna_requests_deferred"] == 0
    assert grown("laguna_requests_total /v1/completions 200") == grown("laguna_requests_total /v1/completions 400") == 1
    assert grown("laguna_requests_total other 404") == 1


@pytest.mark.parametrize(
    "data",
    [
        b"\r\n\r\n\r\n\0\0\0",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\xaa" * 500,
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /\xff\xfe HTTP/1.1\r\nHost: x\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nabcdef",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999999999\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"A: b\r\n" * 20000 + b"\r\n",
        b"GET /" + b"a" * 100000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\nabc",
    ],
)
def test_garbage(server: Running, data: bytes) -> None:
    """An error or the end of the connection; `alive` then asks whether the server is still there."""
    with server.tcp() as connection:
        connection.settimeout(5)
        received = b""
        try:
            connection.sendall(data)
            connection.shutdown(1)
            received = b"".join(iter(lambda: connection.recv(4096), b""))
        except OSError:
            pass
    assert not received or received.startswith(b"HTTP/1.1 ")
    assert b"500" not in received[:20]


def test_synthetic_acceptance_is_labelled(tiny_target: Path, tiny_drafter: Path, server: Running) -> None:
    with running(tiny_target, tiny_drafter, spec_synth_len=2.0) as here:
        assert here.text().json["timings"]["synthetic"] is True
    assert "synthetic" not in server.text().json["timings"]
