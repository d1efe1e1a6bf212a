"""Where the messages of a chat stand in the prompt that was rendered of them, and messages of what is kept of it.

Where a text stands is learned from the template itself: the chat is rendered once more with a marker in place of every
text. What stands between the markers is the template's own, so the texts are found by their surroundings, in whatever
order the template puts them, and a quotation of one inside another, or inside a tool call, is not taken for it.
"""

from __future__ import annotations

import copy
import re
import secrets
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

Part = Callable[[int, int], str]
"""What is kept of the bytes [begin, end) of the rendered prompt."""

AROUND_BYTES = 32
"""Of what stands around a text, as far as it must be as the template has it around the marker."""
UNIQUE_BYTES = 64
"""Longer texts are found without their surroundings too, where they occur once."""
MAX_SEARCHED_BYTES = 1 << 29
"""Of prompts, for the texts of one chat; those behind are kept as they are. Five hundred texts that a template changes
in a prompt of 1 MB are within it."""


@dataclass(frozen=True)
class Content:
    """A text of a message."""

    message: int
    part: int | None
    """Index into a content that is a list; None where it is one text."""
    text: str
    begin: int = -1
    """Bytes of the rendered prompt; -1 where it does not stand there word for word."""
    end: int = -1

    @property
    def found(self) -> bool:
        return self.begin >= 0


@dataclass(frozen=True)
class Marked:
    """A chat with markers for its texts."""

    messages: Any
    markers: dict[Content, bytes]


def marked(messages: Any) -> Marked:
    """Markers for all texts but blank ones, on which templates decide."""
    result, name, markers = copy.deepcopy(messages), secrets.token_hex(8), {}
    for content in _texts(messages):
        if content.text.strip():
            marker = f"text{name}n{len(markers)}end"  # as _MARKER
            markers[content] = marker.encode()
            _set(result, content, marker)
    return Marked(result, markers)


def locate(messages: Any, prompt: str, skeleton: str | None, markers: dict[Content, bytes]) -> list[Content]:
    """The texts of all messages, in order. `skeleton` is what `marked` was rendered to, None if it could not be.

    Templates escape, trim and leave out: a text that does not stand in the prompt word for word is not found. It stays
    as it is.
    """
    texts = _texts(messages)
    finder = _Finder(prompt.encode("utf-8", "surrogatepass"))
    if skeleton is None:
        begins = {content: finder.unique(content) for content in texts}
    else:
        begins = _between_markers(finder, skeleton.encode("utf-8", "surrogatepass"), markers)
    found = [(content, begins.get(content, -1)) for content in texts]
    return [
        content if begin < 0 else replace(content, begin=begin, end=begin + len(_bytes(content)))
        for content, begin in found
    ]


def rewritten(messages: Any, contents: list[Content], kept: Part) -> Any:
    """A copy of the messages with what is kept of their texts."""
    result = copy.deepcopy(messages)
    for content in contents:
        if content.found:
            _set(result, content, kept(content.begin, content.end))
    return result


_MARKER = re.compile(rb"text[0-9a-f]{16}n[0-9]+end")


class _Finder:
    """Finds texts in a prompt, each behind the one before."""

    def __init__(self, prompt: bytes) -> None:
        self._prompt = prompt
        self._at = 0
        self._searched = 0

    def between(self, before: bytes, content: Content, behind: bytes) -> int:
        """Where a text begins that stands between these; -1 where it does not."""
        data, head = _bytes(content), behind[:AROUND_BYTES]
        begin = self._at + len(before)
        if not (self._prompt.startswith(before, self._at) and self._prompt.startswith(data + head, begin)):
            # something before it is not as around the marker: an escaped text, or a time
            tail = before[-AROUND_BYTES:]
            begin = self._search(tail + data + head) + len(tail)
            if begin < len(tail):
                return -1
        self._at = begin + len(data)
        return begin

    def unique(self, content: Content) -> int:
        """Where a long text begins that occurs once behind the one before; -1 for others."""
        data = _bytes(content)
        begin = self._search(data) if len(data) > UNIQUE_BYTES else -1
        if begin < 0 or self._prompt.find(data, begin + 1) >= 0:
            return -1
        self._at = begin + len(data)
        return begin

    def _search(self, data: bytes) -> int:
        if self._searched > MAX_SEARCHED_BYTES:
            return -1
        begin = self._prompt.find(data, self._at)
        self._searched += (len(self._prompt) if begin < 0 else begin) - self._at
        return begin


def _between_markers(finder: _Finder, skeleton: bytes, markers: dict[Content, bytes]) -> dict[Content, int]:
    places = sorted(_places(skeleton, markers).items(), key=lambda item: item[1])
    begins: dict[Content, int] = {}
    end = 0
    for number, (content, place) in enumerate(places):
        next_place = places[number + 1][1] if number + 1 < len(places) else len(skeleton)
        before, end = skeleton[end:place], place + len(markers[content])
        begins[content] = finder.between(before, content, skeleton[end:next_place])
    return begins


def _places(skeleton: bytes, markers: dict[Content, bytes]) -> dict[Content, int]:
    """Of the markers that the template has put somewhere, once."""
    contents = {marker: content for content, marker in markers.items()}
    found = [match for match in _MARKER.finditer(skeleton) if match[0] in contents]
    times = Counter(match[0] for match in found)
    return {contents[match[0]]: match.start() for match in found if times[match[0]] == 1}


def _bytes(content: Content) -> bytes:
    return content.text.encode("utf-8", "surrogatepass")


def _set(messages: Any, content: Content, text: str) -> None:
    message = messages[content.message]
    if content.part is None:
        message["content"] = text
    else:
        message["content"][content.part]["text"] = text


def _texts(messages: Any) -> list[Content]:
    """Everything that could be shortened."""
    found: list[Content] = []
    for number, message in enumerate(messages if isinstance(messages, list) else []):
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, str):
            found.append(Content(number, None, content))
        elif isinstance(content, list):
            for index, part in enumerate(content):
                if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
                    found.append(Content(number, index, part["text"]))
    return found
