"""A weight in ggml's layout whose bytes may be produced only when they are asked for."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from laguna_gguf import _native

F32 = 0
BF16 = 30

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class TensorData:
    """One weight in ggml's layout: `ne[0]` is the contiguous axis, `data` the flat raw bytes.

    `source` is those bytes (often a view of a mapped file), or a function that makes them: a large weight that has to
    be dequantised first exists only while somebody holds the result of `data`.
    """

    ggml_type: int
    ne: tuple[int, ...]
    source: Bytes | Callable[[], Bytes] = field(repr=False)

    @property
    def data(self) -> Bytes:
        """The raw bytes, possibly read-only. Every access may dequantise again: keep the result while it is needed."""
        return self.source if isinstance(self.source, np.ndarray) else self.source()

    @property
    def n_bytes(self) -> int:
        """Size of `data`, known without producing it."""
        block, block_bytes = _native.type_size(self.ggml_type)
        return math.prod(self.ne) // block * block_bytes
