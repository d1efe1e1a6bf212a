"""Evaluating a text so that target and drafter hold exactly its positions, whatever they held before."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from laguna_gguf import _native
from laguna_gguf.dflash.drafter import Drafter
from laguna_gguf.dflash.target import TargetContext
from laguna_gguf.errors import RollbackError

CAPTURE_ROWS = 128
"""Rows of one capturing prompt decode: llama.cpp reserves n_vocab floats for every row whose last layer it keeps."""

LOGIT_ROWS = 8
"""Rows of the decode that ends a prompt. From 7 rows on, results do not depend on how many rows a decode has."""

WHOLE_PROMPT = 32
"""Prompts up to here are decoded at once: two decodes would cost more than some unread rows of logits."""

Piece = tuple[int, int]
"""First position and number of rows of a decode."""


class Evaluation:
    """A target's and a drafter's context on their way to the same text.

    First `rewind` takes both back to what they share with it, then `run` decodes the rest.
    """

    def __init__(self, target: TargetContext, drafter: Drafter, capture: _native.HiddenCapture) -> None:
        self._target = target
        self._drafter = drafter
        self._capture = capture
        config = drafter.config
        self._window_rows = config.sliding_window - 1
        # A graph may stop early only behind the model's last layer: further layers still have to fill their KV cache.
        self._can_stop = config.target_layer_ids[-1] == target.n_layer - 1

    def drafter_holds(self, position: int, end: int) -> bool:
        """Whether the drafter's context ends at `position` and no row is missing there that a draft at `end` will see.

        It may have begun late: after a prompt, with the rows of the last window only.
        """
        oldest = self._drafter.position - self._drafter.n_rows
        return self._drafter.position == position and oldest <= max(0, end - self._window_rows)

    def rewind(self, keep: int, end: int, *, capture: bool) -> int:
        """Take both back to where `run` has to start for a text of `end` tokens whose first `keep` are the old ones.

        At least one token is left to evaluate, so that the logits are those of the last one. More rows are left where
        the target's sliding window or, with `capture`, the drafter's context lost something on the way back.
        """
        start = min(keep, self._target.position, end - 1)
        self._rewind_drafter(start)
        if capture and not self.drafter_holds(start, end):
            start = min(start, self._first_captured(0, end))
        if not self._target.rollback(start):
            self._target.clear()
            start = 0
        if start == 0:
            self._drafter.reset()
        if capture and self._drafter.position != self._first_captured(start, end):
            self._drafter.reset()
        return start

    def run(self, tokens: NDArray[np.intc], start: int, *, capture: bool, all_logits: bool) -> Iterator[Piece]:
        """Decode tokens[start:], yielding each piece when it is done.

        all_logits asks for the logits of every row of a piece; else the last token's alone are good. `capture` feeds
        the drafter with the rows that a draft behind `tokens` will see.
        """
        if all_logits:
            yield from self._decode(tokens[start:], n=self._target.n_batch, all_logits=True, capture=capture)
            return
        unseen = self._first_captured(start, len(tokens)) if capture else len(tokens)
        yield from self._decode(tokens[start:unseen], n=self._target.n_batch, last_logits=not capture)
        yield from self._decode_captured(tokens[unseen:])

    def _first_captured(self, start: int, end: int) -> int:
        return max(start, end - self._window_rows, 0)

    def _decode_captured(self, tokens: NDArray[np.intc]) -> Iterator[Piece]:
        """The rows that the drafter must see; logits only where they are wanted, at the end."""
        largest = min(CAPTURE_ROWS, self._target.n_batch)
        if self._can_stop and len(tokens) > WHOLE_PROMPT:
            tail = min(LOGIT_ROWS, largest)
            yield from self._decode(tokens[:-tail], n=largest, all_logits=True, capture=True, stop=True)
            tokens = tokens[-tail:]
        # llama.cpp keeps the last layer only for flagged rows; earlier layers need no flags.
        yield from self._decode(tokens, n=largest, all_logits=self._can_stop, capture=True)

    def _decode(
        self,
        tokens: NDArray[np.intc],
        *,
        n: int,
        all_logits: bool = False,
        last_logits: bool = True,
        capture: bool = False,
        stop: bool = False,
    ) -> Iterator[Piece]:
        """Decode in pieces of at most n tokens, of nearly equal size (kernels for very few rows round differently)."""
        if len(tokens) == 0:
            return
        for piece in np.array_split(tokens, -(-len(tokens) // n)):
            start = self._target.position
            self._capture.enabled = capture
            self._target.decode(piece, all_logits=all_logits, last_logits=last_logits, stop=stop)
            if capture:
                self._drafter.append_captured(self._capture, len(piece), start)
            yield start, len(piece)

    def _rewind_drafter(self, position: int) -> None:
        """Take the drafter's context back to `position`; it is empty when it cannot go there."""
        if self._drafter.position > position:
            try:
                self._drafter.rollback(position)
            except RollbackError:
                self._drafter.reset()
