"""Requests made of a client's arguments, and replies made into what PFlash returns."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from operator import index
from typing import Any

import numpy as np

from laguna_gguf.daemon.protocol import MAX_SECONDS, Compress, CompressChat, Result, Span, StatsReply
from laguna_gguf.errors import ConfigError, ProtocolError, QueryError
from laguna_gguf.pflash.compressed import Compressed


def compress_request(
    text_or_ids: Any,
    *,
    keep_ratio: float,
    query: Sequence[int] | None,
    required: Iterable[Sequence[int]],
    history: Iterable[Sequence[int]],
    session: str | None,
    suffix_candidates: bool,
    settings: dict[str, Any] | None,
    timeout: float | None,
    trace: bool,
) -> Compress:
    """A request; its id is set when it is sent. Raises as PFlash for what cannot travel."""
    text = text_or_ids if isinstance(text_or_ids, str) else None
    return Compress(
        id=0,
        keep_ratio=_number(keep_ratio, "keep_ratio"),
        text=text,
        ids=_ids(text_or_ids) if text is None else None,
        query=None if query is None else _span(query),
        required=_spans(required, "required"),
        history=_spans(history, "history"),
        session=_name(session),
        suffix_candidates=bool(suffix_candidates),
        settings=settings,
        seconds=None if timeout is None else _seconds(timeout),
        trace=trace,
    )


def chat_request(
    rendered_prompt: str,
    *,
    keep_ratio: float,
    session: str | None,
    pflash_query: str | None,
    pflash_required: Sequence[str],
    compression: str,
    threshold: int,
    target_n_ctx: int | None,
    max_tokens: int,
    settings: dict[str, Any] | None,
    timeout: float | None,
    trace: bool,
) -> CompressChat:
    """As `compress_request`."""
    if not isinstance(rendered_prompt, str):
        raise QueryError(f"the prompt is {type(rendered_prompt).__name__}; needed the rendered text")
    required = [pflash_required] if isinstance(pflash_required, str) else list(pflash_required or ())
    if not all(isinstance(text, str) for text in [*required, "" if pflash_query is None else pflash_query]):
        raise QueryError("pflash_query and pflash_required are texts that occur in the prompt")
    if not isinstance(compression, str):
        raise ConfigError(f"compression is {compression!r}; needed off, auto or always")
    return CompressChat(
        id=0,
        rendered_prompt=rendered_prompt,
        keep_ratio=_number(keep_ratio, "keep_ratio"),
        session=_name(session),
        pflash_query=pflash_query,
        pflash_required=required,
        compression=compression,
        threshold=_integer(threshold, "threshold"),
        target_n_ctx=None if target_n_ctx is None else _integer(target_n_ctx, "target_n_ctx"),
        max_tokens=_integer(max_tokens, "max_tokens"),
        settings=settings,
        seconds=None if timeout is None else _seconds(timeout),
        trace=trace,
    )


def compressed(result: Result | StatsReply) -> Compressed:
    """What PFlash would have returned; `trace` is empty unless it was asked for. ProtocolError for another reply."""
    if not isinstance(result, Result):
        raise ProtocolError("the daemon's reply is of another kind")
    return Compressed(
        ids=np.frombuffer(result.ids, "<i4").astype(np.int32),
        spans=_pairs(result.spans),
        text=result.text,
        budget=result.budget,
        retained_tokens=result.retained_tokens,
        stop_reason=result.stop_reason,
        retained_mass=result.retained_mass,
        timings=result.timings,
        trace=json.loads(result.trace) if result.trace else {},
        byte_spans=None if result.byte_spans is None else _pairs(result.byte_spans),
        inserted=[(place, text) for place, text in result.inserted],
        ceiling=result.ceiling,
    )


def stats(reply: Result | StatsReply) -> dict[str, Any]:
    """The daemon's counters and state. ProtocolError for another reply."""
    if not isinstance(reply, StatsReply):
        raise ProtocolError("the daemon's reply is of another kind")
    return reply.stats


def _pairs(data: bytes) -> list[Span]:
    return [(begin, end) for begin, end in np.frombuffer(data, "<i4").reshape(-1, 2).tolist()]


def _ids(values: Any) -> bytes:
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise ConfigError(f"token ids are not a row of integers: {error}") from error
    if array.ndim != 1 or (array.size and not np.issubdtype(array.dtype, np.integer)):
        raise ConfigError(f"token ids have the shape {array.shape} and type {array.dtype}; needed integers [n]")
    small = np.iinfo(np.int32)
    if array.size and not small.min <= int(array.min()) <= int(array.max()) <= small.max:
        raise ConfigError("a token id is outside int32")
    return array.astype("<i4").tobytes()


def _span(span: Sequence[int]) -> Span:
    try:
        begin, end = (index(edge) for edge in span)
    except (TypeError, ValueError) as error:
        raise QueryError(f"a span is {span!r}; needed a pair of token positions") from error
    return begin, end


def _spans(spans: Iterable[Sequence[int]], name: str) -> list[Span]:
    try:
        return [_span(span) for span in spans]
    except TypeError as error:
        raise QueryError(f"{name} is {spans!r:.80}; needed pairs of token positions") from error


def _name(session: str | None) -> str | None:
    if session is not None and not isinstance(session, str):
        raise ConfigError(f"session is {session!r}; needed a string or None")
    return session


def _seconds(timeout: Any) -> float:
    seconds = _number(timeout, "timeout")
    if not 0 < seconds <= MAX_SECONDS:
        raise ConfigError(f"timeout is {seconds} s; needed more than 0 and at most {MAX_SECONDS:g}")
    return seconds


def _number(value: Any, name: str) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"{name} is {value!r:.80}; needed a number") from error


def _integer(value: Any, name: str) -> int:
    try:
        return index(value)
    except TypeError as error:
        raise ConfigError(f"{name} is {value!r}; needed an integer") from error
