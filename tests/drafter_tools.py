"""What the tests of the drafter share: random rows, and a native drafter beside the numpy reference.

All weights are f32 and all norms random in [0.5, 1.5]; with the unit norms of published checkpoints most mistakes
vanish.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from laguna_gguf import Drafter
from laguna_gguf.errors import RollbackError
from reference.dflash_numpy import ReferenceDrafter, Window, spread

TOLERANCE = 1e-3
"""Largest difference to the reference, in units of the reference logits' standard deviation."""
SAME = 1e-5
"""The same between two native drafters that hold the same rows in another place of the ring."""
VISIBLE = 1e-2
"""What a mistake must move the logits by to be seen for certain."""

MAX_DRAFT = 15
MODES: tuple[Window, ...] = ("per_query", "anchored")
Features = NDArray[np.float32]


def random_features(n_rows: int, *, n_captured: int = 3, n_embd: int = 64, seed: int = 0) -> Features:
    """Rows like captured residuals: each layer with a scale of its own."""
    rng = np.random.default_rng(seed)
    scale = np.linspace(1.0, 4.0, n_captured)[:, None]
    return (rng.standard_normal((n_rows, n_captured, n_embd)) * scale).astype(np.float32)


def chunks(features: Features, size: int) -> Iterator[Features]:
    """Consecutive pieces of `size` rows."""
    for begin in range(0, len(features), size):
        yield features[begin : begin + size]


@dataclass
class Pair:
    """A native drafter and the reference with the same weights, fed the same rows."""

    drafter: Drafter
    reference: ReferenceDrafter
    window: int

    def reset(self) -> None:
        self.drafter.reset()
        self.reference.reset()

    def append(self, features: Features, start: int | None = None) -> None:
        self.drafter.append_context(features, start)
        self.reference.append(features, start)

    def check(self, anchor: int = 7, n: int = MAX_DRAFT, modes: tuple[Window, ...] = MODES) -> None:
        """Both drafts agree in position, tokens and logits."""
        assert self.drafter.position == self.reference.position
        for mode in modes:
            block = self.drafter.draft(anchor, n, window=mode, return_logits=True)
            _, logits = self.reference.draft(anchor, n, mode)
            assert block.logits is not None
            assert block.logits.dtype == np.float32 and block.logits.shape == logits.shape
            assert spread(block.logits, logits) <= TOLERANCE, (mode, self.drafter.position, n)
            assert block.tokens.dtype == np.int32
            np.testing.assert_array_equal(block.tokens, block.logits.argmax(axis=1))


PairFactory = Callable[..., Pair]


def draft_logits(drafter: Drafter, n: int = MAX_DRAFT, *, anchor: int = 7, window: str | None = None) -> Features:
    """Logits [n, n_vocab] of one draft."""
    logits = drafter.draft(anchor, n, window=window, return_logits=True).logits
    assert logits is not None
    return logits


def rollback_or_refuse(pair: Pair, position: int) -> None:
    """Roll both back, or see the drafter refuse for a good reason and keep its state."""
    before, first = pair.drafter.position, pair.reference.first_position
    try:
        pair.drafter.rollback(position)
    except RollbackError:
        assert pair.drafter.position == before
        lowest_needed = position - min(position - first, pair.window - 1)
        lowest_kept = before - min(before - first, pair.window - 1)
        assert lowest_needed < lowest_kept, "refused although every row it needs must be in the cache"
    else:
        pair.reference.rollback(position)
