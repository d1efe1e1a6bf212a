"""Text of a generation piece by piece, as much of it as is certain.

llama_cpp's own streaming takes time quadratic in the text that it has not passed on yet, and passes nothing on any more
once a byte came that is not UTF-8. Here a token costs what it is long, and the pieces add up to the whole answer.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable


class Deltas:
    """Holds back what may turn out to be part of a stop string, and bytes that are not whole characters yet."""

    def __init__(self, emit: Callable[[str], None]) -> None:
        """emit is called with "" when the first token comes, then with every piece of text."""
        self._emit = emit
        self._stops: list[bytes] = []
        self._pending = b""
        self._decode = codecs.getincrementaldecoder("utf-8")("ignore").decode
        self._n_emitted = 0
        self._started = False

    def begin(self, stops: Iterable[str]) -> None:
        """A generation with these stop strings is about to begin."""
        self._stops = [stop.encode() for stop in stops]

    def add(self, piece: bytes) -> None:
        """The text of one more token."""
        self._start()
        self._pending += piece
        n = self._n_certain()
        text, self._pending = self._decode(self._pending[:n]), self._pending[n:]
        self._pass_on(text)

    def finish(self, text: str) -> None:
        """The whole text is known: pass on the rest of it."""
        self._start()
        self._pass_on(text[self._n_emitted :])

    def _start(self) -> None:
        if not self._started:
            self._started = True
            self._emit("")

    def _pass_on(self, text: str) -> None:
        if text:
            self._n_emitted += len(text)
            self._emit(text)

    def _n_certain(self) -> int:
        pending, certain = self._pending, len(self._pending)
        for stop in self._stops:
            found = pending.find(stop)
            if found < 0:
                longest = min(len(stop) - 1, len(pending))
                held = next((n for n in range(longest, 0, -1) if pending.endswith(stop[:n])), 0)
                found = len(pending) - held
            certain = min(certain, found)
        return certain
