"""The proxy in front of a real llama-server with a tiny random chat model."""

import os
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

import bench_daemon
from daemon_tools import Daemon, running_daemon
from http_tools import eventually
from laguna_gguf import PFlash, SelectionSettings
from random_drafter import TINY_QWEN3, write_drafter

pytest.importorskip("xllamacpp")

KEY = "secret-key"
LONG = " ".join(f"The river number {n} runs by the old mill." for n in range(20))
QUESTION = "Where is the needle?"
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": f"{LONG} The needle is 4711. {LONG} {QUESTION}"},
]
RATIO = 0.2


@pytest.fixture(scope="module")
def llama_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Its address."""
    path = write_drafter(tmp_path_factory.mktemp("chat") / "chat.gguf", TINY_QWEN3)
    with bench_daemon.llama_server(path, n_ctx=8192, key=KEY) as address:
        yield address


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory, qwen35: Path, llama_server: str) -> Iterator[Daemon]:
    arguments = ["--prefill-drafter", str(qwen35), "--prefill-threshold", "300", "--prefill-keep-ratio", str(RATIO)]
    with running_daemon(tmp_path_factory.mktemp("proxy"), *arguments, upstream=llama_server) as running:
        yield running
        assert KEY not in running.log.read_text()


@pytest.fixture
def client(daemon: Daemon) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=daemon.url + "/v1", api_key=KEY, max_retries=0) as connected:
        yield connected


def ask(client: openai.OpenAI, messages: Any = CHAT, **kwargs: Any) -> Any:
    return client.chat.completions.create(
        model="m", messages=messages, **({"max_tokens": 4, "temperature": 0} | kwargs)
    )


def pflash(usage: Any) -> dict[str, Any]:
    return usage.model_dump()["timings"]["pflash"]


def direct(daemon: Daemon, path: str, body: Any) -> Any:
    answer = daemon.request("POST", path, body, {"Authorization": f"Bearer {KEY}"})
    assert answer.status == 200
    return answer.json


def test_short_chats_pass(client: openai.OpenAI) -> None:
    answer = ask(client, [{"role": "user", "content": "hello"}])
    assert answer.usage.completion_tokens == 4 and "timings" not in answer.usage.model_dump()


def test_keys_are_the_upstream_servers(daemon: Daemon) -> None:
    daemon.request("POST", "/v1/chat/completions", {"messages": CHAT}).refused(401)
    with openai.OpenAI(base_url=daemon.url + "/v1", api_key="other", max_retries=0) as stranger:
        with pytest.raises(openai.AuthenticationError):
            ask(stranger)
    assert daemon.request("GET", "/health").status == 200


def test_long_chats_are_compressed(client: openai.OpenAI, daemon: Daemon, qwen35: Path) -> None:
    answer = ask(client, extra_body={"cache_prompt": False})
    timings = pflash(answer.usage)
    assert answer.usage.prompt_tokens == timings["compressed_tokens"] < 0.5 * timings["prompt_tokens"]
    prompt = direct(daemon, "/apply-template", {"messages": CHAT})["prompt"]

    def count(text: str) -> int:
        body = {"content": text, "add_special": True, "parse_special": True}
        return len(direct(daemon, "/tokenize", body)["tokens"])

    settings = SelectionSettings()
    with PFlash(qwen35, settings=settings, target=count, n_threads=1, n_threads_batch=1) as library:
        expected = library.compress_chat(prompt, keep_ratio=RATIO)
    assert timings["prompt_tokens"] == count(prompt) and timings["kept_tokens"] == expected.retained_tokens
    assert answer.usage.prompt_tokens <= expected.ceiling
    with daemon.client() as ipc:
        remote = ipc.compress_chat(prompt, keep_ratio=RATIO)
    assert remote.spans == expected.spans and remote.text == expected.text
    assert remote.byte_spans == expected.byte_spans


def test_the_time_that_was_saved(client: openai.OpenAI, daemon: Daemon) -> None:
    for stream in (False, True):
        answer = ask(client, [*CHAT, {"role": "user", "content": f"Once more, {stream}?"}], stream=stream)
        for _ in answer:
            pass
        [number] = re.findall(r'href="/pflash/(\d+)"', daemon.request("GET", "/pflash").data.decode())[:1]
        found = daemon.request("GET", f"/pflash/{number}").json
        assert 0 < found["read_tokens"] <= found["served_tokens"] and isinstance(found["saved_ms"], float)
    assert re.search(r"<dt>time saved</dt><dd>-?[0-9.,]+ s</dd>", daemon.request("GET", "/pflash").data.decode())


def test_streams(client: openai.OpenAI) -> None:
    chunks = list(ask(client, stream=True, stream_options={"include_usage": True}))
    assert [bool(chunk.choices) for chunk in chunks].count(False) == 1 and not chunks[-1].choices
    assert pflash(chunks[-1].usage)["kept_tokens"] > 0
    whole = ask(client).choices[0].message.content
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == whole
    plain = list(ask(client, stream=True))
    assert all(chunk.usage is None for chunk in plain) and "pflash" not in str(plain)


def test_three_turns_reuse_the_upstream_servers_cache(client: openai.OpenAI) -> None:
    messages: list[dict[str, str]] = [{"role": "system", "content": "Other."}, CHAT[1]]
    cached, served, modes = [], [], []
    for question in ("And number 7?", "And number 9?", "Who runs?"):
        answer = ask(client, messages, extra_body={"session_id": "three"})
        cached.append(answer.usage.prompt_tokens_details.cached_tokens)
        served.append(answer.usage.prompt_tokens)
        modes.append(pflash(answer.usage)["view"]["mode"])
        reply = {"role": "assistant", "content": answer.choices[0].message.content}
        messages += [reply, {"role": "user", "content": question}]
    assert modes == ["fresh", "continue", "continue"]
    assert cached[0] < cached[1] < cached[2] and cached[1] >= served[0] - 10 and cached[2] >= served[1] - 10


def test_tools_stay_the_upstream_servers(client: openai.OpenAI) -> None:
    tool = {"type": "function", "function": {"name": "find", "parameters": {"type": "object", "properties": {}}}}
    call = {"id": "1", "type": "function", "function": {"name": "find", "arguments": "{}"}}
    messages = [
        CHAT[0],
        {"role": "user", "content": "Look it up."},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": f"{LONG} {LONG}"},
    ]
    answer = ask(client, messages, tools=[tool])
    timings = pflash(answer.usage)
    assert timings["compressed_tokens"] < timings["prompt_tokens"] and answer.choices[0].finish_reason == "length"


def test_texts(client: openai.OpenAI, daemon: Daemon) -> None:
    answer = client.completions.create(model="m", prompt=f"{LONG} {LONG}", max_tokens=2)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == pflash(answer.usage)["compressed_tokens"]
    native = direct(daemon, "/completion", {"prompt": f"{LONG} {LONG}", "n_predict": 2})
    assert native["usage"]["timings"]["pflash"]["kept_tokens"] > 0 and native["timings"]["predicted_n"] == 2


def test_refusals(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="does not occur"):
        ask(client, extra_body={"pflash": {"query": "castle"}})
    with pytest.raises(openai.BadRequestError):
        ask(client, [{"role": "user", "content": LONG}], extra_body={"pflash": {"on": True}}, max_tokens=9000)


def test_a_killed_drafter_costs_one_request(client: openai.OpenAI, daemon: Daemon) -> None:
    pid = daemon.stats()["drafter_pid"]
    failures: list[Exception] = []
    messages = [{"role": "user", "content": f"{LONG} {LONG} {LONG} Killed?"}]

    def work() -> None:
        try:
            ask(client, messages)
        except openai.APIError as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    eventually(lambda: daemon.stats()["running"] == 1)
    os.kill(pid, signal.SIGKILL)
    thread.join(30)
    assert len(failures) == 1 and isinstance(failures[0], openai.InternalServerError)
    assert pflash(ask(client, messages).usage)["kept_tokens"] > 0
