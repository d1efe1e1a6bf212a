"""The queue in front of the drafter: clients take turns, so that one with many requests does not hold the others up."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Hashable
from typing import Generic, TypeVar

from laguna_gguf.daemon.protocol import BUSY, CodedError

T = TypeVar("T")

QUEUE_LIMIT = 64
"""Requests that wait, of all clients together."""
CLIENT_LIMIT = 16
"""Requests of one client that wait."""


class FairQueue(Generic[T]):
    """Requests by client. Used in the event loop only."""

    def __init__(self, limit: int = QUEUE_LIMIT, client_limit: int = CLIENT_LIMIT) -> None:
        self._limit, self._client_limit = limit, client_limit
        self._clients: OrderedDict[Hashable, deque[T]] = OrderedDict()
        self._size = 0
        self.filled = asyncio.Event()
        """Set while something waits."""

    def __len__(self) -> int:
        return self._size

    def put(self, client: Hashable, item: T) -> None:
        """Add at the end of the client's own line. CodedError `busy` at a limit."""
        waiting = self._clients.get(client, ())
        if self._size >= self._limit or len(waiting) >= self._client_limit:
            raise CodedError(
                f"{self._size} requests are waiting already, {len(waiting)} of them yours; at most {self._limit} and "
                f"{self._client_limit} may. Try again later",
                BUSY,
            )
        self._clients.setdefault(client, deque()).append(item)
        self._size += 1
        self.filled.set()

    def put_back(self, client: Hashable, item: T) -> None:
        """Put what was taken in front of everything else, whatever the limits."""
        line = self._clients.setdefault(client, deque())
        line.appendleft(item)
        self._clients.move_to_end(client, last=False)
        self._size += 1
        self.filled.set()

    def take(self) -> T:
        """The next one: of the client that has waited longest since its last turn."""
        client, line = self._clients.popitem(last=False)
        item = line.popleft()
        if line:
            self._clients[client] = line
        self._shrunk()
        return item

    def remove(self, client: Hashable, item: T) -> bool:
        """Take a request out; whether it was there."""
        line = self._clients.get(client)
        if line is None or item not in line:
            return False
        line.remove(item)
        if not line:
            del self._clients[client]
        self._shrunk()
        return True

    def clear(self) -> list[T]:
        """Take all out."""
        return [self.take() for _ in range(self._size)]

    def _shrunk(self) -> None:
        self._size -= 1
        if not self._size:
            self.filled.clear()
