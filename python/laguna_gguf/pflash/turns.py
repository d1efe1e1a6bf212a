"""Finding the turns of a rendered chat by its control markers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from laguna_gguf.pflash.families import (
    ASSISTANT_ROLES,
    TOOL_DEFINITION_ROLES,
    TOOL_DEFINITION_STARTS,
    TOOL_OUTPUT_STARTS,
    Family,
)
from laguna_gguf.pflash.token_map import TokenMap

SYSTEM, DEVELOPER, USER, ASSISTANT = "system", "developer", "user", "assistant"
TOOL, TOOL_DEFINITIONS = "tool", "tool_definitions"

_LONGEST_PREAMBLE = 64  # bytes of begin-of-text tokens before the first turn
_LONGEST_MARKER = 32  # bytes, at least as many as any marker of tool output has
_BLANKS = re.compile(rb"\s*")
_ENOUGH = 3  # markers that are tokens before it is believed that the tokenizer has them
_ENOUGH_UNCLOSED = 2  # DeepSeek closes no user turn, so that its shortest chat has one marker less


@dataclass
class Turn:
    """One turn; all positions are bytes of the text."""

    role: str
    """system, developer, user, assistant, tool (output), tool_definitions, or whatever else the template calls it."""
    begin: int
    content_begin: int
    """Behind the role header."""
    content_end: int
    """Before the closing marker."""
    end: int
    """Behind the closing marker."""
    closed: bool


class _Marker(NamedTuple):
    begin: int
    end: int
    opens: str | None
    closes: str | None


def find_turns(raw: bytes, family: Family, tokens: TokenMap) -> list[Turn]:
    """Turns in source order; the last one is not closed when the text ends inside it.

    A marker that somebody typed opens nothing where that can be told: inside a turn that is closed further on, or when
    the tokenizer has the family's markers as tokens and this is not one.
    """
    markers = [_Marker(match.start(), match.end(), *_roles(match)) for match in family.markers.finditer(raw)]
    markers = _without_typed(raw, markers, family, tokens)
    turns = _deepseek(raw, markers) if family.name == "deepseek" else _paired(raw, markers, family)
    seen: set[str] = set()
    for turn in turns:
        turn.role = _role(raw, turn, seen)
        seen.add(turn.role)
    return turns


def split_generation(raw: bytes, turns: list[Turn], family: Family) -> int | None:
    """The byte where the generation prompt begins, which is the assistant turn left open at the end; None without one.

    It is taken out of `turns`. Where tool output stands in it, what came before that stays as a turn, and the
    generation prompt is what follows the output, possibly nothing.
    """
    if not turns or turns[-1].role != ASSISTANT or turns[-1].closed:
        return None
    last = turns[-1]
    outputs = family.tool_output.finditer(raw, last.content_begin) if family.tool_output else ()
    ends = [match.end() for match in outputs if match["end"] is not None]
    if not ends:
        turns.pop()
        return last.begin
    last.content_end = last.end = ends[-1]
    last.closed = True
    return last.end


def _roles(match: re.Match[bytes]) -> tuple[str | None, str | None]:
    opens, closes = match["open"], match["close"]
    return opens.decode() if opens is not None else None, closes.decode() if closes is not None else None


def _role(raw: bytes, turn: Turn, seen: set[str]) -> str:
    """What the turn is, with the roles of those before it."""
    role = turn.role.lower()
    if role in ASSISTANT_ROLES:
        return ASSISTANT
    if role in ("tool_response", "tool_result"):
        return TOOL
    if role in TOOL_DEFINITION_ROLES or (role == TOOL and not seen & {USER, ASSISTANT}):
        return TOOL_DEFINITIONS  # nothing was called before anybody spoke
    if role == USER and _starts(raw, turn, TOOL_OUTPUT_STARTS):
        return TOOL
    if role == SYSTEM and SYSTEM in seen and _starts(raw, turn, TOOL_DEFINITION_STARTS):
        return TOOL_DEFINITIONS
    return role


def _starts(raw: bytes, turn: Turn, starts: tuple[bytes, ...]) -> bool:
    blanks = _BLANKS.match(raw, turn.content_begin, turn.content_end)
    return raw.startswith(starts, blanks.end() if blanks else turn.content_begin, turn.content_end)


def _without_typed(raw: bytes, markers: list[_Marker], family: Family, tokens: TokenMap) -> list[_Marker]:
    """Only the markers that are tokens, when those alone are a chat up to the end of the text; else all of them.

    Without that condition a vocabulary that lacks the markers would lose those that its tokens do not hit by chance.
    """
    controls = [control.encode() for control in family.controls]
    is_token: dict[int, bool] = {}
    for number, marker in enumerate(markers):
        control = next((c for c in controls if raw.startswith(c, marker.begin)), None)
        if control is not None:
            is_token[number] = tokens.is_token(marker.begin, marker.begin + len(control))
    real = [markers[number] for number, exact in is_token.items() if exact]
    enough = _ENOUGH_UNCLOSED if family.name == "deepseek" else _ENOUGH
    if not enough <= len(real) < len(is_token) or not is_token[max(is_token)]:
        return markers
    if real[0].opens is None or (family.name != "deepseek" and not _alternate(real)):
        return markers
    return [marker for number, marker in enumerate(markers) if is_token.get(number, True)]


def _alternate(markers: Sequence[_Marker]) -> bool:
    return all((marker.opens is not None) == (number % 2 == 0) for number, marker in enumerate(markers))


def _paired(raw: bytes, markers: Sequence[_Marker], family: Family) -> list[Turn]:
    """Turns of templates that close every turn."""
    turns: list[Turn] = []
    current: Turn | None = None
    typed: int | None = None  # the first opening marker inside the current turn that was taken for typed text
    lax = False
    at = 0
    while at < len(markers) or (current is not None and typed is not None):
        if at == len(markers):
            # the current turn is never closed, so it ends where the next one opens, and so do all that follow
            at, typed, lax = typed or 0, None, True
            continue
        marker = markers[at]
        if marker.opens is not None:
            if current is None and not lax and turns and _interrupted(raw, turns[-1].end, marker.begin):
                current = turns.pop()  # its closing marker was typed text as well
            if current is None or lax or _abandoned(raw, current, marker.begin, family):
                if current is not None:
                    turns.append(_ended(current, marker.begin))
                current = Turn(marker.opens, marker.begin, marker.end, len(raw), len(raw), closed=False)
                typed = None
            elif typed is None:
                typed = at
        elif current is not None:
            if _closes(marker, current):
                current.content_end, current.end, current.closed = marker.begin, marker.end, True
                turns.append(current)
                current = typed = None
        elif turns and _closes(marker, turns[-1]):
            turns[-1].content_end, turns[-1].end = marker.begin, marker.end  # the one before was typed text
        at += 1
    if current is not None:
        turns.append(current)
    if turns and turns[0].closed and _is_preamble(raw[: turns[0].begin]):
        turns[0].begin = 0
    return turns


def _closes(marker: _Marker, turn: Turn) -> bool:
    # where closing markers name a role, as in `</user>`, it has to be the turn's; `<|im_end|>` names none
    return marker.closes is not None and (not marker.closes.isidentifier() or marker.closes == turn.role)


def _ended(turn: Turn, end: int) -> Turn:
    if not turn.closed:
        turn.content_end, turn.end, turn.closed = end, end, True
    return turn


def _interrupted(raw: bytes, end: int, begin: int) -> bool:
    """Whether a marker stands in the middle of a line of text that follows a closed turn, as only typed ones do."""
    between = raw[end:begin]
    return bool(between.strip()) and not between.endswith((b"\n", b">"))


def _abandoned(raw: bytes, turn: Turn, begin: int, family: Family) -> bool:
    """Whether an assistant turn ends with tool output right before `begin`; Gemma does not close such turns."""
    if family.tool_output is None or turn.role.lower() not in ASSISTANT_ROLES:
        return False
    before = raw[max(turn.content_begin, begin - _LONGEST_MARKER) : begin].rstrip()
    return any(match.end() == len(before) for match in family.tool_output.finditer(before))


def _is_preamble(before: bytes) -> bool:
    return 0 < len(before) <= _LONGEST_PREAMBLE and not any(before[i : i + 1].isspace() for i in range(len(before)))


def _deepseek(raw: bytes, markers: Sequence[_Marker]) -> list[Turn]:
    """Turns of a template that closes assistant turns only; text before the first role marker is the system message."""
    markers = _deepseek_real(markers)
    first = next((marker.begin for marker in markers if marker.opens is not None), None)
    if first is None:
        return []
    turns = [Turn(SYSTEM, 0, 0, first, first, closed=True)] if raw[:first].strip() else []
    current: Turn | None = None
    outside = first  # where text after a closed turn begins; it is tool output, which has no marker of its own
    for marker in markers:
        if marker.begin < first:
            continue
        if marker.opens is not None:
            turns.extend(
                _tool_output(raw, outside, marker.begin) if current is None else [_ended(current, marker.begin)]
            )
            current = Turn(marker.opens.lower(), marker.begin, marker.end, len(raw), len(raw), closed=False)
        elif current is None:
            turns.extend(_tool_output(raw, outside, marker.begin))
            outside = marker.end
        elif current.role == ASSISTANT:
            current.content_end, current.end, current.closed = marker.begin, marker.end, True
            turns.append(current)
            current, outside = None, marker.end
    turns.extend(_tool_output(raw, outside, len(raw)) if current is None else [current])
    return turns


def _deepseek_real(markers: Sequence[_Marker]) -> list[_Marker]:
    """Without what can only be typed: an assistant marker that another one follows before anything closes it, and user
    markers inside an assistant turn that is closed."""
    following: list[str | None] = []
    later = None
    for marker in reversed(markers):
        following.append(later)
        if marker.opens != "User":
            later = marker.opens or "end"
    real = []
    inside = False
    for marker, next_one in zip(markers, reversed(following), strict=True):
        if marker.opens == "Assistant":
            if next_one == "Assistant":
                continue
            inside = next_one == "end"
        elif marker.opens is None:
            inside = False
        elif inside:
            continue
        real.append(marker)
    return real


def _tool_output(raw: bytes, begin: int, end: int) -> list[Turn]:
    return [Turn(TOOL, begin, begin, end, end, closed=True)] if raw[begin:end].strip() else []
