"""What an operator sees: JSON logs, traces, a full disk, the status page."""

import json
import os
from pathlib import Path

import pytest

from daemon_tools import running_daemon
from fake_upstream import fake_upstream
from laguna_gguf.daemon.proxy.compression import Shortened
from laguna_gguf.daemon.proxy.history import TRACES, History

CHAT = "/v1/chat/completions"
LONG_CHAT = {
    "messages": [
        {"role": "user", "content": "THE RIVER RUNS BY THE OLD MILL. " * 30},
        {"role": "user", "content": "WHERE IS THE <MILL>?"},
    ]
}


def test_traces_pages_and_json_logs(tmp_path: Path, qwen35: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    arguments = ["--prefill-drafter", str(qwen35), "--prefill-threshold", "300", "--prefill-keep-ratio", "0.3"]
    arguments += ["--trace", str(trace), "--log-format", "json", "-v"]
    with fake_upstream() as upstream, running_daemon(tmp_path, *arguments, upstream=upstream.url) as daemon:
        for n in range(2):
            assert daemon.request("POST", CHAT, LONG_CHAT | {"session_id": str(n)}).status == 200
        [record] = [json.loads(line) for line in trace.read_text().splitlines()]  # the second one is a repeated prompt
        page = daemon.request("GET", "/pflash").data.decode()
        assert page.count('href="/pflash/') == 2 and "repeat" in page and "http" not in page
        assert "<dt>time saved</dt><dd>–</dd>" in page  # this server tells no timings
        detail = daemon.request("GET", "/pflash/1")
        assert "script-src" in detail.headers["content-security-policy"]
        assert "&lt;MILL" in detail.data.decode() and "<MILL" not in detail.data.decode()
        with daemon.client() as client:
            prompt = "The river runs by the mill. " * 20
            traced = client.compress(prompt, keep_ratio=0.5, trace=True)
            assert traced.trace["text"] == prompt
        assert len(trace.read_text().splitlines()) == 2 and record["view"]["mode"] == "fresh"
        daemon.request("POST", CHAT, LONG_CHAT | {"pflash_query": "castle"}).refused(400)
    lines = [json.loads(line) for line in daemon.log.read_text().splitlines()]
    assert {"time", "level", "logger", "message"} <= set(lines[0])
    assert any("not compressed" in line["message"] for line in lines)
    assert any(line["logger"] == "laguna_gguf.llama_cpp" for line in lines)  # its own log has the format, too


def test_time_saved() -> None:
    """1,000 tokens of which 600 were new, 100 sent; 50 of these read in 200 ms: 4 ms a token."""
    history = History()
    timings = {"compress_ms": 300.0, "drafter_input_tokens": 2000, "scorer_new_tokens": 1200}
    for _ in range(TRACES + 1):
        number = history.add("/completion", Shortened(b"", timings, 1000, 100))
    oldest, *_, newest = reversed(list(history))
    assert history.ms_per_token is None and history.saved_ms(newest) is None
    history.answered(number, {"prompt_n": 50, "prompt_ms": 200.0})
    history.answered(1, {"prompt_n": 0, "prompt_ms": 0.0})  # all of it was cached: says nothing of the speed
    history.answered(2, {"prompt_n": "50"})
    history.answered(2, {})
    oldest, *_, newest = reversed(list(history))
    assert history.ms_per_token == 4.0
    assert history.saved_ms(newest) == pytest.approx((600 - 50) * 4 - 300)
    assert history.saved_ms(oldest) is None


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_costs_the_trace(tmp_path: Path, qwen35: Path) -> None:
    environment = {"PFLASH_TRACE_PATH": "/dev/full"}
    with (
        running_daemon(tmp_path, "--prefill-drafter", str(qwen35), env=environment) as daemon,
        daemon.client() as client,
    ):
        for _ in range(2):
            assert client.compress("The river runs by the mill. " * 20, keep_ratio=0.5).retained_tokens > 0
    assert daemon.log.read_text().count("further traces may be lost") == 1
