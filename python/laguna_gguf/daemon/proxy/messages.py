"""Where the messages of a chat stand in the prompt that was rendered of them, and messages of what is kept of it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Part = Callable[[int, int], str]
"""What is kept of the bytes [begin, end) of the rendered prompt."""


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
    is not found. It will be kept as it is.
    """
    contents: list[Content] = []
    raw, at = prompt.encode("utf-8", "surrogatepass"), 0
    for message, part, text in _texts(messages):
        data = text.encode("utf-8", "surrogatepass")
        begin = raw.find(data, at) if data.strip() else -1
        if begin < 0:
            contents.append(Content(message, part, -1, -1, text))
            continue
        at = begin + len(data)
        contents.append(Content(message, part, begin, at, text))
    return contents


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
