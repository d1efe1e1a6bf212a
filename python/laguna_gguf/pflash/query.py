"""Planning the compression of a rendered chat: what asks, what else asks, and what must be kept.

Everything is derived from the text as the drafter's tokenizer decodes it and the bytes at which its tokens start, so a
drafter whose vocabulary lacks the target's control tokens plans the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from numpy.typing import ArrayLike

from laguna_gguf.errors import ConfigError, QueryError
from laguna_gguf.pflash.candidates import MAX_REQUIRED, merge
from laguna_gguf.pflash.families import family_of_text
from laguna_gguf.pflash.segmentation import Span
from laguna_gguf.pflash.settings import MAX_QUERY_TOKENS, SelectionSettings
from laguna_gguf.pflash.token_map import TokenMap
from laguna_gguf.pflash.turns import (
    ASSISTANT,
    DEVELOPER,
    SYSTEM,
    TOOL_DEFINITIONS,
    USER,
    Turn,
    find_turns,
    split_generation,
)

PROMPT_END = "prompt_end"
EXPLICIT = "explicit_query_span"
CONTENT_TAIL = "content_tail"
PROMPT_TAIL = "prompt_tail"
SEMANTIC_SUFFIX = "semantic_suffix"

_SHORTEST_SUFFIX = 4
_DEFINITIONS = (DEVELOPER, TOOL_DEFINITIONS)

__all__ = ["QueryPlan", "TurnSpan", "plan"]


@dataclass(frozen=True)
class TurnSpan:
    """A turn of the chat in tokens; tokens that merged over its edges count as inside."""

    role: str
    """system, developer, user, assistant, tool (output), tool_definitions, or as the template calls it."""
    begin: int
    end: int
    first_byte: int
    content_byte: int
    """Where the content begins, behind the role header."""
    blank: bool
    """Whether it says nothing."""


@dataclass(frozen=True)
class QueryPlan:
    """How a prompt is to be scored and what must be kept of it; all spans are [begin, end) in tokens."""

    query: Span
    """What asks. The scorer uses `rows`, its last tokens."""
    windows: list[tuple[int, int, float]]
    """Further windows (begin, end, weight): the tail of the latest user turn, then those of earlier ones."""
    pins: list[Span]
    """Kept in any case, sorted and merged."""
    droppable_pins: list[Span]
    """Kept as long as the rest fits, sorted and merged; may overlap `pins`."""
    skeleton: list[Span]
    """Those of the droppable pins that keep the dialogue's shape: role headers and short turns."""
    generation_begin: int | None
    """Token that holds the marker of the assistant turn left open at the end, or None."""
    generation_byte: int | None
    """Where that marker begins in the text."""
    suffix_candidates: bool
    """Whether what follows the query is scored instead of kept."""
    rule: str
    """prompt_end, explicit_query_span, content_tail, prompt_tail or semantic_suffix."""
    rows: Span
    content: Span
    """The latest user's content, or the whole text's where there are no turns."""
    family: str | None
    """None: no markers found."""
    turns: tuple[TurnSpan, ...]
    """Without the generation prompt."""
    history_queries: int
    """How many of the windows are tails of earlier user turns."""

    @property
    def kept(self) -> list[Span]:
        """Hard and droppable pins together, sorted and merged."""
        return merge([*self.pins, *self.droppable_pins])


def plan(
    text: str | bytes,
    offsets: ArrayLike,
    *,
    family: str = "auto",
    settings: SelectionSettings | None = None,
    pflash_query: str | None = None,
    pflash_required: Sequence[str] = (),
) -> QueryPlan:
    """Plan the compression of a rendered prompt.

    `offsets` int [n_tokens + 1]: byte of the text at which each token begins, then its length; they may split a
    character. Text that is not valid UTF-8 is given as bytes, or as str decoded with errors="surrogateescape".
    `family`: deepseek, qwen, gemma, laguna, or auto for the first of these whose role marker occurs.
    `pflash_query` replaces the derived query by the last occurrence of this text; `pflash_required` texts are kept and
    must occur in the latest user turn.

    Raises QueryError: offsets that do not fit the text, no text, no turn that says anything, or a given text that does
    not occur; ConfigError: an unknown family.
    """
    if settings is not None and not isinstance(settings, SelectionSettings):
        raise ConfigError(f"settings are {type(settings).__name__}; needed SelectionSettings or None")
    raw = _encoded(text)
    found = family_of_text(raw, family)
    if not raw.strip():
        raise QueryError("the prompt is empty; needed text to ask about")
    chat = _Chat(raw, TokenMap(offsets, len(raw)), found.name if found else None, settings or SelectionSettings())
    if found is not None:
        chat.turns = find_turns(raw, found, chat.tokens)
        if chat.turns:
            chat.generation = split_generation(raw, chat.turns, found)
        else:
            chat.family = None
    return chat.plan(pflash_query, _texts(pflash_required))


def _encoded(text: str | bytes) -> bytes:
    try:
        return text if isinstance(text, bytes) else text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise QueryError(
            f"the prompt has a lone surrogate at character {error.start}; give the text as bytes, or decoded with "
            'errors="surrogateescape"'
        ) from error
    except AttributeError as error:
        raise QueryError(f"the prompt is {type(text).__name__}; needed str or bytes") from error


def _texts(required: Iterable[str]) -> list[str]:
    try:
        texts = [required] if isinstance(required, str) else list(required)
    except TypeError as error:
        raise QueryError(f"pflash_required is {required!r}; needed a list of texts") from error
    if len(texts) > MAX_REQUIRED:
        raise QueryError(f"pflash_required has {len(texts)} texts; at most {MAX_REQUIRED} are accepted")
    return texts


class _Chat:
    """A prompt while it is planned: bytes, tokens and turns."""

    def __init__(self, raw: bytes, tokens: TokenMap, family: str | None, settings: SelectionSettings) -> None:
        self.raw = raw
        self.tokens = tokens
        self.family = family
        self.settings = settings
        self.turns: list[Turn] = []
        self.generation: int | None = None  # byte

    def plan(self, explicit: str | None, required: Sequence[str]) -> QueryPlan:
        users = [turn for turn in self.turns if turn.role == USER]
        latest = next((turn for turn in reversed(users) if not self._blank(turn)), None)
        rule, query, asked = self._query(explicit, latest)
        suffix = (
            rule == EXPLICIT and asked is not None and asked is latest and self.turns.index(asked) + 1 < len(self.turns)
        )
        windows = self._windows(rule, query, latest)
        history = self._history(users, asked or latest, query)
        pins = [query, *(self._required(needed, latest) for needed in required)]
        if self.generation is not None:
            pins.append((min(self._generation_token(), self.tokens.n_tokens - 1), self.tokens.n_tokens))
        if asked is not None:
            pins.append(self._header(asked))
            if suffix:
                pins.append((query[1], self._span(asked)[1]))
        pins += [self._whole(number) for number, turn in enumerate(self.turns) if turn.role == SYSTEM]
        skeleton = self._skeleton()
        return QueryPlan(
            query=query,
            windows=windows + history,
            pins=merge(pins),
            droppable_pins=merge([*self._definitions(), *skeleton]),
            skeleton=merge(skeleton),
            generation_begin=self._generation_token() if self.generation is not None else None,
            generation_byte=self.generation,
            suffix_candidates=suffix,
            rule=rule,
            rows=self._rows(rule, query),
            content=self._content(latest) if latest else self.tokens.content(*_stripped(self.raw, 0, len(self.raw))),
            family=self.family,
            turns=tuple(
                TurnSpan(turn.role, *self._span(turn), turn.begin, turn.content_begin, self._blank(turn))
                for turn in self.turns
            ),
            history_queries=len(history),
        )

    def _query(self, explicit: str | None, latest: Turn | None) -> tuple[str, Span, Turn | None]:
        """Rule, query and the turn that the query belongs to."""
        last = self.tokens.n_tokens - 1
        if explicit is not None:
            begin, end = self._explicit(explicit)
            asked = next((turn for turn in self.turns if turn.begin <= begin < turn.end), None)
            return EXPLICIT, self.tokens.covering(begin, end), asked
        if not self.turns and self.generation is None:
            content = _stripped(self.raw, 0, len(self.raw))
            if self.settings.select_query_parser == "latest_user":
                return SEMANTIC_SUFFIX, self._suffix(*content), None
            return CONTENT_TAIL, self._tail(self.tokens.content(*content)), None
        if self.settings.select_query_parser == "latest_user" and latest is not None:
            return SEMANTIC_SUFFIX, self._suffix(*self._content_bytes(latest)), latest
        if self.generation is not None:
            return PROMPT_END, (last, last + 1), latest
        asked = latest or next((turn for turn in reversed(self.turns) if not self._blank(turn)), None)
        if asked is None:
            raise QueryError("no turn of the prompt says anything; needed text to ask about")
        return PROMPT_TAIL, self._tail(self._content(asked)), asked

    def _explicit(self, query: str) -> Span:
        begin, wanted = self._last(_wanted(query, "pflash_query"), 0, self.generation)
        if begin < 0:
            raise QueryError(f"pflash_query {_shown(query)} does not occur in the prompt; needed its exact words")
        return begin, begin + len(wanted)

    def _required(self, text: str, latest: Turn | None) -> Span:
        begin, end = (latest.content_begin, latest.content_end) if latest else (0, 0 if self.turns else len(self.raw))
        at, wanted = self._last(_wanted(text, "pflash_required"), begin, end)
        if at < 0:
            raise QueryError(
                f"pflash_required {_shown(text)} does not occur in the latest user turn; it must be there word for word"
            )
        return self.tokens.covering(at, at + len(wanted))

    def _last(self, wanted: bytes, begin: int, end: int | None) -> tuple[int, bytes]:
        """Where the text occurs last, if need be without blanks at its ends, which templates cut off; or -1."""
        at = self.raw.rfind(wanted, begin, end)
        return (at, wanted) if at >= 0 else (self.raw.rfind(wanted.strip(), begin, end), wanted.strip())

    def _windows(self, rule: str, query: Span, latest: Turn | None) -> list[tuple[int, int, float]]:
        if rule != PROMPT_END or latest is None:
            return []
        begin, end = self._tail(self._content(latest))
        end = min(end, query[0])  # a token that reaches from the user's words to the end of the prompt
        return [(begin, end, 1.0)] if begin < end else []

    def _history(self, users: Sequence[Turn], asked: Turn | None, query: Span) -> list[tuple[int, int, float]]:
        windows = []
        earlier = [turn for turn in users if asked is not None and turn.begin < asked.begin]
        for number, turn in enumerate(reversed(earlier[len(earlier) - self._history_length(earlier) :]), 1):
            if self._blank(turn):
                continue  # its weight is not passed on
            begin, end = self._tail(self._content(turn))
            if end <= query[0]:
                windows.append((begin, end, 0.5**number))
        return windows

    def _history_length(self, earlier: Sequence[Turn]) -> int:
        return min(len(earlier), self.settings.chat_history_queries)

    def _definitions(self) -> list[Span]:
        return [self._whole(number) for number, turn in enumerate(self.turns) if turn.role in _DEFINITIONS]

    def _skeleton(self) -> list[Span]:
        pins = []
        for number, turn in enumerate(self.turns):
            if turn.role in _DEFINITIONS:
                continue
            begin, end = self._span(turn)
            if turn.role in (USER, ASSISTANT) and end - begin <= self.settings.chat_skeleton_tokens:
                pins.append(self._whole(number))
            else:
                pins.append(self._header(turn))
        return pins

    def _rows(self, rule: str, query: Span) -> Span:
        width = self.settings.select_query_tokens if rule == EXPLICIT else MAX_QUERY_TOKENS
        return max(query[0], query[1] - width), query[1]

    def _generation_token(self) -> int:
        return self.tokens.containing(self.generation if self.generation is not None else len(self.raw))

    def _suffix(self, begin: int, end: int) -> Span:
        last = self.tokens.starting_at(end)
        return max(0, min(self.tokens.containing(begin), last - _SHORTEST_SUFFIX)), last

    def _tail(self, content: Span) -> Span:
        return max(content[0], content[1] - self.settings.select_query_tokens), content[1]

    def _content(self, turn: Turn) -> Span:
        return self.tokens.content(*self._content_bytes(turn))

    def _content_bytes(self, turn: Turn) -> Span:
        return _stripped(self.raw, turn.content_begin, turn.content_end)

    def _blank(self, turn: Turn) -> bool:
        begin, end = self._content_bytes(turn)
        return begin >= end

    def _header(self, turn: Turn) -> Span:
        return self.tokens.covering(turn.begin, turn.content_begin)

    def _span(self, turn: Turn) -> Span:
        return self.tokens.covering(turn.begin, turn.end)

    def _whole(self, number: int) -> Span:
        """A turn with the blanks up to the next one, which belong to its rendering."""
        turn = self.turns[number]
        follows = self.turns[number + 1].begin if number + 1 < len(self.turns) else self.generation
        between = self.raw[turn.end : follows]
        blanks = len(between) - len(between.lstrip())
        return self.tokens.covering(turn.begin, turn.end + blanks)


def _stripped(raw: bytes, begin: int, end: int) -> Span:
    """The bytes without blanks at both ends."""
    content = raw[begin:end]
    blanks = len(content) - len(content.lstrip())
    return begin + blanks, begin + max(blanks, len(content.rstrip()))


def _wanted(text: str, what: str) -> bytes:
    if not isinstance(text, str) or not text.strip():
        raise QueryError(f"{what} is {text!r}; needed text that occurs in the prompt")
    return _encoded(text)


def _shown(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")
