"""One JSON object for every compression: what was scored, what was kept and why.

The keys up to `parser` are a format that other tools know as well. Those behind it are ours and may be absent:

- `text` and `token_offsets` [input_tokens + 1]: the prompt and the byte at which each token begins. Bytes that are not
  UTF-8 stand in `text` as surrogates (Python's surrogateescape).
- `token_mass` [input_tokens]: mass of each token, six digits.
- `view`: what was served, as in usage.timings.pflash.
"""

from __future__ import annotations

import errno
import json
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from laguna_gguf.errors import ConfigError
from laguna_gguf.pflash.candidates import merge
from laguna_gguf.pflash.query import EXPLICIT, QueryPlan
from laguna_gguf.pflash.segmentation import Span
from laguna_gguf.pflash.selection import Candidate, Selection

SCHEMA_VERSION = 1

_OPTIONAL = ("text", "token_offsets", "token_mass", "view")
_LOGGER = logging.getLogger("laguna_gguf.pflash")


@dataclass(frozen=True)
class ParserRecord:
    """How the query was found; spans are [begin, end) in tokens."""

    input_kind: str
    """chat or text."""
    selection_rule: str
    query_parser: str
    fingerprint: str
    """FNV-1a-64 of the ids as little-endian int32, 16 hexadecimal digits."""
    content_begin: int
    content_end: int
    query_begin: int
    query_end: int
    windows: list[tuple[int, int, float]]


@dataclass(frozen=True)
class Trace:
    """A compression."""

    input_tokens: int
    keep_ratio: float
    input_ids: list[int]
    query_begin: int
    query_end: int
    selector_mode: str
    query_parser: str
    token_budget: int
    retained_tokens: int
    required_instruction_spans: list[Span]
    """What had to be kept besides the query, a caller's spans and pins alike."""
    stop_reason: str
    retained_mass: float
    segmentation: str
    """fixed, or probe."""
    candidate_score: str
    """sum, density or mean."""
    scorer: str
    segments: list[Span]
    """Empty with fixed chunks."""
    chunk_size: int
    """0 with segments."""
    chunk_scores: list[float]
    """One a candidate, in source order."""
    selected_chunks: list[int]
    forced_chunks: list[int]
    """Ordinals of the candidates that had to be kept."""
    compressed_ids: list[int]
    parser: ParserRecord
    schema_version: int = SCHEMA_VERSION
    text: str | None = None
    token_offsets: list[int] | None = None
    token_mass: list[float] | None = None
    view: dict[str, Any] | None = field(default=None)

    def as_dict(self) -> dict[str, Any]:
        """The JSON object; optional keys only where they are known. It shares the lists of this trace: copying those of
        a long prompt takes as long as selecting from it."""
        values = {**vars(self), "parser": dict(vars(self.parser))}
        return {key: value for key, value in values.items() if key not in _OPTIONAL or value is not None}

    @property
    def ranges(self) -> list[Span]:
        """The candidates in source order."""
        if self.segments:
            return [(begin, end) for begin, end in self.segments]
        size, n = self.chunk_size, self.input_tokens
        return [(begin, min(begin + size, n)) for begin in range(0, n, size)]


def make_trace(
    *,
    ids: ArrayLike,
    keep_ratio: float,
    query: Span,
    required: Sequence[Span],
    budget: int,
    candidates: Sequence[Candidate],
    selection: Selection,
    compressed_ids: ArrayLike,
    mode: str,
    segmentation: str,
    chunk_size: int,
    candidate_score: str,
    scorer: str,
    query_parser: str,
    rule: str,
    plan: QueryPlan | None = None,
    text: str | None = None,
    offsets: ArrayLike | None = None,
    mass: ArrayLike | None = None,
    view: dict[str, Any] | None = None,
) -> Trace:
    """The trace of a selection. `chunk_size` is that of fixed chunks, 0 when the candidates are segments; `plan` where
    a chat was planned; `offsets`, `text` and `mass` for reports."""
    tokens = np.asarray(ids).tolist()
    return Trace(
        input_tokens=len(tokens),
        keep_ratio=float(keep_ratio),
        input_ids=tokens,
        query_begin=query[0],
        query_end=query[1],
        selector_mode=mode,
        query_parser=query_parser,
        token_budget=budget,
        retained_tokens=selection.retained_tokens,
        required_instruction_spans=merge(required),
        stop_reason=selection.stop_reason,
        retained_mass=selection.retained_mass,
        segmentation=segmentation,
        candidate_score=candidate_score,
        scorer=scorer,
        segments=[] if chunk_size else [(row.begin, row.end) for row in candidates],
        chunk_size=chunk_size,
        chunk_scores=[row.score for row in candidates],
        selected_chunks=list(selection.ordinals),
        forced_chunks=[row.ordinal for row in candidates if row.mandatory],
        compressed_ids=np.asarray(compressed_ids).tolist(),
        parser=ParserRecord(
            input_kind="chat" if plan is not None and plan.family is not None else "text",
            selection_rule=rule,
            query_parser="pflash_query" if rule == EXPLICIT else query_parser,
            fingerprint=fingerprint(tokens),
            content_begin=plan.content[0] if plan is not None else 0,
            content_end=plan.content[1] if plan is not None else len(tokens),
            query_begin=query[0],
            query_end=query[1],
            windows=list(plan.windows) if plan is not None else [],
        ),
        text=text,
        token_offsets=None if offsets is None else np.asarray(offsets).tolist(),
        token_mass=None if mass is None else [float(f"{value:.6g}") for value in np.asarray(mass).tolist()],
        view=view,
    )


def fingerprint(ids: ArrayLike) -> str:
    """FNV-1a-64 of token ids as little-endian int32: 16 hexadecimal digits."""
    from laguna_gguf import _native  # what only reads traces needs no native half

    return f"{_native.fingerprint(np.ascontiguousarray(ids, dtype=np.int32)):016x}"


class TraceWriter:
    """Appends traces to a JSONL file, one line each."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """ConfigError when the file cannot be opened for appending; it is created where it does not exist."""
        self.path = Path(path)
        try:
            self.path.open("ab").close()
        except OSError as error:
            raise ConfigError(
                f"PFLASH_TRACE_PATH is {str(path)!r}, which cannot be written: {error.strerror}"
            ) from error
        self._failed = False

    def write(self, trace: Trace | dict[str, Any]) -> None:
        """Append one line. A disk that fails later costs the trace, not the request: it is logged, once."""
        values = trace.as_dict() if isinstance(trace, Trace) else trace
        line = json.dumps(values, separators=(",", ":"), allow_nan=False) + "\n"
        try:
            with self.path.open("ab", buffering=0) as file:
                data = line.encode("ascii")
                n_written = file.write(data)  # one write, so that lines of several processes do not mix
                if n_written != len(data):
                    file.truncate(file.tell() - n_written)  # half a line would spoil the next one
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            if not self._failed:
                _LOGGER.warning("trace %s: %s; further traces may be lost", self.path, error.strerror)
            self._failed = True


def read_traces(path: str | os.PathLike[str]) -> Iterator[Trace]:
    """Traces of a JSONL file, one after another. ConfigError names the line that is none."""
    with Path(path).open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield parse_trace(line, f"{path}, line {number}")


def parse_trace(line: bytes, where: str) -> Trace:
    """The trace of one line; `where` names it in the ConfigError for a line that is none."""
    try:
        values = json.loads(line)
        parser = {f.name: values["parser"][f.name] for f in fields(ParserRecord)}
        known = {f.name: values[f.name] for f in fields(Trace) if f.name in values}
        trace = Trace(**{**known, "parser": ParserRecord(**parser)})
        _check(trace)
    except KeyError as error:
        raise ConfigError(f"{where}: not a trace; it has no {error.args[0]}") from error
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"{where}: not a trace; {error}") from error
    return trace


def _check(trace: Trace) -> None:
    """What a report relies on."""
    n = trace.input_tokens
    if trace.schema_version != SCHEMA_VERSION:
        raise ValueError(f"schema_version is {trace.schema_version}; needed {SCHEMA_VERSION}")
    if len(trace.input_ids) != n or (not trace.segments and trace.chunk_size < 1):
        raise ValueError(f"{n} tokens, {len(trace.input_ids)} ids, chunk size {trace.chunk_size}")
    ranges = trace.ranges
    edges = [edge for span in ranges for edge in span]
    if edges != sorted(edges) or (edges and (edges[0] < 0 or edges[-1] > n)) or len(trace.chunk_scores) != len(ranges):
        raise ValueError(f"{len(ranges)} ranges and {len(trace.chunk_scores)} scores do not fit {n} tokens")
    windows = [(begin, end) for begin, end, _ in trace.parser.windows]
    spans = [*trace.required_instruction_spans, *windows, (trace.query_begin, trace.query_end)]
    if any(not 0 <= begin <= end <= n for begin, end in spans):
        raise ValueError(f"a span is outside the {n} tokens")
    ordinals = [*trace.selected_chunks, *trace.forced_chunks]
    if any(not 0 <= ordinal < len(ranges) for ordinal in ordinals):
        raise ValueError(f"an ordinal is outside the {len(ranges)} ranges")
    for name, length in (("token_offsets", n + 1), ("token_mass", n)):
        values = getattr(trace, name)
        if values is not None and len(values) != length:
            raise ValueError(f"{name} has {len(values)} entries; needed {length}")
