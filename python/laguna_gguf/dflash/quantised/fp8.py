"""8-bit floats (e4m3) with a scale a tensor, a row, or a block of rows and columns.

`weight` e4m3 [out, in]; `weight_scale` (compressed-tensors, ModelOpt) or `weight_scale_inv` (the "fp8" method, named so
although it is multiplied like the other): [1] or scalar; [out, 1] or [out]; [ceil(out / rows), ceil(in / columns)].
ModelOpt writes a block's scale as [out / rows, 1, in / columns, 1]. w = weight * scale.
Source: compressed_tensors.compressors.naive_quantized and transformers' fine-grained fp8.
"""

from dataclasses import dataclass, field

import ml_dtypes
import numpy as np

from laguna_gguf.dflash.quantised.weight import (
    FloatArray,
    QuantisedWeight,
    floats,
    matrix,
    need_dtype,
    need_matrix,
    need_scales,
)
from laguna_gguf.dflash.safetensors_dir import StoredTensor

TENSOR = "tensor"
CHANNEL = "channel"
BLOCK = "block"

_E4M3 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)


@dataclass(frozen=True)
class Fp8Weight(QuantisedWeight):
    """See the module. `block`: rows and columns that share a scale."""

    weight: StoredTensor = field(repr=False)
    scale: StoredTensor = field(repr=False)
    block: tuple[int, int]

    def rows(self, begin: int, end: int) -> FloatArray:
        values: FloatArray = _E4M3[matrix(self.weight)[begin:end]]
        n_high, n_wide = self.block
        first, last = begin // n_high, -(-end // n_high)
        scales = floats(self.scale, first, last).reshape(last - first, -1)
        of_row = np.arange(begin, end) // n_high - first
        if scales.shape[1] > 1:
            # The last block of a row may be narrower: repeat the scales over whole blocks, then cut.
            scales = np.repeat(scales, n_wide, axis=1)[:, : self.shape[1]]
        values *= scales[of_row]
        return values


def fp8_weight(
    module: str, weight: StoredTensor, scale: StoredTensor, *, strategy: str | None, block: tuple[int, int] | None
) -> Fp8Weight:
    """Check the two tensors of a matrix (CheckpointError).

    strategy None: a scale a tensor or a row, as its shape says.
    """
    need_dtype(weight, "F8_E4M3")
    n_rows, n_columns = need_matrix(weight)
    shapes: list[tuple[int, ...]] = []
    if strategy == BLOCK:
        n_high, n_wide = block or (128, 128)
        high, wide = -(-n_rows // n_high), -(-n_columns // n_wide)
        shapes = [(high, wide), (high, 1, wide, 1)]
    else:
        if strategy != TENSOR:
            shapes += [(n_rows, 1), (n_rows,)]
        if strategy != CHANNEL:
            shapes += [(1,), (), (1, 1)]
        is_row = len(scale.shape) > 0 and scale.shape[0] == n_rows and strategy != TENSOR
        n_high, n_wide = (1, n_columns) if is_row else (n_rows, n_columns)
    need_scales(scale, *shapes)
    label = f"block {n_high}x{n_wide}" if strategy == BLOCK else CHANNEL if n_high == 1 else TENSOR
    return Fp8Weight(
        module=module,
        path=weight.path,
        shape=(n_rows, n_columns),
        label=f"fp8 {label}",
        weight=weight,
        scale=scale,
        block=(n_high, n_wide),
    )
