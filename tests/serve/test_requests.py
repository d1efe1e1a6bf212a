"""Bodies that cannot be served: a typed 400 that names the field, and the server goes on."""

import json
from typing import Any

import pytest

from http_tools import raw_post
from serve_tools import CHAT, HELLO, TEXT, Running

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
OTHER = {"type": "function", "function": {"name": "other"}}
WRONG: list[Any] = [True, -7, 1e30, 1.5, "x", "", [], {}, ["x"], [[]], [1, "x"], {"a": 1}, [None], "\0"]

COMMON = [
    *("temperature", "top_p", "top_k", "min_p", "typical_p", "frequency_penalty", "presence_penalty"),
    *("repeat_penalty", "mirostat", "mirostat_mode", "mirostat_tau", "mirostat_eta", "seed", "stop", "logit_bias"),
    *("max_tokens", "max_completion_tokens", "n_predict", "model", "stream", "stream_options", "timings_per_token"),
    *("response_format", "json_schema", "grammar", "n", "best_of", "logprobs", "tfs_z", "ignore_eos", "chat_template"),
]
OF_CHAT = ["messages", "tools", "tool_choice", "functions", "function_call", "top_logprobs", "chat_template_kwargs"]
OF_TEXT = ["prompt", "suffix", "echo", "top_logprobs"]


@pytest.mark.parametrize(
    ("path", "field"), [(CHAT, f) for f in (*COMMON, *OF_CHAT)] + [(TEXT, f) for f in (*COMMON, *OF_TEXT)]
)
def test_every_field_with_every_type(server: Running, path: str, field: str) -> None:
    """Whatever a field holds: an answer, or a 400 that names it. Never a 500, never silence."""
    refused = 0
    for value in WRONG:
        call = server.chat if path == CHAT else server.text
        answer = call(**({"max_tokens": 2} | {field: value}))
        if answer.status != 200:
            error = answer.refused(400)
            named = field in error["message"] or ("function" in field and "tool" in error["message"])
            assert named, (value, error)
            refused += 1
    assert refused >= 3


@pytest.mark.parametrize(
    ("body", "fragments"),
    [
        ({"frobnicate": 1}, ["frobnicate"]),
        ({"n": 2}, ["n:", "1"]),
        ({"best_of": 3}, ["best_of"]),
        ({"chat_template": "{{ 1 }}"}, ["chat_template", "never"]),
        ({"max_tokens": 0}, ["max_tokens"]),
        ({"max_tokens": 5, "max_completion_tokens": 6}, ["max_tokens", "max_completion_tokens"]),
        ({"grammar": 'root ::= "a"', "response_format": {"type": "json_object"}}, ["grammar", "response_format"]),
        ({"grammar": "root ::= nothing"}, ["grammar"]),
        ({"grammar": 'start ::= "a"'}, ["grammar", "root"]),
        ({"grammar": "root ::= root"}, ["grammar"]),
        ({"grammar": "root ::= [a-z]{5,1}"}, ["grammar", "{5,1}"]),
        ({"grammar": "root ::= <[999999]>"}, ["no token", "grammar"]),
        ({"grammar": "root ::= " + "(" * 2000 + '"a"' + ")" * 2000}, ["grammar", "nest"]),
        ({"grammar": 'root ::= "' + "a" * 300000 + '"'}, ["grammar", "larger"]),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, ["json_schema.schema"]),
        ({"response_format": {"type": "xml"}}, ["response_format.type", "xml"]),
        ({"json_schema": {"$ref": "https://example.com/schema.json"}}, ["json_schema", "schema"]),
        ({"json_schema": {"type": "banana"}}, ["json_schema"]),
        ({"logit_bias": {"9999999": 1}}, ["logit_bias", "9999999"]),
        ({"logit_bias": {"x": 1}}, ["logit_bias", "x"]),
        ({"logit_bias": {"5": "high"}}, ["logit_bias[5]"]),
        ({"stop": ["a"] * 100}, ["stop"]),
        ({"stream_options": {"include_usage": True, "other": 1}}, ["stream_options.other"]),
        ({"temperature": -1}, ["temperature", "-1"]),
        ({"top_p": "0.5"}, ["top_p"]),
        ({"seed": 2**80}, ["seed"]),
        ({"xtc_probability": 0.5}, ["xtc_probability"]),
        ({"tfs_z": 0.5}, ["tfs_z"]),
        ({"reasoning_effort": "high"}, ["reasoning_effort"]),
    ],
)
def test_refused_on_both_routes(server: Running, body: dict[str, Any], fragments: list[str]) -> None:
    server.chat(**body).refused(400, *fragments)
    server.text(**body).refused(400, *fragments)
    server.text(**body, stream=True).refused(400, *fragments)


@pytest.mark.parametrize(
    ("body", "fragments"),
    [
        ({"messages": None}, ["messages"]),
        ({"messages": []}, ["messages"]),
        ({"messages": ["hi"]}, ["messages[0]"]),
        ({"messages": [{"content": "x"}]}, ["messages[0].role"]),
        ({"messages": [{"role": "root", "content": "x"}]}, ["messages[0].role", "root"]),
        ({"messages": [{"role": "user"}]}, ["messages[0].content"]),
        ({"messages": [{"role": "user", "content": 5}]}, ["messages[0].content"]),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, ["image_url", "text"]),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, ["messages[0].content[0].text"]),
        ({"messages": [*HELLO, {"role": "assistant", "tool_calls": [{}]}]}, ["messages[1].tool_calls[0].function"]),
        ({"tools": [{"type": "retrieval"}]}, ["tools[0].type"]),
        ({"tools": [{"type": "function", "function": {}}]}, ["tools[0].function.name"]),
        ({"tools": [TOOL] * 300}, ["tools"]),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "absent"}}}, ["absent", "look"]),
        ({"tools": [TOOL, OTHER], "tool_choice": "required"}, ["required"]),
        ({"tools": [TOOL], "tool_choice": "always"}, ["tool_choice", "always"]),
        ({"tool_choice": "required"}, ["tool_choice"]),
        ({"tools": [TOOL], "functions": []}, ["functions"]),
        ({"functions": [{"name": "f"}], "function_call": {"name": "g"}}, ["function_call", "g"]),
        ({"tools": [TOOL], "tool_choice": "required", "grammar": 'root ::= "a"'}, ["grammar"]),
        ({"top_logprobs": 3}, ["top_logprobs", "logprobs"]),
        ({"logprobs": True, "top_logprobs": 21}, ["top_logprobs"]),
        ({"chat_template_kwargs": {"enable_thinking": True}}, ["chat_template_kwargs", "enable_thinking"]),
        ({"chat_template_kwargs": {"messages": []}}, ["chat_template_kwargs", "messages"]),
        ({"prompt": "x"}, ["prompt"]),
    ],
)
def test_refused_chats(server: Running, body: dict[str, Any], fragments: list[str]) -> None:
    server.chat(**body).refused(400, *fragments)


@pytest.mark.parametrize(
    ("body", "fragments"),
    [
        ({"prompt": None}, ["prompt"]),
        ({"prompt": ["a", "b"]}, ["prompt", "2"]),
        ({"prompt": [1, -1]}, ["prompt"]),
        ({"prompt": []}, ["prompt"]),
        ({"prompt": [1, "a"]}, ["prompt"]),
        ({"prompt": 5}, ["prompt"]),
        ({"logprobs": 21}, ["logprobs"]),
        ({"logprobs": True}, ["logprobs"]),
        ({"echo": 1}, ["echo"]),
        ({"suffix": "x", "echo": True}, ["echo", "suffix"]),
        ({"messages": HELLO}, ["messages"]),
        ({"tools": []}, ["tools"]),
    ],
)
def test_refused_completions(server: Running, body: dict[str, Any], fragments: list[str]) -> None:
    server.text(**body).refused(400, *fragments)


def test_what_asks_for_nothing_is_accepted(server: Running) -> None:
    expected = server.text().json["choices"]
    neutral = {
        **{"user": "me", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "safety_identifier": "x"},
        **{"parallel_tool_calls": False, "prediction": {"type": "content", "content": "x"}, "cache_prompt": False},
        **{"n": 1, "best_of": 1, "tfs_z": 1.0, "ignore_eos": False, "grammar": "", "stop": ["", ""], "logprobs": None},
        **{"frequency_penalty": 0, "response_format": {"type": "text"}, "anything": None, "model": "gpt-4o"},
    }
    assert server.text(**neutral).json["choices"] == expected


@pytest.mark.parametrize(
    ("data", "fragments"),
    [
        (b"", ["JSON"]),
        (b"{", ["JSON"]),
        (b"[]", ["array"]),
        (b'"x"', ["string"]),
        (b"null", ["null"]),
        (b"\xff\xfe", ["UTF-8"]),
        (b'{"prompt": "\xc3"}', ["UTF-8"]),
        (b'{"prompt": "\\ud800"}', ["surrogate"]),
        (b'{"\\udc00": 1}', ["surrogate"]),
        (b'{"prompt": "x", "temperature": NaN}', ["NaN"]),
        (b'{"prompt": "x", "temperature": 1e999}', ["large"]),
        (b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}", ["JSON"]),
        (b"[" * 100000, ["JSON", "nests"]),
        (b'{"a":' * 100 + b"1" + b"}" * 100, ["nests"]),
        (b'{"prompt": "x"} trailing', ["JSON"]),
    ],
)
def test_bodies_that_are_not_json_objects(server: Running, data: bytes, fragments: list[str]) -> None:
    for path in (TEXT, CHAT):
        message = server.request("POST", path, data).refused(400)["message"]
        assert any(fragment in message for fragment in fragments), message


def test_text_that_is_odd_but_text(server: Running) -> None:
    for prompt in ("\0", "\ufffd", "\U0001f600 \u202e", "a\r\n\x1b[31m", " " * 100, ""):
        assert server.text(prompt=prompt).status == 200
        assert server.chat(messages=[{"role": "user", "content": prompt}]).status == 200


def test_large_bodies(server: Running) -> None:
    limit = server.server.worker._limits.body_bytes
    head = raw_post(TEXT, b"", length=limit + 1)
    with server.tcp(head) as connection:
        connection.sendall(b"x" * 1000)
        received = b""
        while b"\r\n\r\n" not in received:
            received += connection.recv(4096)
    assert received.startswith(b"HTTP/1.1 413")
    chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    with server.tcp(f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode()) as connection:
        for _ in range(limit // 0x10000 + 2):
            connection.sendall(chunk)
        connection.sendall(b"0\r\n\r\n")
        received = connection.recv(4096)
    assert received.startswith(b"HTTP/1.1 413")


def test_other_paths_and_methods(server: Running) -> None:
    server.get("/nothing").refused(404, "/nothing")
    server.get(CHAT).refused(405)
    server.request("POST", "/health").refused(405)
    server.get("/v1/models/absent").refused(404, "tiny")
    assert server.get("/v1/models/tiny").json["id"] == "tiny"


def test_models(server: Running) -> None:
    listed = server.get("/v1/models").json
    assert listed["object"] == "list" and [entry["id"] for entry in listed["data"]] == ["tiny"]
    assert listed["data"][0]["meta"]["n_ctx"] == 512 and listed["data"][0]["meta"]["n_vocab"] == 320


def test_no_logits_no_logprobs(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.session, "_logits_all", False)
    server.text(logprobs=1).refused(400, "logprobs", "--logits-all")
    server.chat(logprobs=True).refused(400, "logprobs")


def test_errors_of_the_session_stay_inside(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure is a 500 without details of the machine, or an event of a started stream."""

    def fails(*args: Any, **kwargs: Any) -> Any:
        raise OSError("/secret/path")

    with monkeypatch.context() as patch:
        patch.setattr(server.session, "create_completion", fails)
        error = server.text().refused(500)
        assert "secret" not in json.dumps(error)
    verify = server.session.verify
    calls = iter(range(100))

    def fails_late(*args: Any) -> None:
        if next(calls) == 2:
            raise RuntimeError("late")
        verify(*args)

    with monkeypatch.context() as patch:
        patch.setattr(server.session, "verify", fails_late)
        lines = server.text(stream=True, max_tokens=40).data.decode().split("\n\n")
    assert lines.pop() == "" and len(lines) >= 2
    last = json.loads(lines[-1].removeprefix("data: "))
    assert last["error"]["type"] == "server_error" and last["error"]["code"] == 500
    assert all("choices" in json.loads(line.removeprefix("data: ")) for line in lines[:-1])
