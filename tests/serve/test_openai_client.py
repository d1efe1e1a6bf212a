"""The real openai client against the server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from http_tools import eventually
from serve_tools import Running

TOOL: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "weather of a place",
        "parameters": {
            "type": "object",
            "properties": {"unit": {"enum": ["c", "f"]}},
            "required": ["unit"],
            "additionalProperties": False,
        },
    },
}
HELLO: Any = [{"role": "user", "content": "hello there"}]


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=30) as client:
        yield client


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "laguna-gguf"


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="tiny", messages=HELLO, max_completion_tokens=10, temperature=0)
    choice = answer.choices[0]
    assert choice.message.role == "assistant" and choice.finish_reason == "length" and choice.message.content
    usage = answer.usage
    assert usage is not None and usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.prompt_tokens_details is not None and usage.completion_tokens >= 10
    assert answer.model_extra is not None
    assert answer.model_extra["timings"]["predicted_n"] == usage.completion_tokens
    stream = client.chat.completions.create(
        model="tiny",
        messages=HELLO,
        max_tokens=10,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == choice.message.content
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == usage.completion_tokens


def test_completion(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt="hello there", max_tokens=6, temperature=0, logprobs=2)
    assert answer.choices[0].logprobs is not None and len(answer.choices[0].logprobs.tokens or []) == 6
    stream = client.completions.create(model="tiny", prompt="hello there", max_tokens=6, temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == answer.choices[0].text


def test_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=HELLO, max_tokens=3, temperature=0, logprobs=True, top_logprobs=2
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None and len(logprobs.content) == 3
    assert all(entry.logprob <= 0 and len(entry.top_logprobs) <= 2 for entry in logprobs.content)


class Pick(BaseModel):
    unit: bool
    size: int


def test_structured_output(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model="tiny", messages=HELLO, response_format=Pick, max_tokens=60, temperature=1, seed=3
    )
    assert isinstance(answer.choices[0].message.parsed, Pick)
    plain = client.chat.completions.create(
        model="tiny", messages=HELLO, response_format={"type": "json_object"}, max_tokens=200, temperature=0.5, seed=6
    )
    assert (plain.choices[0].message.content or "").startswith("{")


def test_tool_call(client: openai.OpenAI) -> None:
    call: Any = {"model": "tiny", "messages": HELLO, "tools": [TOOL], "max_tokens": 60, "temperature": 0}
    choice: Any = {"type": "function", "function": {"name": "get_weather"}}
    answer = client.chat.completions.create(**call, tool_choice=choice).choices[0]
    assert answer.finish_reason == "tool_calls" and answer.message.content is None and answer.message.tool_calls
    tool_call: Any = answer.message.tool_calls[0]
    assert tool_call.function.name == "get_weather" and json.loads(tool_call.function.arguments)["unit"] in ("c", "f")
    with client.chat.completions.stream(**call, tool_choice="required") as stream:
        whole: Any = stream.get_final_completion().choices[0]
    assert whole.finish_reason == "tool_calls"
    assert whole.message.tool_calls[0].function.name == "get_weather"
    assert whole.message.tool_calls[0].function.arguments == tool_call.function.arguments
    followed = [
        *HELLO,
        {"role": "assistant", "tool_calls": [tool_call.model_dump()]},
        {"role": "tool", "tool_call_id": tool_call.id, "content": "sunny"},
    ]
    assert client.chat.completions.create(**call | {"messages": followed, "max_tokens": 3}).choices[0].message.content
    cut = client.chat.completions.create(**call | {"max_tokens": 2}, tool_choice=choice).choices[0]
    assert cut.finish_reason == "length" and cut.message.tool_calls


def test_legacy_functions(client: openai.OpenAI) -> None:
    call: Any = {
        "model": "tiny",
        "messages": HELLO,
        "functions": [TOOL["function"]],
        "function_call": {"name": "get_weather"},
        "max_tokens": 60,
    }
    answer = client.chat.completions.create(**call, temperature=0).choices[0]
    assert answer.finish_reason == "function_call" and answer.message.function_call is not None
    chunks = list(client.chat.completions.create(**call, temperature=0, stream=True))
    deltas: list[Any] = [
        chunk.choices[0].delta.function_call for chunk in chunks if chunk.choices[0].delta.function_call
    ]
    assert deltas[0].name == "get_weather"
    assert "".join(delta.arguments for delta in deltas) == answer.message.function_call.arguments
    assert chunks[-1].choices[0].finish_reason == "function_call"


def test_errors(client: openai.OpenAI, server: Running) -> None:
    with pytest.raises(openai.BadRequestError, match="n:") as caught:
        client.chat.completions.create(model="tiny", messages=HELLO, n=3)
    assert caught.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError, match="context") as caught:
        client.completions.create(model="tiny", prompt="word " * 600)
    assert caught.value.type == "exceed_context_size_error"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="tiny", input="x")


def test_closing_a_stream_stops_it(client: openai.OpenAI, server: Running) -> None:
    stream = client.completions.create(model="tiny", prompt="hello", max_tokens=400, stream=True)
    next(iter(stream))
    stream.close()
    eventually(server.idle)
