"""The last compressions, for the status page: numbers, the time they saved, and where traces are written the traces."""

from __future__ import annotations

import time
import zlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from laguna_gguf.daemon.proxy.compression import Shortened

LENGTH = 100
TRACES = 16


@dataclass(frozen=True)
class Entry:
    """One compression."""

    number: int
    """Counts from 1."""
    when: float
    """Seconds since the epoch."""
    path: str
    prompt_tokens: int
    served_tokens: int
    timings: dict[str, Any]
    trace: bytes | None = field(default=None, repr=False)
    """A line of JSON, packed; of the last TRACES only, since they hold the prompts."""
    read_tokens: int | None = None
    """Target tokens that the upstream server read for it, its prompt_n: what its cache did not hold."""
    read_ms: float = 0.0
    """And the time that took, its prompt_ms."""

    @property
    def new_tokens(self) -> float:
        """Target tokens that it would have read of the whole prompt: what was new to the drafter's session."""
        n_read = int(self.timings.get("drafter_input_tokens", 0))
        n_new = int(self.timings.get("scorer_new_tokens", n_read))
        return self.prompt_tokens * (n_new / n_read if n_read else 1.0)


class History:
    """The last LENGTH compressions; the newest first."""

    def __init__(self, length: int = LENGTH) -> None:
        self._entries: deque[Entry] = deque(maxlen=length)
        self._number = 0

    def add(self, path: str, shortened: Shortened) -> int:
        """Returns its number."""
        self._number += 1
        entry = Entry(
            self._number,
            time.time(),
            path,
            shortened.prompt_tokens,
            shortened.served_tokens,
            shortened.timings,
            zlib.compress(shortened.trace, 1) if shortened.trace else None,
        )
        self._entries.appendleft(entry)
        if len(self._entries) > TRACES:
            self._entries[TRACES] = replace(self._entries[TRACES], trace=None)
        return self._number

    def answered(self, number: int, timings: dict[str, Any]) -> None:
        """Note the `timings` of llama-server's answer; others are ignored."""
        place = self._number - number
        tokens, ms = timings.get("prompt_n"), timings.get("prompt_ms")
        if not isinstance(tokens, int) or not isinstance(ms, int | float) or tokens <= 0 or ms < 0:
            return
        if place < len(self._entries):  # still among the last ones
            self._entries[place] = replace(self._entries[place], read_tokens=tokens, read_ms=float(ms))

    @property
    def ms_per_token(self) -> float | None:
        """Of the upstream server's prefill, in these answers."""
        tokens = sum(entry.read_tokens or 0 for entry in self._entries)
        return sum(entry.read_ms for entry in self._entries) / tokens if tokens else None

    def saved_ms(self, entry: Entry) -> float | None:
        """Estimate: the tokens that the upstream server did not have to read, at `ms_per_token`, less what compressing
        took. Attention makes long prefills slower than that, so it is rather more."""
        rate = self.ms_per_token
        if rate is None or entry.read_tokens is None:
            return None
        return (entry.new_tokens - entry.read_tokens) * rate - float(entry.timings["compress_ms"])

    def __iter__(self) -> Iterator[Entry]:
        return iter(list(self._entries))

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, number: int) -> Entry | None:
        return next((entry for entry in self._entries if entry.number == number), None)
