"""The strict scorer: attention mass of query windows over a prompt, from the drafter's tap, with scoring sessions."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import index
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from laguna_gguf import _native
from laguna_gguf.errors import ConfigError, QueryError, ScorerError
from laguna_gguf.pflash.exclusive import Exclusive
from laguna_gguf.pflash.head import load_head
from laguna_gguf.pflash.probe import load_probe
from laguna_gguf.pflash.sessions import CHECKPOINT_DISTANCE, QueryRows, Session, SessionCache, Span
from laguna_gguf.pflash.trunk import Trunk

MAX_QUERY_TOKENS = 512

Window = tuple[int, int, float]
"""begin, end, weight"""

Progress = Callable[[int, int], None]
"""Called with (tokens done, tokens in all) while a prompt is read."""


@dataclass(frozen=True)
class Scores:
    """Scores of a prompt of n tokens."""

    mass: NDArray[np.float64]
    """[n]: weighted mean over the windows of their attention; sums to 1, 0 for tokens that are no candidates. With the
    all-layer scorers an importance that does not sum to 1."""
    probe: NDArray[np.float32] | None
    """[n]: how likely a unit of text starts at each token; None without a segment probe."""
    subunit: NDArray[np.float32] | None
    """[n]: the same for parts of units."""
    resume: int
    """Tokens that a session had already run."""
    new_tokens: int
    """Tokens that were run; resume + new_tokens == n."""
    forward_ms: float
    """Time in the drafter's blocks."""
    is_importance: bool = False
    """Whether `mass` is the importance of the all-layer scorer."""


@dataclass(frozen=True)
class Request:
    """A checked request: windows[0] is the query, with weight 1."""

    ids: NDArray[np.int32]
    windows: tuple[Window, ...]
    suffix_candidates: bool

    def allowed(self, window: Window) -> list[Span]:
        """Keys that a window sees: all before the query, with suffix candidates also all behind it; not itself."""
        begin, end, _ = self.windows[0]
        spans = [(0, begin)] + ([(end, len(self.ids))] if self.suffix_candidates else [])
        own = window[:2]
        cut = [part for first, last in spans for part in ((first, min(last, own[0])), (max(first, own[1]), last))]
        return [(first, last) for first, last in cut if first < last]


def check_request(
    ids: NDArray[np.int32], query: Sequence[int], windows: Iterable[Sequence[Any]], suffix_candidates: bool
) -> Request:
    """QueryError for windows that cannot ask: out of range, not 1..512 tokens wide, nothing to look at, no weight."""
    n = len(ids)
    begin, end = _span(query, n, "the query")
    if begin == 0:
        raise QueryError("the query begins with the prompt; needed at least one token before it")
    checked: list[Window] = [(begin, end, 1.0)]
    try:
        given = list(windows)
    except TypeError as error:
        raise QueryError(f"windows are {windows!r}; needed a list of (begin, end, weight)") from error
    for window in given:
        try:
            first, last, weight = window
            number = float(weight)
        except (TypeError, ValueError) as error:
            raise QueryError(f"a window is {window!r}; needed (begin, end, weight)") from error
        if not math.isfinite(number) or number <= 0:
            raise QueryError(f"a window's weight is {weight!r}; needed a finite number > 0")
        checked.append((*_span((first, last), n, "a window"), number))
    request = Request(ids, tuple(checked), bool(suffix_candidates))
    for window in checked:
        if not request.allowed(window):
            raise QueryError(f"the window [{window[0]}, {window[1]}) has no token to look at but its own")
    return request


def _span(span: Sequence[int], n: int, what: str) -> Span:
    try:
        begin, end = (index(edge) for edge in span)
    except (TypeError, ValueError) as error:
        raise QueryError(f"{what} is {span!r}; needed a pair of token positions") from error
    if not 0 <= begin < end <= n or end - begin > MAX_QUERY_TOKENS:
        raise QueryError(
            f"{what} is [{begin}, {end}) of {n} tokens; needed 1 to {MAX_QUERY_TOKENS} tokens inside the prompt"
        )
    return begin, end


class Scorer:
    """Scores prompts with the drafter's scoring block (its own rows, or a head's) and keeps sessions.

    Not for several threads at once: calls wait for one another.
    """

    def __init__(
        self,
        trunk: Trunk,
        *,
        head: str | os.PathLike[str] | None = None,
        probe: str | os.PathLike[str] | None = None,
    ) -> None:
        """trunk: its first sequence is the scorer's own, each of the others holds a session.

        CheckpointError for files that are not sound, TargetMismatchError for a head or probe of another drafter.
        """
        file = trunk.file
        weights = file.scoring_weights() if head is None else load_head(head, file)
        self.probe = None if probe is None else load_probe(probe, file)
        self.trunk = trunk
        config = {
            "n_embd": file.n_embd,
            "n_head": file.n_head,
            "n_head_kv": file.n_head_kv,
            "head_dim": file.head_dim,
            "norm_eps": file.norm_eps,
        }
        fields = None if self.probe is None else self.probe.native_fields()
        threads = trunk.model.options.threads
        self._native = _native.Block15Scorer(config, vars(weights), fields, threads, trunk.model.device)
        self._scratch = self._session(0)
        self._sessions = SessionCache(range(1, trunk.context.n_sequences), self._session)
        self._lock = Exclusive()

    def close(self) -> None:
        """Free the trunk's context, when a call of another thread is done."""
        with self._lock:
            self.trunk.context.close()

    def _session(self, sequence: int) -> Session:
        return Session(sequence, self._native.new_store())

    @property
    def bytes_per_token(self) -> int:
        """Memory that a session takes for a token, beside llama.cpp's own cache: key, probe values, id."""
        file = self.trunk.file
        n_probe = 0 if self.probe is None else 1 if self.probe.subunit is None else 2
        return 4 * (file.n_head_kv * file.head_dim + n_probe + 1)

    def score(
        self,
        ids: NDArray[np.int32],
        *,
        query: Sequence[int],
        windows: Iterable[Sequence[Any]] = (),
        session: str | None = None,
        suffix_candidates: bool = False,
        run_probe: bool = True,
        progress: Progress | None = None,
    ) -> Scores:
        """Scores of checked token ids. See `PFlash.score`."""
        request = check_request(ids, query, windows, suffix_candidates)
        if session is not None and not isinstance(session, str):
            raise ConfigError(f"session is {session!r}; needed a string or None")
        with self._lock:
            self.trunk.context.check_length(len(ids))
            kept = session is not None and self._sessions.capacity > 0
            slot = self._sessions.get(session, self.trunk.context) if kept and session is not None else self._scratch
            self._make_room(len(ids), slot)
            done = False
            try:
                scores = self._score(slot, request, run_probe, progress, kept)
                done = True
            finally:
                if not done or not kept:
                    slot.empty(self.trunk.context)
            return scores

    def _make_room(self, n_tokens: int, slot: Session) -> None:
        context = self.trunk.context
        context.reserve(n_tokens, slot.sequence)
        for other in self._sessions.values():
            if context.positions[other.sequence] != len(other.ids):  # lost when the context grew
                other.empty(context)

    def _score(self, slot: Session, request: Request, run_probe: bool, progress: Progress | None, kept: bool) -> Scores:
        try:
            return self._attempt(slot, request, run_probe, progress, kept)
        except ScorerError:
            slot.empty(self.trunk.context)  # once more, from scratch
        return self._attempt(slot, request, run_probe, progress, kept)

    def _attempt(
        self, slot: Session, request: Request, run_probe: bool, progress: Progress | None, kept: bool
    ) -> Scores:
        context, n = self.trunk.context, len(request.ids)
        spans = [window[:2] for window in request.windows]
        resume = slot.resume_point(request.ids, spans)
        found = [slot.find_rows(begin, min(end, resume)) if begin < resume else None for begin, end in spans]
        slot.rewind(context, resume)
        rows = self._empty_rows(spans, found)

        def take(capture: _native.HiddenCapture, start: int, length: int) -> None:
            self._native.append_captured(capture, slot.store)
            taps: NDArray[np.float32] | None = None
            for window in rows:
                first, last = max(window.begin, start), min(window.end, start + length)
                if first < last:
                    taps = capture.rows()[:, 0] if taps is None else taps
                    window.taps[first - window.begin : last - window.begin] = taps[first - start : last - start]
            if progress is not None:
                progress(start + length, n)

        began = perf_counter()
        tokens = request.ids[resume:]
        before = max(0, len(tokens) - CHECKPOINT_DISTANCE) if kept else 0
        self.trunk.run(slot.sequence, tokens[:before], take)
        if kept and len(tokens):
            slot.save_checkpoint(context)
        self.trunk.run(slot.sequence, tokens[before:], take)
        forward_ms = (perf_counter() - began) * 1e3
        slot.ids = request.ids.copy()
        slot.remember(rows)

        parts = [(window.taps, request.allowed(asked)) for window, asked in zip(rows, request.windows, strict=True)]
        masses = self._native.mass(slot.store, parts)
        weights = np.array([weight for _, _, weight in request.windows])
        weights /= weights.max()  # so that no sum of large ones overflows
        unit, subunit = None, None
        if self.probe is not None and run_probe:
            unit, subunit = self.probe.scores(slot.store.probe())
        return Scores(weights @ masses / weights.sum(), unit, subunit, resume, len(tokens), forward_ms)

    def _empty_rows(self, spans: list[Span], found: list[NDArray[np.float32] | None]) -> list[QueryRows]:
        """Rows of the windows, with those filled in that a session had."""
        rows = []
        for (begin, end), stored in zip(spans, found, strict=True):
            taps = np.empty((end - begin, self.trunk.file.n_embd), dtype=np.float32)
            if stored is not None:
                taps[: len(stored)] = stored
            rows.append(QueryRows(begin, end, taps))
        return rows
