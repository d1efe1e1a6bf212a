"""What the generating routes answer: the model's own text, usage, timings, chunks in their order."""

from typing import Any

import llama_cpp
import pytest

from laguna_gguf import SpecSession
from serve_tools import CHAT, HELLO, TEXT, Running
from session_tools import spec_session

TIMINGS = {
    "cache_n",
    "prompt_n",
    "prompt_ms",
    "prompt_per_token_ms",
    "prompt_per_second",
    "predicted_n",
    "predicted_ms",
    "predicted_per_token_ms",
    "predicted_per_second",
}
DRAFTED = TIMINGS | {"draft_n", "draft_n_accepted"}

SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.9, "seed": 7, "top_k": 50, "top_p": 0.9, "min_p": 0.02},
    {"temperature": 0.8, "seed": 3, "mirostat_mode": 2, "mirostat_tau": 4.0, "mirostat_eta": 0.2},
    {"repeat_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.2},
    {"logit_bias": {"100": 90.0}, "max_tokens": 3},
    {"stop": ["e"]},
    {"typical_p": 0.8, "temperature": 1.1, "seed": 4},
]


@pytest.fixture(scope="module")
def direct(tiny_target: Any, tiny_drafter: Any) -> SpecSession:
    """A session of our own, to say what the server's must say."""
    return spec_session(tiny_target, tiny_drafter, draft_max=3, logits_all=True)


def keywords(settings: dict[str, Any]) -> dict[str, Any]:
    """The same settings for create_completion, with the server's defaults."""
    defaults = {"temperature": 0.0, "max_tokens": 24, "seed": 0}
    settings = defaults | settings
    if "logit_bias" in settings:
        settings["logit_bias"] = {int(k): v for k, v in settings["logit_bias"].items()}
    return settings


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("stream", [False, True])
def test_completion_is_the_sessions(
    server: Running, direct: SpecSession, settings: dict[str, Any], stream: bool
) -> None:
    prompt = "some text to begin with"
    expected = direct.create_completion(prompt, **keywords(settings))
    answer = server.text(**({"max_tokens": 24, "seed": 0} | settings), prompt=prompt, stream=stream)
    assert answer.status == 200
    if stream:
        text = "".join(chunk["choices"][0]["text"] for chunk in answer.events)
        reason = answer.events[-1]["choices"][0]["finish_reason"]
    else:
        text, reason = (answer.json["choices"][0][key] for key in ("text", "finish_reason"))
    assert (text, reason) == (expected["choices"][0]["text"], expected["choices"][0]["finish_reason"])
    if not stream:
        usage = answer.json["usage"]
        cached = usage.pop("prompt_tokens_details")["cached_tokens"]
        assert usage == expected["usage"] and 0 <= cached <= usage["prompt_tokens"]


def test_chat_is_the_sessions(server: Running, direct: SpecSession) -> None:
    messages = [{"role": "system", "content": "be brief"}, *HELLO]
    expected = direct.create_chat_completion(messages, temperature=0.0, max_tokens=20)
    answer = server.chat(messages=messages, max_completion_tokens=20, max_tokens=None).json
    assert answer["choices"] == expected["choices"]
    assert set(answer) == {"id", "object", "created", "model", "choices", "usage", "timings"}
    assert (answer["object"], answer["model"]) == ("chat.completion", "tiny") and answer["id"].startswith("chatcmpl-")
    parts = [{"type": "text", "text": "hello there"}]
    same = server.chat(
        messages=[{"role": "developer", "content": "be brief"}, {"role": "user", "content": parts}], max_tokens=20
    )
    assert same.json["choices"] == expected["choices"]


def test_chat_stream(server: Running) -> None:
    whole = server.chat(max_tokens=12).json
    answer = server.chat(max_tokens=12, stream=True, stream_options={"include_usage": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    first, *middle, finish, usage = answer.events
    assert first["choices"][0]["delta"] == {"role": "assistant"} and first["choices"][0]["finish_reason"] is None
    assert all(set(chunk["choices"][0]["delta"]) == {"content"} for chunk in middle)
    text = "".join(chunk["choices"][0]["delta"]["content"] for chunk in middle)
    assert text == whole["choices"][0]["message"]["content"]
    assert finish["choices"][0] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "length"}
    assert usage["choices"] == [] and set(usage["timings"]) in (TIMINGS, DRAFTED)
    for count in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert usage["usage"][count] == whole["usage"][count]
    for chunk in (first, *middle, finish):
        assert "usage" not in chunk and "timings" not in chunk
        assert chunk["object"] == "chat.completion.chunk" and chunk["id"] == first["id"]


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_stream_without_usage(server: Running, path: str) -> None:
    call = server.chat if path == CHAT else server.text
    *chunks, last = call(stream=True).events
    assert last["choices"][0]["finish_reason"] == "length" and "timings" in last
    assert not any("usage" in chunk for chunk in (*chunks, last))
    assert not any("timings" in chunk for chunk in chunks)
    *chunks, last = call(stream=True, timings_per_token=True).events
    counts = [chunk["timings"]["predicted_n"] for chunk in chunks]
    assert counts == sorted(counts) and last["timings"]["predicted_n"] == 8


def test_timings(server: Running) -> None:
    server.text(prompt="x y z " * 5)
    answer = server.text(prompt="something else altogether", max_tokens=20).json
    timings = answer["timings"]
    assert set(timings) == DRAFTED
    n_prompt = answer["usage"]["prompt_tokens"]
    assert timings["cache_n"] + timings["prompt_n"] == n_prompt and timings["prompt_n"] > 0
    assert timings["predicted_n"] == 20 and 0 <= timings["draft_n_accepted"] <= timings["draft_n"]
    for part in ("prompt", "predicted"):
        n, ms = timings[f"{part}_n"], timings[f"{part}_ms"]
        assert ms > 0
        assert timings[f"{part}_per_token_ms"] == pytest.approx(ms / n)
        assert timings[f"{part}_per_second"] == pytest.approx(1e3 * n / ms)
    assert "draft_n" not in server.text(max_tokens=1).json["timings"]


def test_cached_tokens(server: Running) -> None:
    prompt = "a prompt that is asked twice, with other ends: "
    first = server.text(prompt=prompt + "one").json
    second = server.text(prompt=prompt + "two").json
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert 10 < cached < second["usage"]["prompt_tokens"] and cached == second["timings"]["cache_n"]
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] < cached


def test_logprobs(server: Running, direct: SpecSession) -> None:
    expected = direct.create_completion("hello there", temperature=0.0, max_tokens=6, logprobs=3)
    logprobs = server.text(max_tokens=6, logprobs=3).json["choices"][0]["logprobs"]
    assert logprobs["tokens"] == expected["choices"][0]["logprobs"]["tokens"]
    assert logprobs["token_logprobs"] == pytest.approx(expected["choices"][0]["logprobs"]["token_logprobs"], abs=1e-3)
    for stream in (False, True):
        answer = server.chat(max_tokens=4, logprobs=True, top_logprobs=2, stream=stream)
        choices = [chunk["choices"][0] for chunk in answer.events] if stream else [answer.json["choices"][0]]
        content = [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]]
        assert len(content) == 4
        for entry in content:
            assert entry["top_logprobs"][0]["logprob"] == pytest.approx(entry["logprob"], abs=1e-4)
            assert len({top["token"] for top in entry["top_logprobs"]}) == len(entry["top_logprobs"]) <= 2
    assert server.chat(logprobs=True).json["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


@pytest.mark.parametrize("stream", [False, True])
def test_echo(server: Running, stream: bool) -> None:
    plain = server.text().json["choices"][0]["text"]
    tokens = server.session.tokenize(b"hello there", special=True)
    for prompt in ("hello there", tokens):
        answer = server.text(prompt=prompt, echo=True, stream=stream)
        choices = [c["choices"][0] for c in answer.events] if stream else [answer.json["choices"][0]]
        text = "".join(choice["text"] for choice in choices)
        assert text.endswith("hello there" + plain) and text.count("hello there") == 1
    whole = server.text(echo=True, logprobs=1).json["choices"][0]
    assert whole["text"] == "hello there" + plain and whole["logprobs"]["token_logprobs"][0] is None


def test_prompts_as_tokens(server: Running) -> None:
    tokens = server.session.tokenize(b"hello there", special=True)
    assert server.text(prompt=tokens).json["choices"] == server.text().json["choices"]
    assert server.text(prompt=[tokens]).json["choices"] == server.text(prompt=["hello there"]).json["choices"]
    server.text(prompt=[5, 10**6]).refused(400, "token ids")


def test_seeds(server: Running) -> None:
    def drawn(**more: Any) -> str:
        return server.text(temperature=1.5, max_tokens=16, **more).json["choices"][0]["text"]

    assert drawn(seed=5) == drawn(seed=5) != drawn(seed=6)
    assert drawn(seed=-1) != drawn(seed=-1) and drawn() != drawn()
    assert drawn(seed=2**63) == drawn(seed=2**63)


def test_context_is_filled(server: Running) -> None:
    answer = server.text(max_tokens=-1).json
    assert answer["choices"][0]["finish_reason"] in ("length", "stop")
    error = server.text(prompt="word " * 600).refused(400, "-c", kind="exceed_context_size_error")
    assert error["n_ctx"] == 512 <= error["n_prompt_tokens"]
    error = server.chat(messages=[{"role": "user", "content": "word " * 600}], stream=True)
    assert error.refused(400, kind="exceed_context_size_error")["n_ctx"] == 512


def test_suffix(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    server.text(suffix="return x").refused(400, "suffix")
    for token, name in enumerate(("pre", "suf", "mid"), start=20):
        monkeypatch.setattr(llama_cpp, f"llama_vocab_fim_{name}", lambda vocabulary, token=token: token)
    before, after = (server.session.tokenize(text, add_bos=False) for text in (b"def f(", b"return x"))
    whole = [server.session.token_bos(), 20, *before, 21, *after, 22]
    assert server.text(prompt="def f(", suffix="return x").json["choices"] == server.text(prompt=whole).json["choices"]


@pytest.mark.parametrize("stream", [False, True])
def test_bytes_that_are_no_text(server: Running, stream: bool) -> None:
    """A model that writes the first byte of a character again and again: within max_tokens and the context, quickly."""
    pieces = {server.session.detokenize([token]): token for token in range(320)}
    for piece, max_tokens in ((b"\xff", 10), (b"\xe2", 10), (b"\xff", -1)):
        bias = {str(pieces[piece]): 1000, "2": -1000, "24": -1000}
        answer = server.text(max_tokens=max_tokens, logit_bias=bias, stream=stream)
        last = answer.events[-1] if stream else answer.json
        assert last["choices"][0]["finish_reason"] == "length"
        most = 13 if max_tokens > 0 else 512
        assert max_tokens <= last["timings"]["predicted_n"] <= most
    text = server.text(max_tokens=40, stream=True, temperature=2, seed=1, top_p=1, min_p=0, top_k=0).events
    whole = server.text(max_tokens=40, temperature=2, seed=1, top_p=1, min_p=0, top_k=0).json
    assert "".join(chunk["choices"][0]["text"] for chunk in text) == whole["choices"][0]["text"]
