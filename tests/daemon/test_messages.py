"""Where the texts of a chat stand in its rendered prompt."""

import html
import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from fake_upstream import render
from laguna_gguf.daemon.proxy.messages import MAX_SEARCHED_BYTES, locate, marked, rewritten

LONG = "The river runs by the old mill. " * 5
Template = Callable[[list[dict[str, Any]]], str]


def system_in_the_last_turn(messages: list[dict[str, Any]]) -> str:
    """As Mistral's: the system message stands before the last user message."""
    system, *turns = [message["content"] for message in messages]
    return "".join(f"[INST] {turn}[/INST]" for turn in turns[:-1]) + f"[INST] {system}\n\n{turns[-1]}[/INST]"


def trimmed(messages: list[dict[str, Any]]) -> str:
    return render([message | {"content": (message.get("content") or "").strip()} for message in messages])


def places(messages: Any, template: Template) -> list[int]:
    """The byte at which each text stands in the prompt, -1 for one that is not found."""
    chat, prompt = marked(messages), template(messages)
    contents = locate(messages, prompt, template(chat.messages), chat.markers)
    raw = prompt.encode()
    assert all(raw[c.begin : c.end].decode() == c.text for c in contents if c.found)
    return [content.begin for content in contents]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def test_the_same_text_in_every_message() -> None:
    messages = [{"role": role, "content": "yes"} for role in ("user", "assistant", "user")]
    prompt = render(messages)
    assert places(messages, render) == [match.start() for match in re.finditer("yes", prompt)]


def test_another_order() -> None:
    messages = [{"role": "system", "content": "Be brief."}, user(LONG), user(LONG), user("Where?")]
    prompt = system_in_the_last_turn(messages)
    first, second = (match.start() for match in re.finditer(LONG, prompt))
    assert places(messages, system_in_the_last_turn) == [
        prompt.index("Be brief."),
        first,
        second,
        prompt.index("Where?"),
    ]


@pytest.mark.parametrize("question", ["Where is the mill?", LONG.strip()])
def test_what_a_tool_call_quotes(question: str) -> None:
    call = {"function": {"name": "write", "arguments": json.dumps({"text": f"{LONG} {question} {LONG}"})}}
    messages = [user("Look."), {"role": "assistant", "content": None, "tool_calls": [call]}, user(""), user(question)]
    prompt = render(messages)
    assert places(messages, render) == [prompt.index("Look."), -1, prompt.rindex(question)]


def test_what_a_document_quotes() -> None:
    """The template trims the system message, and only the document has it word for word."""
    system = {"role": "system", "content": "Answer only in French.\n"}
    messages = [system, user(f"{LONG}\nAnswer only in French.\n{LONG}end"), user("Where?")]
    prompt = trimmed(messages)
    assert places(messages, trimmed) == [-1, prompt.index(LONG), prompt.index("Where?")]
    chat = marked(messages)
    contents = locate(messages, prompt, trimmed(chat.messages), chat.markers)
    shorter = rewritten(messages, contents, lambda begin, end: "")
    assert shorter == [system, user(""), user("")] and messages[2] == user("Where?")  # a copy


def test_a_template_that_escapes() -> None:
    def escaped(messages: list[dict[str, Any]]) -> str:
        return render([message | {"content": html.escape(message["content"])} for message in messages])

    messages = [user(f"<{LONG}>"), user("One & two"), user(LONG), user("Where?")]
    prompt = escaped(messages)
    assert places(messages, escaped) == [-1, -1, prompt.rindex(LONG), prompt.index("Where?")]


def test_a_template_that_tells_the_time() -> None:
    times = iter(range(9))

    def dated(messages: list[dict[str, Any]]) -> str:
        return f"<|im_start|>system\nIt is {next(times)} o'clock in the afternoon.<|im_end|>\n" + render(messages)

    assert -1 not in places([user("Where?"), user(LONG)], dated)


def test_a_template_that_leaves_a_message_out() -> None:
    messages = [{"role": "developer", "content": LONG}, user(LONG), user("Where?")]
    prompt = render(messages[1:])
    found = places(messages, lambda chat: render(chat[1:]))
    assert found == [-1, prompt.index(LONG), prompt.index("Where?")]


def test_parts() -> None:
    def joined(messages: Any) -> str:
        texts = [part.get("text", "<__media__>") for part in messages[0]["content"]]
        return f"<|user|>{''.join(texts)}<|end|>"

    parts = [{"type": "text", "text": "One."}, {"type": "image_url"}]
    parts += [{"type": "text", "text": text} for text in ("Two.", " ")]
    messages = [{"role": "user", "content": parts}, {"role": "user", "content": None}, "odd", {"content": 3}]
    prompt = joined(messages)
    assert places(messages, joined) == [8, prompt.index("Two."), -1]


def test_without_markers_only_what_is_long_and_stands_once() -> None:
    messages = [user("Where?"), user(LONG), user(LONG + "Again."), user(LONG + "Again.")]
    prompt = render(messages[:2]) + render(messages[2:])
    assert [content.found for content in locate(messages, prompt, None, {})] == [False, False, False, False]
    assert [content.found for content in locate(messages[:2], render(messages[:2]), None, {})] == [False, True]


def test_what_is_searched_is_bounded() -> None:
    prompt = "m" * (1 << 20) + f"\n{LONG}\n"
    messages = [user(f"missing {n} " + LONG) for n in range(2000)] + [user(LONG)]
    assert MAX_SEARCHED_BYTES < len(messages) * len(prompt)
    assert not any(content.found for content in locate(messages, prompt, None, {}))
    assert [content.found for content in locate(messages[-100:], prompt, None, {})] == [False] * 99 + [True]
