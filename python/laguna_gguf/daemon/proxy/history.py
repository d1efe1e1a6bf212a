"""The last compressions, for the status page: numbers, and where traces are written the traces too."""

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


class History:
    """The last LENGTH compressions; the newest first."""

    def __init__(self, length: int = LENGTH) -> None:
        self._entries: deque[Entry] = deque(maxlen=length)
        self._number = 0

    def add(self, path: str, shortened: Shortened) -> None:
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

    def __iter__(self) -> Iterator[Entry]:
        return iter(list(self._entries))

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, number: int) -> Entry | None:
        return next((entry for entry in self._entries if entry.number == number), None)
