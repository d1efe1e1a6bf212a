"""Scoring sessions: what is kept of a prompt so that the next one with the same beginning costs only its new tokens."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from laguna_gguf import _native
from laguna_gguf.pflash.llama import LlamaContext

Span = tuple[int, int]

CHECKPOINT_DISTANCE = 64
"""Tokens before the end at which the recurrent state is saved."""

MAX_WINDOWS = 8
"""Query windows whose tap rows a session keeps."""


@dataclass
class QueryRows:
    """Tap rows of one query window."""

    begin: int
    end: int
    taps: NDArray[np.float32]
    """[end - begin, n_embd]"""


@dataclass
class Session:
    """One prompt: its tokens, what the scorer keeps of them, and where its llama.cpp sequence can go back to."""

    sequence: int
    store: _native.TokenStore
    ids: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    rows: list[QueryRows] = field(default_factory=list)
    """The most recent first."""
    checkpoint: int = 0
    state: bytes | None = None
    """Recurrent state at the checkpoint."""

    def shared_prefix(self, ids: NDArray[np.int32]) -> int:
        """Leading tokens in common."""
        n = min(len(self.ids), len(ids))
        differs = np.flatnonzero(self.ids[:n] != ids[:n])
        return int(differs[0]) if len(differs) else n

    def resume_point(self, ids: NDArray[np.int32], windows: Iterable[Span]) -> int:
        """Tokens that need not be run again: all of the session's, else those before its checkpoint, else none.

        The rows of every window that lie before the point must be there.
        """
        shared = self.shared_prefix(ids)
        spans = list(windows)
        points = [len(self.ids)] if shared == len(self.ids) else []
        points += [self.checkpoint] if self.checkpoint <= shared else []
        for point in points:
            if all(self.find_rows(begin, min(end, point)) is not None for begin, end in spans if begin < point):
                return point
        return 0

    def find_rows(self, begin: int, end: int) -> NDArray[np.float32] | None:
        """Stored tap rows [end - begin, n_embd] of these tokens."""
        for rows in self.rows:
            if rows.begin <= begin and end <= rows.end:
                return rows.taps[begin - rows.begin : end - rows.begin]
        return None

    def rewind(self, context: LlamaContext, position: int) -> None:
        """Take the sequence, and all that is kept of its tokens, back to a resume point."""
        if position != context.positions[self.sequence]:
            context.restore(self.sequence, position, self.state if position == self.checkpoint else None)
        self.store.truncate(position)
        self.ids = self.ids[:position]
        self.rows = [rows for rows in self.rows if rows.end <= position]
        if self.checkpoint > position:
            self.checkpoint, self.state = 0, None

    def save_checkpoint(self, context: LlamaContext) -> None:
        """Make the present position one to come back to."""
        self.checkpoint = context.positions[self.sequence]
        self.state = context.save(self.sequence)

    def remember(self, rows: Iterable[QueryRows]) -> None:
        """Put these windows first and forget the oldest beyond MAX_WINDOWS."""
        new = list(rows)
        spans = {(rows.begin, rows.end) for rows in new}
        self.rows = (new + [rows for rows in self.rows if (rows.begin, rows.end) not in spans])[:MAX_WINDOWS]

    def empty(self, context: LlamaContext) -> None:
        """Forget everything."""
        context.clear(self.sequence)
        self.store.truncate(0)
        self.ids, self.rows = np.zeros(0, np.int32), []
        self.checkpoint, self.state = 0, None

    @property
    def n_bytes(self) -> int:
        """Memory of the session outside llama.cpp."""
        rows = sum(rows.taps.nbytes for rows in self.rows)
        return self.store.n_bytes + rows + self.ids.nbytes + len(self.state or b"")


class SessionCache:
    """Sessions by name, the least recently used of which makes room for another one."""

    def __init__(self, sequences: Sequence[int], new: Callable[[int], Session]) -> None:
        self._free = list(reversed(sequences))
        self._new = new
        self._sessions: OrderedDict[str, Session] = OrderedDict()

    @property
    def capacity(self) -> int:
        return len(self._free) + len(self._sessions)

    def get(self, name: str, context: LlamaContext) -> Session:
        """The session of this name, emptied when it is a new one."""
        session = self._sessions.get(name)
        if session is None:
            if self._free:
                session = self._new(self._free.pop())
            else:
                _, session = self._sessions.popitem(last=False)
                session.empty(context)
            self._sessions[name] = session
        self._sessions.move_to_end(name)
        return session

    def values(self) -> list[Session]:
        return list(self._sessions.values())
