"""A lock for what works on one thing at a time."""

from __future__ import annotations

import threading

from laguna_gguf.errors import SessionBusyError


class Exclusive:
    """Other threads wait; the thread that is inside already, as a progress callback is, gets a SessionBusyError."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner: int | None = None

    def __enter__(self) -> None:
        if self._owner == threading.get_ident():
            raise SessionBusyError("the drafter was called by its own callback; needed a call after this one is done")
        self._lock.acquire()
        self._owner = threading.get_ident()

    def __exit__(self, *_: object) -> None:
        self._owner = None
        self._lock.release()
