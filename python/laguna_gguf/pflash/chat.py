"""Compression of rendered chats: plan, gate, score, select, and serve as part of a conversation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from laguna_gguf.errors import ConfigError
from laguna_gguf.pflash.budget import check_keep_ratio
from laguna_gguf.pflash.candidates import lifts, merge
from laguna_gguf.pflash.chat_budget import ChatBudget, chat_budget
from laguna_gguf.pflash.compressed import BELOW_THRESHOLD, COMPRESSION_OFF, Compressed, timings
from laguna_gguf.pflash.conversation import Fresh, Segment, ViewStore
from laguna_gguf.pflash.exclusive import Exclusive
from laguna_gguf.pflash.keeping import CountKept, Kept, Prompt, chunk_size, keep
from laguna_gguf.pflash.prefill import COMPRESSION, DEFAULT_THRESHOLD
from laguna_gguf.pflash.query import EXPLICIT, QueryPlan, plan
from laguna_gguf.pflash.scorer import Progress, Scores, Window
from laguna_gguf.pflash.scorers import Reading, Scorers
from laguna_gguf.pflash.segmentation import Span
from laguna_gguf.pflash.selection import BUDGET_ONLY, CANDIDATES_EXHAUSTED, Candidate, Selection
from laguna_gguf.pflash.settings import SelectionSettings
from laguna_gguf.pflash.target_tokens import CountTokens
from laguna_gguf.pflash.trace import TraceWriter, make_trace

OFF, AUTO, ALWAYS = COMPRESSION

CLOSING_TOKENS = 8
"""Longest end of a turn: its marker and blanks."""


@dataclass(frozen=True)
class ChatRequest:
    """What `PFlash.compress_chat` was asked for, checked."""

    prompt: str
    keep_ratio: float
    settings: SelectionSettings
    session: str | None = None
    query: str | None = None
    required: tuple[str, ...] = ()
    compression: str = ALWAYS
    threshold: int = DEFAULT_THRESHOLD
    n_ctx: int | None = None
    max_tokens: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.prompt, str):
            raise ConfigError(f"the rendered prompt is {type(self.prompt).__name__}; needed text")
        if self.compression not in COMPRESSION:
            raise ConfigError(f"compression is {self.compression!r}; needed one of {', '.join(COMPRESSION)}")
        for name, value, least in (
            ("threshold", self.threshold, 0),
            ("target_n_ctx", 1 if self.n_ctx is None else self.n_ctx, 1),
            ("max_tokens", self.max_tokens, -1),
        ):
            if isinstance(value, bool) or not hasattr(value, "__index__") or int(value) < least:
                raise ConfigError(f"{name} is {value!r}; needed an integer >= {least}")
        if self.session is not None and not isinstance(self.session, str):
            raise ConfigError(f"session is {self.session!r}; needed a string or None")
        object.__setattr__(self, "keep_ratio", check_keep_ratio(self.keep_ratio))

    @property
    def room(self) -> int | None:
        """Target tokens that the prompt may take."""
        return None if self.n_ctx is None else self.n_ctx - max(0, self.max_tokens)

    @property
    def identity(self) -> tuple[Any, ...]:
        """What, besides the prompt, decides what is served."""
        return self.query, self.required, self.keep_ratio, self.room, self.settings


@dataclass(frozen=True)
class _Chat:
    """A planned chat."""

    ids: NDArray[np.int32]
    raw: bytes
    """What the ids spell."""
    offsets: NDArray[np.int32]
    plan: QueryPlan
    windows: list[Window]
    n_target_tokens: int

    @property
    def n_tokens(self) -> int:
        return len(self.ids)

    @property
    def text(self) -> str:
        return self.raw.decode("utf-8", "replace")

    @property
    def rows(self) -> Span:
        """Tokens that ask. They must have something before them, so a text that is all question gives up its first."""
        begin, end = self.plan.rows
        if begin == 0 and end > 1 and self.plan.rule != EXPLICIT:
            return 1, end
        return begin, end


class Chats:
    """Chats compressed with one drafter, and the views that were served of them. Calls wait for one another."""

    def __init__(self, scorers: Scorers, traces: TraceWriter | None) -> None:
        self._scorers = scorers
        self._model = scorers.model
        self._traces = traces
        self._views = ViewStore()
        self._lock = Exclusive()

    def compress(
        self, request: ChatRequest, count: CountTokens | None, family: str | None, progress: Progress | None
    ) -> Compressed:
        """See `PFlash.compress_chat`. `count`: tokens of the target, None for those of the drafter. `family`: of the
        target's templates, None to tell by the text."""
        began = perf_counter()
        with self._lock:
            chat = self._plan(request, count, family)
            size = chunk_size(chat.n_tokens, request.settings)
            budget = self._budget(chat, size, request.keep_ratio)
            if request.compression == OFF:
                return self._whole(chat, request, COMPRESSION_OFF, began)
            if request.compression == AUTO and budget.droppable_target_tokens < request.threshold:
                return self._whole(chat, request, BELOW_THRESHOLD, began)
            if chat.n_tokens == 1:
                return self._whole(chat, request, CANDIDATES_EXHAUSTED, began)  # nothing to read, nothing to drop
            if request.n_ctx is not None:
                budget = self._budget(chat, size, request.keep_ratio, request, count)
            return self._serve(chat, request, budget, count, progress, began)

    def _plan(self, request: ChatRequest, count: CountTokens | None, family: str | None) -> _Chat:
        self._model.check_vocabulary()
        ids = self._model.check_ids(self._model.tokenize(request.prompt))
        raw, offsets = self._model.detokenize_bytes(ids), self._model.offsets(ids)
        planned = plan(
            raw,
            offsets,
            family=family or "auto",
            settings=request.settings,
            pflash_query=request.query,
            pflash_required=request.required,
        )
        if len(planned.windows) > planned.history_queries:
            # the end of the question: few would forgive its loss, and it gets no mass from its own window
            begin, end, _ = planned.windows[0]
            if planned.generation_begin is not None and 0 < planned.generation_begin - end <= CLOSING_TOKENS:
                end = planned.generation_begin  # with the marker that ends its turn
            planned = replace(planned, pins=merge([*planned.pins, (begin, end)]))
        windows = [window for window in planned.windows if window[0] > 0 or window[1] < planned.rows[0]]
        chat = _Chat(ids, raw, offsets, planned, windows, len(ids))
        return chat if count is None else replace(chat, n_target_tokens=count(chat.text))

    def _serve(
        self,
        chat: _Chat,
        request: ChatRequest,
        budget: ChatBudget,
        count: CountTokens | None,
        progress: Progress | None,
        began: float,
    ) -> Compressed:
        reading: Reading | None = None

        def fresh() -> Fresh:
            nonlocal reading
            reading = self._scorers.read(
                chat.ids,
                query=chat.rows,
                windows=chat.windows,
                session=request.session,
                suffix_candidates=self._suffix_candidates(chat),
                progress=progress,
            )
            kept = self._keep(chat, request, budget, reading, count)
            return Fresh(
                self._text(_joined(chat.ids, kept.spans)), kept.spans, _segments(reading.ranking, kept.candidates), kept
            )

        view: dict[str, Any] | None = None
        inserted: Sequence[tuple[int, str]] = ()
        if not request.settings.chat_view:
            own = fresh()
            text, kept = own.text, own.detail
            bytes_kept = [(int(chat.offsets[begin]), int(chat.offsets[end])) for begin, end in kept.spans]
            tokens = kept.target_tokens or self._size(text, count)
        else:
            self._views.min_lift = request.settings.chat_recall_min_lift
            served = self._views.serve(
                chat.raw,
                chat.plan,
                chat.offsets,
                fresh,
                lambda text: self._size(text, count),
                limit=request.room,
                identity=request.identity,
            )
            text, kept, view, tokens = served.text, served.detail, served.view(), served.served_tokens
            bytes_kept, inserted = list(served.kept), served.inserted
        trace = self._trace(chat, request, budget, kept, reading, view)
        ranking = reading.ranking if reading is not None else None
        return Compressed(
            ids=_joined(chat.ids, kept.spans),
            spans=list(kept.spans),
            text=text,
            budget=kept.budget,
            retained_tokens=kept.selection.retained_tokens,
            stop_reason=kept.selection.stop_reason,
            retained_mass=kept.selection.retained_mass,
            timings=timings(
                began,
                input_tokens=chat.n_tokens,
                kept_tokens=kept.selection.retained_tokens,
                keep_ratio=request.keep_ratio,
                compressed_tokens=tokens,
                rule=chat.plan.rule,
                history_queries=chat.plan.history_queries,
                resume=chat.n_tokens if ranking is None else ranking.resume,  # a repeated prompt is not read again
                new_tokens=0 if ranking is None else ranking.new_tokens,
                forward_ms=0.0 if reading is None else reading.forward_ms,
                view=view,
            ),
            trace=trace,
            byte_spans=bytes_kept if _spells(chat.raw, request.prompt) else None,
            inserted=inserted,
            ceiling=budget.budget.ceiling(chat.n_target_tokens),
        )

    def _budget(
        self,
        chat: _Chat,
        size: int,
        keep_ratio: float,
        request: ChatRequest | None = None,
        count: CountTokens | None = None,
    ) -> ChatBudget:
        """With a request also held to the target's context."""
        return chat_budget(
            chat.plan,
            chat.n_tokens,
            size,
            keep_ratio,
            n_target_tokens=chat.n_target_tokens,
            target_n_ctx=None if request is None else request.n_ctx,
            max_tokens=0 if request is None else request.max_tokens,
            count_kept=None if count is None else self._kept_counter(chat, count),
        )

    def _kept_counter(self, chat: _Chat, count: CountTokens) -> CountKept:
        return lambda spans: count(self._text(_joined(chat.ids, spans)))

    def _keep(
        self, chat: _Chat, request: ChatRequest, budget: ChatBudget, reading: Reading, count: CountTokens | None
    ) -> Kept:
        prompt = Prompt(
            chat.ids,
            request.keep_ratio,
            chat.plan.query,
            budget.required,
            self._suffix_candidates(chat),
            budget.budget,
        )
        if count is None:
            return keep(prompt, reading, request.settings, self._scorers.probe)
        return keep(
            prompt,
            reading,
            request.settings,
            self._scorers.probe,
            n_target_tokens=chat.n_target_tokens,
            count_kept=self._kept_counter(chat, count),
        )

    def _suffix_candidates(self, chat: _Chat) -> bool:
        return chat.plan.suffix_candidates and self._scorers.kind == "head"

    def _whole(self, chat: _Chat, request: ChatRequest, reason: str, began: float) -> Compressed:
        """The prompt as it is; nothing was read."""
        n = chat.n_tokens
        everything = Kept(
            [(0, n)],
            n,
            Selection([0], n, 1.0, reason),
            [Candidate(0, 0, n, 0.0, True)],
            n,
            "sum",
        )
        trace = self._trace(chat, request, None, everything, None, None)
        return Compressed(
            ids=chat.ids,
            spans=[(0, n)],
            text=request.prompt,
            budget=n,
            retained_tokens=n,
            stop_reason=reason,
            retained_mass=1.0,
            timings=timings(
                began,
                input_tokens=n,
                kept_tokens=n,
                keep_ratio=request.keep_ratio,
                compressed_tokens=chat.n_target_tokens,
                rule=chat.plan.rule,
                history_queries=chat.plan.history_queries,
                resume=0,
                new_tokens=0,
                forward_ms=0.0,
            ),
            trace=trace,
            byte_spans=[(0, len(chat.raw))] if _spells(chat.raw, request.prompt) else None,
        )

    def _trace(
        self,
        chat: _Chat,
        request: ChatRequest,
        budget: ChatBudget | None,
        kept: Kept,
        reading: Reading | None,
        view: dict[str, Any] | None,
    ) -> dict[str, Any]:
        """The trace as a dict; of a prompt that was read now also a line of the file, with text and masses."""
        full: dict[str, Any] = {}
        if self._traces is not None and reading is not None:
            full = {
                "text": chat.raw.decode("utf-8", "surrogateescape"),
                "offsets": chat.offsets,
                "mass": reading.ranking.mass,
            }
        trace = make_trace(
            ids=chat.ids,
            keep_ratio=request.keep_ratio,
            query=chat.plan.query,
            required=[] if budget is None else budget.required,
            budget=kept.budget,
            candidates=kept.candidates,
            selection=kept.selection,
            compressed_ids=_joined(chat.ids, kept.spans),
            mode=request.settings.select_mode or BUDGET_ONLY,
            segmentation="fixed" if kept.chunk_size else "probe",
            chunk_size=kept.chunk_size,
            candidate_score=kept.score,
            scorer=self._scorers.kind if budget is not None else "none",
            query_parser=request.settings.select_query_parser,
            rule=chat.plan.rule,
            plan=chat.plan,
            view=view,
            **full,
        )
        if trace.ranges != [(row.begin, row.end) for row in kept.candidates]:  # chunks that were cut
            trace = replace(trace, segments=[(row.begin, row.end) for row in kept.candidates])
        if full and self._traces is not None:
            self._traces.write(trace)
        return trace.as_dict()

    def _size(self, text: str, count: CountTokens | None) -> int:
        return len(self._model.tokenize(text)) if count is None else count(text)

    def _text(self, ids: NDArray[np.int32]) -> str:
        return self._model.detokenize_bytes(ids).decode("utf-8", "replace")


def _segments(scores: Scores, candidates: Sequence[Candidate]) -> list[Segment]:
    spans = [(row.begin, row.end) for row in candidates]
    total = float(scores.mass.sum())
    mass = scores.mass / total if scores.is_importance and total > 0 else scores.mass
    return [Segment(begin, end, lift) for (begin, end), lift in zip(spans, lifts(mass, spans).tolist(), strict=True)]


def _spells(raw: bytes, prompt: str) -> bool:
    return raw == prompt.encode("utf-8", "surrogateescape")


def _joined(ids: NDArray[np.int32], spans: Sequence[Span]) -> NDArray[np.int32]:
    return np.concatenate([ids[begin:end] for begin, end in spans]) if spans else ids[:0]
