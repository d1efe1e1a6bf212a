"""Views: what was served for a conversation, and how the next prompt of it is served so that the target's prefix cache
is still worth something.

Pure bookkeeping over texts and sizes; the caller plans prompts and compresses them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from laguna_gguf.errors import ConfigError
from laguna_gguf.pflash import recall
from laguna_gguf.pflash.candidates import merge
from laguna_gguf.pflash.families import FAMILIES
from laguna_gguf.pflash.query import QueryPlan
from laguna_gguf.pflash.segmentation import Span
from laguna_gguf.pflash.turns import USER

REPEAT, FRESH, CONTINUE, REBUILD = "repeat", "fresh", "continue", "rebuild"

CONVERSATIONS = 64
_BRANCHES = 4  # prompts of one conversation that can be continued or repeated: retries, edited questions


@dataclass(frozen=True)
class Segment:
    """Tokens [begin, end) of the prompt and how many times more mass they have than under uniform attention."""

    begin: int
    end: int
    lift: float


@dataclass(frozen=True)
class Fresh:
    """A prompt compressed by itself."""

    text: str
    spans: Sequence[Span]
    """Kept tokens of the prompt."""
    segments: Sequence[Segment]
    """All that were ranked, kept or not."""
    detail: Any = None
    """Whatever the caller wants to have again with a repeated prompt."""


@dataclass(frozen=True)
class Served:
    """What the target gets."""

    text: str
    mode: str
    """repeat, fresh, continue or rebuild."""
    turn: int
    """Counts from 1 within a conversation; a repeated prompt does not advance it."""
    served_tokens: int
    fresh_tokens: int
    """Size of the fresh compression."""
    reused_tokens: int
    """Size of the view's prefix, which the target has seen."""
    delta_tokens: int
    """The rest: new turns and recalled excerpts."""
    recalled_tokens: int
    """Size of the recall block, part of the delta."""
    generation_begin: int | None
    """Character of `text` where its generation prompt begins; the next turn's text starts with what is before it."""
    recalled: tuple[str, ...] = ()
    """The excerpts."""
    reason: str = ""
    """Why a view was rebuilt."""
    kept: tuple[Span, ...] = ()
    """Bytes of the prompt that `text` holds at their place."""
    inserted: tuple[tuple[int, str], ...] = ()
    """Recall blocks in `text`, also those of earlier turns, and the byte of the prompt before which they stand."""
    detail: Any = None
    """Of the fresh compression."""

    def view(self) -> dict[str, str | int]:
        """The `view` object of usage.timings.pflash."""
        names = ("mode", "turn", "served_tokens", "fresh_tokens", "reused_tokens", "delta_tokens", "recalled_tokens")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class _Step:
    """One served prompt of a conversation."""

    prompt: bytes
    generation: int
    """Byte of the prompt where its generation prompt begins."""
    head: bytes
    """The prompt up to there and the marker behind it: what prompts begin with that continue it."""
    identity: Hashable
    served: Served
    shown: Sequence[Span]
    """Bytes of the prompt that were served."""

    @property
    def prefix(self) -> str:
        return self.served.text[: self.served.generation_begin]


class ViewStore:
    """The most recently used conversations, found by what their prompts begin with, whatever the session id.

    Not safe for concurrent calls.
    """

    def __init__(self, *, min_lift: float = 2.0, capacity: int = CONVERSATIONS) -> None:
        if capacity < 1 or not min_lift >= 0:
            raise ConfigError(f"capacity is {capacity}, min_lift {min_lift}; needed at least 1 and at least 0")
        self.min_lift = min_lift
        self.capacity = capacity
        # both least recently used first; steps by prompt
        self._conversations: list[OrderedDict[bytes, _Step]] = []

    def __len__(self) -> int:
        return len(self._conversations)

    def clear(self) -> None:
        """Forget everything."""
        self._conversations.clear()

    def serve(
        self,
        prompt: str | bytes,
        plan: QueryPlan,
        offsets: ArrayLike,
        compress: Callable[[], Fresh],
        size: Callable[[str], int],
        *,
        limit: int | None = None,
        identity: Hashable = None,
    ) -> Served:
        """Serve a rendered prompt that was planned with these token `offsets`.

        `compress` yields the fresh compression and is not called for a repeated prompt; when it raises, the store stays
        as it is. `size` counts the tokens of a text, `limit` says how many of them fit. `identity` is whatever else the
        compression depends on, such as an explicit query: only with the same one a prompt is a repeated one.

        A known conversation is continued: its view, the new turns, and before a new question what this asks about and
        the view lacks. When those excerpts take more than a third of the fresh compression, or the whole more than
        twice its size or more than `limit`, the fresh compression is served instead, as it is to a new conversation.
        """
        raw = prompt if isinstance(prompt, bytes) else prompt.encode("utf-8", "surrogateescape")
        conversation, step = self._find(raw, identity)
        if conversation is not None and step is not None and step.prompt == raw:
            self._remember(conversation, step)
            return _repeated(step.served)
        fresh = compress()
        edges = np.asarray(offsets).tolist()
        served: Served | None = None
        shown: list[Span] = []
        reason = ""
        if step is not None:
            served, shown, reason = self._continued(raw, plan, edges, fresh, step, size, limit)
        if served is None:
            turn = step.served.turn + 1 if step is not None else 1
            shown = [(edges[begin], edges[end]) for begin, end in fresh.spans]
            served = _fresh(fresh, raw, plan, size, turn, reason, shown)
        if plan.generation_byte is not None and served.generation_begin is not None:
            head = raw[: plan.generation_byte] + _opening(raw, plan)
            step = _Step(raw, plan.generation_byte, head, identity, served, shown)
            self._remember(conversation if conversation is not None else OrderedDict(), step)
        return served

    def _find(self, raw: bytes, identity: Hashable) -> tuple[OrderedDict[bytes, _Step] | None, _Step | None]:
        """The conversation and the step that the prompt repeats, or else the longest (and latest) it continues."""
        best: tuple[OrderedDict[bytes, _Step] | None, _Step | None] = (None, None)
        longest = -1
        for conversation in self._conversations:
            same = conversation.get(raw)
            if same is not None and same.identity == identity:
                return conversation, same
            for step in conversation.values():
                if len(step.head) >= longest and step.prompt != raw and raw.startswith(step.head):
                    best, longest = (conversation, step), len(step.head)
        return best

    def _remember(self, conversation: OrderedDict[bytes, _Step], step: _Step) -> None:
        conversation[step.prompt] = step
        conversation.move_to_end(step.prompt)
        while len(conversation) > _BRANCHES:
            conversation.popitem(last=False)
        self._conversations = [other for other in self._conversations if other is not conversation]
        self._conversations.append(conversation)
        del self._conversations[: -self.capacity]

    def _continued(
        self,
        raw: bytes,
        plan: QueryPlan,
        edges: Sequence[int],
        fresh: Fresh,
        step: _Step,
        size: Callable[[str], int],
        limit: int | None,
    ) -> tuple[Served | None, list[Span], str]:
        """The continued view and the bytes of the prompt that it shows, or None and why it has to be rebuilt."""
        shown = merge([*recall.clipped(step.shown, step.generation), (step.generation, len(raw))])
        question = next((turn for turn in reversed(plan.turns) if turn.role == USER and not turn.blank), None)
        is_new = question is not None and question.first_byte >= step.generation
        wanted = [(edges[begin], edges[end]) for begin, end in plan.pins]
        lacking = recall.missing(wanted, shown)
        texts: list[str] = []
        at = step.generation
        if question is not None and is_new:
            wanted += [(edges[s.begin], edges[s.end]) for s in fresh.segments if s.lift >= self.min_lift]
            lacking = recall.missing(wanted, shown)
            texts = recall.excerpts(raw, lacking, FAMILIES.get(plan.family or ""))
            at = question.content_byte
        elif lacking:
            return (
                None,
                [],
                "what must be kept is not in the view, and no new question stands where it could be recalled",
            )
        block = recall.block(texts)
        text = step.prefix + _decoded(raw[step.generation : at]) + block + _decoded(raw[at:])
        served_tokens, recalled_tokens, fresh_tokens = size(text), size(block) if block else 0, size(fresh.text)
        reason = _too_much(served_tokens, recalled_tokens, fresh_tokens, limit)
        if reason:
            return None, [], reason
        reused = min(size(step.prefix), served_tokens)
        served = Served(
            text=text,
            mode=CONTINUE,
            turn=step.served.turn + 1,
            served_tokens=served_tokens,
            fresh_tokens=fresh_tokens,
            reused_tokens=reused,
            delta_tokens=served_tokens - reused,
            recalled_tokens=recalled_tokens,
            generation_begin=_generation_begin(text, raw, plan),
            recalled=tuple(texts),
            kept=tuple(merge([*recall.clipped(step.served.kept, step.generation), (step.generation, len(raw))])),
            inserted=step.served.inserted + (((at, block),) if block else ()),
            detail=fresh.detail,
        )
        return served, merge([*shown, *lacking]), ""


def _too_much(served: int, recalled: int, fresh: int, limit: int | None) -> str:
    if 3 * recalled > fresh:
        return f"{recalled} recalled tokens are more than a third of the {fresh} of a fresh compression"
    if served > 2 * fresh:
        return f"{served} tokens are more than twice the {fresh} of a fresh compression"
    if limit is not None and served > limit:
        return f"{served} tokens do not fit in {limit}"
    return ""


def _fresh(
    fresh: Fresh,
    raw: bytes,
    plan: QueryPlan,
    size: Callable[[str], int],
    turn: int,
    reason: str,
    kept: Sequence[Span],
) -> Served:
    tokens = size(fresh.text)
    return Served(
        text=fresh.text,
        mode=REBUILD if reason else FRESH,
        turn=turn,
        served_tokens=tokens,
        fresh_tokens=tokens,
        reused_tokens=0,
        delta_tokens=tokens,
        recalled_tokens=0,
        generation_begin=_generation_begin(fresh.text, raw, plan),
        reason=reason,
        kept=tuple(kept),
        detail=fresh.detail,
    )


def _repeated(served: Served) -> Served:
    return replace(
        served,
        mode=REPEAT,
        reused_tokens=served.served_tokens,
        delta_tokens=0,
        recalled_tokens=0,
        recalled=(),
        reason="",
    )


def _opening(raw: bytes, plan: QueryPlan) -> bytes:
    """The marker of the open assistant turn; empty where the prompt ends with tool output instead."""
    family = FAMILIES.get(plan.family or "")
    match = family.markers.match(raw, plan.generation_byte or 0) if family is not None else None
    return match.group() if match is not None else b""


def _generation_begin(text: str, raw: bytes, plan: QueryPlan) -> int | None:
    """Character of a served text where its generation prompt begins; None when it does not end with one."""
    if plan.generation_byte is None:
        return None
    generation = _decoded(raw[plan.generation_byte :])
    return len(text) - len(generation) if text.endswith(generation) else None


def _decoded(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")
