"""Where the messages of a chat stand in the prompt that was rendered of them, and messages of what is kept of it."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Part = Callable[[int, int], str]
"""What is kept of the bytes [begin, end) of the rendered prompt."""


SHORT_BYTES = 64
"""Texts up to this length must have blanks or markers (<...>, [...]) on both sides in the prompt."""
MAX_SEARCHED_BYTES = 1 << 29
"""Of prompts, for the texts of one chat; those behind are kept as they are. Five hundred texts that a template changes
in a prompt of 1 MB are within it."""


@dataclass(frozen=True)
class Content:
    """A text of a message."""

    message: int
    part: int | None
    """Index into a content that is a list; None where it is one text."""
    begin: int
    """Bytes of the rendered prompt; -1 where it does not occur there."""
    end: int
    text: str

    @property
    def found(self) -> bool:
        return self.begin >= 0


def locate(messages: Any, prompt: str) -> list[Content]:
    """The texts of all messages, in order.

    Templates escape, trim and wrap: a text that does not stand in the prompt word for word, behind the texts before it,
    is not found. It will be kept as it is. A short text must also stand by itself, so that an "ok" is not found inside
    the arguments of a tool call, which no message's text has to do with.
    """
    contents: list[Content] = []
    raw, at = prompt.encode("utf-8", "surrogatepass"), 0
    searched = 0
    for message, part, text in _texts(messages):
        data = text.encode("utf-8", "surrogatepass")
        begin = _find(raw, data, at) if data.strip() and searched < MAX_SEARCHED_BYTES else -1
        searched += (len(raw) if begin < 0 else begin) - at
        if begin < 0:
            contents.append(Content(message, part, -1, -1, text))
            continue
        at = begin + len(data)
        contents.append(Content(message, part, begin, at, text))
    return contents


def _find(raw: bytes, data: bytes, at: int) -> int:
    first = raw.find(data, at)
    if first < 0 or len(data) > SHORT_BYTES:
        return first
    match = re.compile(rb"(?<![^\s>\]])" + re.escape(data) + rb"(?![^\s<\[])").search(raw, first)
    return match.start() if match else -1


def rewritten(messages: Any, contents: list[Content], kept: Part) -> Any:
    """A copy of the messages with what is kept of their texts."""
    result = copy.deepcopy(messages)
    for content in contents:
        if not content.found:
            continue
        text = kept(content.begin, content.end)
        message = result[content.message]
        if content.part is None:
            message["content"] = text
        else:
            message["content"][content.part]["text"] = text
    return result


def _texts(messages: Any) -> list[tuple[int, int | None, str]]:
    """(message, part, text) of everything that could be shortened."""
    found: list[tuple[int, int | None, str]] = []
    for number, message in enumerate(messages if isinstance(messages, list) else []):
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, str):
            found.append((number, None, content))
        elif isinstance(content, list):
            for index, part in enumerate(content):
                if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
                    found.append((number, index, part["text"]))
    return found
