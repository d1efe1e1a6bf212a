"""Chats: the model's template and packaged formats, tools, functions, formats of the answer, log probabilities."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from llama_cpp.llama_chat_format import Jinja2ChatFormatter

from laguna_gguf import SpecSession
from laguna_gguf.errors import ConfigError
from session_tools import plain_llama, spec_session
from surface_tools import LETTERS_ONLY, Rivals

STREAM = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])

MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "tell me of the sea"},
]
LONGER = [*MESSAGES, {"role": "assistant", "content": "wide"}, MESSAGES[1]]

SCHEMA = {"type": "object", "properties": {"depth": {"type": "integer"}}, "required": ["depth"]}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "dive", "description": "go", "parameters": SCHEMA}}
OTHER: dict[str, Any] = {"type": "function", "function": {"name": "swim", "description": "", "parameters": SCHEMA}}
CHOICE: dict[str, Any] = {"type": "function", "function": {"name": "dive"}}


@pytest.fixture(scope="module")
def rivals(tiny_target: Path, tiny_drafter: Path) -> Iterator[Rivals]:
    """Room for tools in a byte-level vocabulary; log probabilities."""
    options: dict[str, Any] = {"n_ctx": 1536, "logits_all": True}
    plain, judge = (plain_llama(tiny_target, **options) for _ in range(2))
    session = spec_session(tiny_target, tiny_drafter, **options)
    yield Rivals(plain, session, judge)
    for llama in (plain, judge, session):
        llama.close()


SETTINGS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "greedy": {"temperature": 0.0},
    "seed": {"temperature": 0.9, "seed": 3},
    "stop": {"temperature": 0.0, "stop": ["e"], **LETTERS_ONLY},
    "stop as text": {"temperature": 0.9, "stop": "s", **LETTERS_ONLY},
    "bias": {"temperature": 0.0, "logit_bias": {"130": 4.0}},
    "mirostat": {"mirostat_mode": 1, "seed": 3},
    "penalties": {"presence_penalty": 0.4, "frequency_penalty": 0.2, "repeat_penalty": 1.0, "seed": 4},
    "other samplers": {"temperature": 1.1, "top_k": 20, "top_p": 0.7, "min_p": 0.02, "typical_p": 0.9, "seed": 4},
    "json": {"temperature": 1.0, "seed": 2, "response_format": {"type": "json_object"}},
    "json with a schema": {"seed": 2, "response_format": {"type": "json_object", "schema": SCHEMA}},
    "json_schema": {"seed": 2, "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
    "text": {"seed": 2, "response_format": {"type": "text"}},
    "logprobs": {"seed": 2, "logprobs": True, "top_logprobs": 3},
    "logprobs of letters": {"seed": 2, "logprobs": True, "top_logprobs": 2, **LETTERS_ONLY},
    "tool": {"seed": 2, "tools": [TOOL, OTHER], "tool_choice": CHOICE, "max_tokens": 60},
    "tools, none chosen": {"seed": 2, "tools": [TOOL, OTHER], "tool_choice": "none"},
    "tools, auto": {"seed": 2, "tools": [TOOL, OTHER], "tool_choice": "auto"},
    "functions": {"seed": 2, "functions": [TOOL["function"]], "function_call": {"name": "dive"}, "max_tokens": 60},
    "function auto": {"seed": 2, "functions": [TOOL["function"]], "function_call": "auto"},
    "model": {"seed": 2, "model": "another name"},
}


@STREAM
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_settings(rivals: Rivals, settings: dict[str, Any], stream: bool) -> None:
    options = {"max_tokens": 20, "stream": stream} | settings
    messages = LONGER if "seed" in settings else MESSAGES
    rivals.check(lambda llama: llama.create_chat_completion(messages, **options))


TOOL_SETTINGS: dict[str, dict[str, Any]] = {
    "tool": {"tools": [TOOL, OTHER], "tool_choice": CHOICE},
    "auto": {"tools": [TOOL, OTHER], "tool_choice": "auto"},
    "functions": {"functions": [TOOL["function"]], "function_call": {"name": "dive"}},
    "no tools": {"response_format": {"type": "json_object", "schema": SCHEMA}},
    "logprobs": {"tools": [TOOL], "tool_choice": CHOICE, "logprobs": True, "top_logprobs": 1},
}


@STREAM
@pytest.mark.parametrize("settings", TOOL_SETTINGS.values(), ids=TOOL_SETTINGS)
def test_function_calling(rivals: Rivals, settings: dict[str, Any], stream: bool) -> None:
    """llama_cpp's own function-calling format: several completions with grammars behind one answer."""
    for llama in (rivals.plain, rivals.judge, rivals.session):
        llama.chat_format = "chatml-function-calling"
    try:
        rivals.check(
            lambda llama: llama.create_chat_completion(MESSAGES, max_tokens=14, stream=stream, **settings),
            schedules=[(2, 0, 99)],
        )
    finally:
        for llama in (rivals.plain, rivals.judge, rivals.session):
            llama.chat_format = "chat_template.default"


@pytest.mark.parametrize("chat_format", ["chatml", "llama-3", "mistral-instruct", "gemma"])
def test_packaged_formats(rivals: Rivals, chat_format: str) -> None:
    for llama in (rivals.plain, rivals.judge, rivals.session):
        llama.chat_format = chat_format
    try:
        rivals.check(lambda llama: llama.create_chat_completion(MESSAGES[1:], max_tokens=12, seed=3), schedules=[None])
    finally:
        for llama in (rivals.plain, rivals.judge, rivals.session):
            llama.chat_format = "chat_template.default"


def test_handler_of_ones_own(rivals: Rivals, tiny_target: Path, tiny_drafter: Path) -> None:
    """A handler given to the constructor or set later is called as Llama calls it."""
    template = "{% for m in messages %}{{ m['content'] }};{% endfor %}"
    handler = Jinja2ChatFormatter(template, eos_token="", bos_token="").to_chat_handler()
    session = spec_session(tiny_target, tiny_drafter, chat_handler=handler)
    assert session.chat_handler is handler
    plain = plain_llama(tiny_target, chat_handler=handler)
    own = Rivals(plain, session, rivals.judge)
    rivals.judge.chat_handler = handler
    own.check(lambda llama: llama.create_chat_completion(MESSAGES, max_tokens=20, seed=3))
    rivals.judge.chat_handler = None


def test_multimodal_handlers_are_refused(rivals: Rivals, tiny_target: Path, tiny_drafter: Path) -> None:
    """They would evaluate images behind the session's back."""
    from llama_cpp.llama_chat_format import Llava15ChatHandler, MTMDChatHandler

    for kind in (Llava15ChatHandler, MTMDChatHandler):
        handler = kind.__new__(kind)  # their constructors need a projector file
        with pytest.raises(ConfigError, match="chat_handler"):
            SpecSession(str(tiny_target), tiny_drafter, chat_handler=handler, verbose=False)
        with pytest.raises(ConfigError, match="chat_handler"):
            rivals.session.chat_handler = handler


@STREAM
def test_openai_types(rivals: Rivals, stream: bool) -> None:
    def chat(llama: Any) -> Any:
        answer = llama.create_chat_completion_openai_v1(MESSAGES, max_tokens=12, seed=3, stream=stream)
        return [chunk.model_dump() for chunk in answer] if stream else answer.model_dump()

    rivals.check(chat)


def test_conversation(rivals: Rivals) -> None:
    """Three turns, each with the answer before it in the history."""

    def converse(llama: Any) -> list[Any]:
        messages, answers = list(MESSAGES), []
        for turn in range(3):
            answers.append(llama.create_chat_completion(messages, max_tokens=15, seed=turn, **LETTERS_ONLY))
            messages += [answers[-1]["choices"][0]["message"], {"role": "user", "content": f"and {turn}?"}]
        return answers

    rivals.check(converse)


def test_bad_chats(rivals: Rivals) -> None:
    """What Llama raises, a session raises."""
    for call in (
        lambda llama: llama.create_chat_completion(MESSAGES, tools=[TOOL], tool_choice={"function": {"name": "fly"}}),
        lambda llama: llama.create_chat_completion([{"role": "user", "content": "x" * 3000}]),
        lambda llama: llama.create_chat_completion(None),
    ):
        with pytest.raises((ValueError, TypeError)):
            rivals.check(call, schedules=[None])
    rivals.check(lambda llama: llama.create_chat_completion(MESSAGES, max_tokens=3, seed=1))
