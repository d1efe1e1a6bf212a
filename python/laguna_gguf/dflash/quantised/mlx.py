"""MLX's affine quantisation: `weight` u32 [out, in * bits / 32], `scales` and `biases` [out, in / group_size].

Values are unsigned, lowest bits of a little-endian word first: w = scales * q + biases. Source: mlx.core.quantize.
Of its widths 4 and 8 bits are read.
"""

from dataclasses import dataclass, field

import numpy as np

from laguna_gguf.dflash.quantised.weight import (
    FloatArray,
    QuantisedWeight,
    floats,
    groups,
    matrix,
    need_dtype,
    need_matrix,
    need_scales,
    packed_nibbles,
    scaled,
)
from laguna_gguf.dflash.safetensors_dir import StoredTensor

BITS = (4, 8)


@dataclass(frozen=True)
class MlxWeight(QuantisedWeight):
    """See the module."""

    packed: StoredTensor = field(repr=False)
    scales: StoredTensor = field(repr=False)
    biases: StoredTensor = field(repr=False)
    bits: int

    def rows(self, begin: int, end: int) -> FloatArray:
        packed = matrix(self.packed)[begin:end]
        if self.bits == 4:
            values = packed_nibbles(packed, np.arange(16, dtype=np.float32))
        else:
            values = packed.astype(np.float32)
        biases = floats(self.biases, begin, end)
        scaled(values, floats(self.scales, begin, end))
        groups_of_columns = values.reshape(end - begin, biases.shape[1], -1)
        groups_of_columns += biases[:, :, None]
        return values


def mlx_weight(
    module: str, packed: StoredTensor, scales: StoredTensor, biases: StoredTensor, *, bits: int, group_size: int
) -> MlxWeight:
    """Check the three tensors of a matrix (CheckpointError)."""
    need_dtype(packed, "U32")
    n_rows, n_words = need_matrix(packed)
    n_columns = n_words * 32 // bits
    n_groups = groups(module, packed.path, n_columns, group_size)
    need_scales(scales, (n_rows, n_groups))
    need_scales(biases, (n_rows, n_groups))
    return MlxWeight(
        module=module,
        path=packed.path,
        shape=(n_rows, n_columns),
        label=f"mlx {bits} bits group {group_size}",
        packed=packed,
        scales=scales,
        biases=biases,
        bits=bits,
    )
