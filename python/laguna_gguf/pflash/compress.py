"""PFlash: the part of a long prompt that matters, within an exact budget, found by a small drafter."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from operator import index
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from laguna_gguf.errors import ConfigError, QueryError, SelectionError
from laguna_gguf.paths import path_argument
from laguna_gguf.pflash.budget import check_keep_ratio
from laguna_gguf.pflash.candidates import check_required
from laguna_gguf.pflash.chat import ALWAYS, ChatRequest, Chats
from laguna_gguf.pflash.compressed import Compressed, timings
from laguna_gguf.pflash.keeping import Kept, Prompt, keep, keep_chunks
from laguna_gguf.pflash.llama import utf8
from laguna_gguf.pflash.prefill import DEFAULT_KEEP_RATIO, DEFAULT_THRESHOLD, Prefill, PrefillPolicy
from laguna_gguf.pflash.query import CONTENT_TAIL, EXPLICIT
from laguna_gguf.pflash.scorer import Progress, Scores, Window, check_request
from laguna_gguf.pflash.scorers import Reading, Scorers
from laguna_gguf.pflash.segmentation import Span
from laguna_gguf.pflash.selection import BUDGET_ONLY, INVALID_INPUT
from laguna_gguf.pflash.settings import MAX_SESSIONS, SelectionSettings
from laguna_gguf.pflash.target_tokens import CountTokens, target_family, token_counter
from laguna_gguf.pflash.token_map import TokenMap
from laguna_gguf.pflash.trace import TraceWriter, make_trace

LEGACY_CHUNKS = "legacy_chunks"
"""Selector mode of Qwen3-0.6B without a strict one."""


class PFlash:
    """Compresses prompts for any target with a Qwen3.5 (or Qwen3-0.6B) drafter. Lossy by design.

    Nothing unscored is ever returned: where the drafter fails, the call fails. Calls from several threads wait for one
    another.
    """

    on_progress: Progress | None = None
    """Called with (tokens read, tokens in all) while a prompt is read."""

    def __init__(
        self,
        drafter_path: str | os.PathLike[str],
        *,
        scoring_head: str | os.PathLike[str] | None = None,
        segment_probe: str | os.PathLike[str] | None = None,
        settings: SelectionSettings | None = None,
        sessions: int | None = None,
        target: Any = None,
        **llama_kwargs: Any,
    ) -> None:
        """Load a drafter.

        scoring_head, segment_probe: GGUF files made for this drafter file. settings: None reads the environment
        (PFLASH_...). sessions: prompts whose state is kept, 0..16. None for the first two and for sessions means the
        setting. target: a GGUF path (only its vocabulary is read), a `llama_cpp.Llama` or a callable text -> token
        count; with it the kept text is held to the same share of target tokens.
        llama_kwargs as `llama_cpp.Llama`: n_gpu_layers, n_threads, n_ctx, n_ubatch, flash_attn, ... Without n_ctx
        prompts up to the file's context_length are taken.

        Raises CheckpointError for files that are missing or not sound, TargetMismatchError for a head or probe of
        another drafter, ConfigError for settings.
        """
        self.settings = SelectionSettings.from_env(os.environ) if settings is None else settings
        if not isinstance(self.settings, SelectionSettings):
            raise ConfigError(f"settings are {type(settings).__name__}; needed SelectionSettings or None")
        n_sessions = self.settings.drafter_sessions if sessions is None else sessions
        if isinstance(n_sessions, bool) or not isinstance(n_sessions, int) or not 0 <= n_sessions <= MAX_SESSIONS:
            raise ConfigError(f"sessions is {sessions!r}; needed an integer in 0..{MAX_SESSIONS}")
        self._count: CountTokens | None = None
        self._family: str | None = None
        if target is not None:
            self.bind_target(target)
        self._scorers = Scorers(
            path_argument("drafter_path", drafter_path),
            self.settings,
            head=self.settings.scoring_head_gguf
            if scoring_head is None
            else path_argument("scoring_head", scoring_head),
            probe=self.settings.segment_probe_gguf
            if segment_probe is None
            else path_argument("segment_probe", segment_probe),
            n_sessions=n_sessions,
            llama_kwargs=llama_kwargs,
        )
        self._model = self._scorers.model
        self._traces = None if self.settings.trace_path is None else TraceWriter(self.settings.trace_path)
        self._chats = Chats(self._scorers, self._traces)

    def bind_target(self, target: Any) -> None:
        """Count in this target's tokens from now on, None: in the drafter's; see `target` of the constructor. Raises
        what that raises."""
        if target is None:
            self._count = self._family = None
            return
        count = token_counter(target)
        self._count, self._family = count, target_family(target, count)

    def use_settings(self, settings: SelectionSettings) -> None:
        """Select with these from now on. Scorers, sessions, views and the trace's file stay as they were opened."""
        self.settings = settings

    def close(self) -> None:
        """Free the drafter. Further calls raise DecodeError."""
        self._scorers.close()

    def __enter__(self) -> PFlash:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def tokenize(self, text: str) -> NDArray[np.int32]:
        """Drafter tokens int32 [n]; control tokens such as <|im_start|> are recognised, nothing is added."""
        return self._model.tokenize(text)

    def detokenize(self, ids: Any) -> str:
        """Text of drafter tokens, control tokens written out; bytes that are no whole character become U+FFFD."""
        if len(ids) == 0:
            return ""
        return self._text(self._model.check_ids(ids))

    def count_tokens(self, text: str) -> int:
        """Tokens of a text: of the target where one is given, else of the drafter."""
        return len(self.tokenize(text)) if self._count is None else self._count(text)

    def find(self, ids: Any, text: str) -> Span:
        """Tokens (begin, end) that hold the last occurrence of a text, for `query` and `required`.

        QueryError when it does not occur in what the tokens decode to.
        """
        tokens = self._model.check_ids(ids)
        data, wanted = self._model.detokenize_bytes(tokens), utf8(text)
        at = data.rfind(wanted) if wanted else -1
        if at < 0:
            shown = text if len(text) <= 60 else text[:57] + "..."
            raise QueryError(f"{shown!r} does not occur in the prompt; it must be there word for word")
        return TokenMap(self._model.offsets(tokens), len(data)).covering(at, at + len(wanted))

    def score(
        self,
        ids: Any,
        *,
        query: Sequence[int],
        windows: Iterable[Sequence[Any]] = (),
        session: str | None = None,
        suffix_candidates: bool = False,
    ) -> Scores:
        """Attention mass of token positions as seen from a query.

        ids: drafter tokens [n]. query: (begin, end), 1..512 tokens with at least one before them; its weight is 1.
        windows: further (begin, end, weight) that ask too. Keys are all tokens before the query, with suffix_candidates
        also those behind it; a window never looks at itself. session: name of a session to resume and to keep.

        Raises, before anything runs: ConfigError for ids that are empty, outside the vocabulary or too many, QueryError
        for windows. ScorerError when values are not finite even when the prompt is read a second time; that, like any
        failure of llama.cpp (DecodeError, OutOfMemoryError), empties the session.
        """
        checked = self._model.check_ids(ids)
        return self._read(checked, query, windows, session, suffix_candidates).ranking

    def compress(
        self,
        text_or_ids: Any,
        *,
        keep_ratio: float,
        query: Sequence[int] | None = None,
        required: Iterable[Sequence[int]] = (),
        history: Iterable[Sequence[int]] = (),
        session: str | None = None,
        suffix_candidates: bool = False,
    ) -> Compressed:
        """The part of a prompt that matters to its query.

        keep_ratio: share of what may be dropped, in [0, 1]. query: token span that asks, always kept; None is the last
        PFLASH_SELECT_QUERY_TOKENS tokens. required: at most 64 token spans to keep. history: token spans of earlier
        questions, the most recent first; they ask with weights 1/2, 1/4, ... session, suffix_candidates: see `score`.

        Raises what `score` raises, SelectionError (its stop_reason says more) for bad spans and when what must be kept
        exceeds the budget, BudgetError when the target's tokens cannot be kept within theirs.
        """
        began = perf_counter()
        ratio = check_keep_ratio(keep_ratio)
        self._model.check_vocabulary()
        if isinstance(text_or_ids, str):
            text, ids = text_or_ids, self._model.check_ids(self._model.tokenize(text_or_ids))
        else:
            text, ids = None, self._model.check_ids(text_or_ids)
        n = len(ids)
        rule = CONTENT_TAIL if query is None else EXPLICIT
        windows = _history_windows(history)
        asks = (max(1, n - self.settings.select_query_tokens), n) if query is None else query
        begin, end, _ = check_request(ids, asks, windows, suffix_candidates).windows[0]
        prompt = Prompt(
            ids,
            ratio,
            (begin, end),
            check_required(required, n),
            # the all-layer scorer cannot look behind the query
            suffix_candidates=bool(suffix_candidates) and self._scorers.kind == "head",
        )
        return self._compress(prompt, rule, windows, session=session, text=text, began=began)

    def compress_chat(
        self,
        rendered_prompt: str,
        *,
        keep_ratio: float,
        session: str | None = None,
        pflash_query: str | None = None,
        pflash_required: Sequence[str] = (),
        compression: str = ALWAYS,
        threshold: int = DEFAULT_THRESHOLD,
        target_n_ctx: int | None = None,
        max_tokens: int = 0,
    ) -> Compressed:
        """What the target is to read of a chat that its template has rendered, generation prompt included.

        What asks and what must be kept follows from the turns (docs/pflash.md). Selection is always strict, also with
        Qwen3-0.6B. A conversation that was served before is continued: `text` is then what was served, the new turns,
        and excerpts of what the new question asks about; the other fields are this prompt's own selection.

        pflash_query: text that asks, in place of the derived query; pflash_required: at most 64 texts of the latest
        user turn that are kept. session: see `score`. compression: always; auto, which returns the prompt whole
        (stop_reason below_threshold) when fewer than `threshold` target tokens could be dropped; or off. target_n_ctx:
        the target's context, which the result and max_tokens of output must fit. Counts are target tokens with a
        `target`, else drafter tokens.

        Raises QueryError (no turn that says anything, a text that does not occur), BudgetError (the target's tokens
        cannot be kept within theirs, or what must be kept does not fit the context), and what `compress` raises.
        """
        try:
            required = (pflash_required,) if isinstance(pflash_required, str) else tuple(pflash_required)
        except TypeError as error:
            raise QueryError(f"pflash_required is {pflash_required!r}; needed a list of texts") from error
        request = ChatRequest(
            rendered_prompt,
            keep_ratio,
            self.settings,
            session,
            pflash_query,
            required,
            compression,
            threshold,
            target_n_ctx,
            max_tokens,
        )
        return self._chats.compress(request, self._count, self._family, self.on_progress)

    def prefill(
        self,
        *,
        compression: str = "off",
        threshold: int = DEFAULT_THRESHOLD,
        keep_ratio: float = DEFAULT_KEEP_RATIO,
        curve: Any = None,
        target: Any = None,
    ) -> Prefill:
        """This PFlash under a policy, as sessions and servers use it.

        `target` is taken where PFlash has none yet; curve: see `Curve.parse`. ConfigError names the option.
        """
        policy = PrefillPolicy.checked(compression, threshold, keep_ratio, curve)
        if self._count is None and target is not None:
            self.bind_target(target)
        return Prefill(self, policy)

    def _read(
        self,
        ids: NDArray[np.int32],
        query: Sequence[int],
        windows: Iterable[Sequence[Any]],
        session: str | None,
        suffix_candidates: bool,
    ) -> Reading:
        return self._scorers.read(
            ids,
            query=query,
            windows=windows,
            session=session,
            suffix_candidates=suffix_candidates,
            progress=self.on_progress,
        )

    def _keep(self, prompt: Prompt, windows: list[Any], session: str | None, text: str | None) -> tuple[Reading, Kept]:
        """Read a prompt and select of it. `text`: what the ids were made of, where that is known."""
        if not self._scorers.strict and len(prompt.required):
            raise SelectionError(
                "required spans cannot be kept by the chunk selection of Qwen3-0.6B; set PFLASH_SELECT_MODE",
                INVALID_INPUT,
            )
        reading = self._read(prompt.ids, prompt.query, windows, session, prompt.suffix_candidates)
        if not self._scorers.strict:
            return reading, keep_chunks(prompt, reading)
        if self._count is None:
            return reading, keep(prompt, reading, self.settings, self._scorers.probe)
        count = self._count
        return reading, keep(
            prompt,
            reading,
            self.settings,
            self._scorers.probe,
            n_target_tokens=count(self._text(prompt.ids) if text is None else text),
            count_kept=lambda spans: count(self._text(_joined(prompt.ids, spans))),
        )

    def _compress(
        self,
        prompt: Prompt,
        rule: str,
        windows: list[Window],
        *,
        session: str | None,
        text: str | None,
        began: float,
    ) -> Compressed:
        """Read, select, decode. `text`: what the ids were made of, where that is known."""
        reading, kept = self._keep(prompt, windows, session, text)
        ids = _joined(prompt.ids, kept.spans)
        result_text = self._text(ids)
        trace = self._trace(prompt, reading, kept, ids, rule, windows)
        target_tokens = kept.target_tokens
        if target_tokens is None:
            target_tokens = len(ids) if self._count is None else self._count(result_text)
        selection = kept.selection
        return Compressed(
            ids=ids,
            spans=kept.spans,
            text=result_text,
            budget=kept.budget,
            retained_tokens=selection.retained_tokens,
            stop_reason=selection.stop_reason,
            retained_mass=selection.retained_mass,
            timings=timings(
                began,
                input_tokens=prompt.n_tokens,
                kept_tokens=selection.retained_tokens,
                keep_ratio=prompt.keep_ratio,
                compressed_tokens=target_tokens,
                rule=rule,
                history_queries=len(windows),
                resume=reading.ranking.resume,
                new_tokens=reading.ranking.new_tokens,
                forward_ms=reading.forward_ms,
            ),
            trace=trace,
        )

    def _trace(
        self,
        prompt: Prompt,
        reading: Reading,
        kept: Kept,
        ids: NDArray[np.int32],
        rule: str,
        windows: list[Window],
    ) -> dict[str, Any]:
        """The trace as a dict, also written where a file is set, then with the text and the mass of each token."""
        full: dict[str, Any] = {}
        if self._traces is not None:
            full = {
                "text": self._model.detokenize_bytes(prompt.ids).decode("utf-8", "surrogateescape"),
                "offsets": self._model.offsets(prompt.ids),
                "mass": reading.ranking.mass,
            }
        trace = make_trace(
            ids=prompt.ids,
            keep_ratio=prompt.keep_ratio,
            query=prompt.query,
            required=prompt.required,
            budget=kept.budget,
            candidates=kept.candidates,
            selection=kept.selection,
            compressed_ids=ids,
            mode=(self.settings.select_mode or BUDGET_ONLY) if self._scorers.strict else LEGACY_CHUNKS,
            segmentation="fixed" if kept.chunk_size else "probe",
            chunk_size=kept.chunk_size,
            candidate_score=kept.score,
            scorer=self._scorers.kind,
            query_parser=self.settings.select_query_parser,
            rule=rule,
            **full,
        )
        record = replace(trace, parser=replace(trace.parser, windows=windows)).as_dict()
        if self._traces is not None:
            self._traces.write(record)
        return record

    def _text(self, ids: NDArray[np.int32]) -> str:
        return self._model.detokenize_bytes(ids).decode("utf-8", "replace")


def _history_windows(history: Iterable[Sequence[int]]) -> list[Window]:
    try:
        return [(index(begin), index(end), 0.5**age) for age, (begin, end) in enumerate(history, start=1)]
    except (TypeError, ValueError) as error:
        raise QueryError(f"history is a list of token spans (begin, end): {error}") from error


def _joined(ids: NDArray[np.int32], spans: Sequence[Span]) -> NDArray[np.int32]:
    return np.concatenate([ids[begin:end] for begin, end in spans]) if spans else ids[:0]
