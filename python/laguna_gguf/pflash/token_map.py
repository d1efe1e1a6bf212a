"""Positions in the bytes of a text and the tokens that hold them."""

from __future__ import annotations

from bisect import bisect_left, bisect_right

import numpy as np
from numpy.typing import ArrayLike

from laguna_gguf.errors import QueryError
from laguna_gguf.pflash.segmentation import Span


class TokenMap:
    """Byte offsets of tokens; they may split characters, and a token may be empty."""

    def __init__(self, offsets: ArrayLike, n_bytes: int) -> None:
        """`offsets` [n + 1], from 0 to `n_bytes` without decreasing; anything else, or no token, is a QueryError."""
        try:
            array = np.asarray(offsets)
        except ValueError as error:
            raise QueryError(f"token offsets are not a row of integers: {error}") from error
        if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer) or array.size < 2:
            raise QueryError(
                f"token offsets have the shape {array.shape} and type {array.dtype}; "
                "needed integers [n_tokens + 1] with at least one token"
            )
        if array[0] != 0 or array[-1] != n_bytes or (array[1:] < array[:-1]).any():
            raise QueryError(
                f"token offsets run from {array[0]} to {array[-1]}; needed 0 to {n_bytes}, the text's bytes, "
                "without decreasing"
            )
        self._offsets: list[int] = array.tolist()
        self.n_tokens = array.size - 1

    def containing(self, byte: int) -> int:
        """The token that holds this byte; n_tokens for the end of the text."""
        return bisect_right(self._offsets, byte) - 1

    def starting_at(self, byte: int) -> int:
        """The first token that starts at this byte or behind it; n_tokens when none does."""
        return bisect_left(self._offsets, byte)

    def covering(self, begin: int, end: int) -> Span:
        """All tokens that hold a byte of [begin, end)."""
        return (self.containing(begin), self.starting_at(end)) if begin < end else (0, 0)

    def content(self, begin: int, end: int) -> Span:
        """Tokens of a content without what merged with the marker before it: those that start in [begin, end).

        Where no token starts inside, the one that holds its last byte.
        """
        if begin >= end:
            return 0, 0
        last = self.starting_at(end)
        return min(self.starting_at(begin), last - 1), last

    def is_token(self, begin: int, end: int) -> bool:
        """Whether exactly these bytes are one token."""
        at = self.containing(begin)
        return self._offsets[at] == begin and self._offsets[at + 1] == end
