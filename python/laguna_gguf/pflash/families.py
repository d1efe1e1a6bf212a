"""The control markers of chat templates: what opens a turn, what closes it.

Markers are read from the templates that the models ship (DeepSeek V3.1 to V4, Qwen 3 and 3.5, Gemma 4, Laguna).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from laguna_gguf.errors import ConfigError

ASSISTANT_ROLES = ("assistant", "model")
DEVELOPER_ROLE = "developer"
TOOL_DEFINITION_ROLES = ("tools", "available_tools", "tool_definitions", "tool_declarations", "functions")
TOOL_OUTPUT_STARTS = (b"<tool_response>", b"<tool_result>")
"""What a user turn begins with that no user wrote."""
TOOL_DEFINITION_STARTS = (b"<tools>", b"<available_tools>", b"# Tools", b"## Tools", b"### Tools")

_LAGUNA_ROLES = "system|user|assistant|developer|tool|tool_response|tool_result|" + "|".join(TOOL_DEFINITION_ROLES)


@dataclass(frozen=True)
class Family:
    """How one family of templates writes turns."""

    name: str
    markers: re.Pattern[bytes]
    """Every opening and closing marker: group `open` is the role that it opens, `close` the one that it closes, or
    something else where the closing marker is the same for all roles."""
    roles: re.Pattern[bytes]
    """An opening marker of system, user or assistant: a text that has one is of this family."""
    controls: tuple[str, ...]
    """Marker strings that are single tokens in the family's own vocabulary."""
    others: re.Pattern[bytes]
    """Control tokens of any purpose, by their look."""
    tool_output: re.Pattern[bytes] | None = None
    """Tool output inside an assistant turn: group `end` ends it, anything else asks for it."""


FAMILIES = {
    family.name: family
    for family in (
        Family(
            "deepseek",
            re.compile("<｜(?P<open>User|Assistant)｜>|(?P<close><｜end▁of▁sentence｜>)".encode()),
            re.compile("<｜(?:User|Assistant)｜>".encode()),
            ("<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>"),
            re.compile("<｜[^<>\\s]{1,80}?｜>".encode()),
        ),
        Family(
            "qwen",
            re.compile(rb"<\|im_start\|>(?P<open>[A-Za-z_][\w.-]*)(?:\n|\Z)|(?P<close><\|im_end\|>)"),
            re.compile(rb"<\|im_start\|>(?:system|user|assistant)(?:\n|\Z)"),
            ("<|im_start|>", "<|im_end|>"),
            re.compile(rb"<\|[a-z_]{1,40}\|>"),
        ),
        Family(
            "gemma",
            re.compile(rb"<\|turn>(?P<open>[A-Za-z_][\w.-]*)(?:\n|\Z)|(?P<close><turn\|>)"),
            re.compile(rb"<\|turn>(?:system|user|model|assistant)(?:\n|\Z)"),
            ("<|turn>", "<turn|>"),
            re.compile(rb"<\|[a-z_]{1,40}>|<[a-z_]{1,40}\|>|<[be]os>"),
            re.compile(rb"(?P<end><tool_response\|>|</tool_response>|</tool_result>)|<\|tool_response>|<tool_call\|>"),
        ),
        Family(
            "laguna",
            re.compile(f"<(?P<open>{_LAGUNA_ROLES})>\n?|</(?P<close>{_LAGUNA_ROLES})>".encode()),
            re.compile(rb"<(?:system|user|assistant)>"),
            ("<assistant>", "</assistant>"),  # the tags of other roles are ordinary text to its tokenizer
            re.compile("〈\\|[A-Z]{1,40}\\|〉".encode()),
        ),
    )
}
"""By name, in the order in which they are tried."""


def family_of_text(raw: bytes, name: str = "auto") -> Family | None:
    """The family called `name`; with `auto` the first one whose role marker occurs in the text, or None."""
    if name == "auto":
        return next((family for family in FAMILIES.values() if family.roles.search(raw)), None)
    if not isinstance(name, str) or name not in FAMILIES:
        raise ConfigError(f"family is {name!r}; needed auto or one of {', '.join(FAMILIES)}")
    return FAMILIES[name]


def family_of_tokenizer(encode: Callable[[str], Sequence[int]]) -> str | None:
    """Name of the first family whose control strings are one token each, or None.

    `encode` is the target's tokenizer, parsing control tokens and adding none of its own.
    """
    for family in FAMILIES.values():
        if all(len(encode(control)) == 1 for control in family.controls):
            return family.name
    return None
