"""The random model whose taps were stored from transformers; numpy only, so that torch's environment can import it."""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from random_drafter import TINY_QWEN35, Tensors

TAP_SHAPE = replace(TINY_QWEN35, n_layer=16)
TAP_SEED = 35


def weights_checksum(tensors: Tensors) -> NDArray[np.float64]:
    """[n_tensors] sums of absolute values: tells whether numpy still draws the same numbers."""
    return np.array([np.abs(tensor.astype(np.float64)).sum() for tensor in tensors.values()])
