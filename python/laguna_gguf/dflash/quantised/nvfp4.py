"""NVFP4: 4-bit floats (E2M1) in groups of 16 with an e4m3 scale a group and one float32 scale a tensor.

Two tools write it, and differ in what the scale of the tensor means:

- compressed-tensors (format "nvfp4-pack-quantized"): `weight_packed` u8 [out, in/2], `weight_scale` e4m3 [out, in/16],
  `weight_global_scale` f32 [1], the *reciprocal*: w = fp4 * (weight_scale / weight_global_scale);
- ModelOpt ("NVFP4"): `weight` u8 [out, in/2], `weight_scale` e4m3 [out, in/16], `weight_scale_2` f32 scalar:
  w = fp4 * (weight_scale * weight_scale_2).

The even column is in the low half of a byte. Sources: compressed_tensors.compressors.nvfp4 and the unified export of
NVIDIA's Model Optimizer.
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
from laguna_gguf.errors import CheckpointError

GROUP_SIZE = 16

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 = np.array([*_MAGNITUDES, *(-m for m in _MAGNITUDES)], np.float32)
"""Value of each 4-bit code: sign, two exponent bits, one mantissa bit."""


@dataclass(frozen=True)
class Nvfp4Weight(QuantisedWeight):
    """See the module. `factor`: what a group's scale is multiplied or divided by."""

    packed: StoredTensor = field(repr=False)
    scale: StoredTensor = field(repr=False)
    factor: np.float32
    reciprocal: bool

    def rows(self, begin: int, end: int) -> FloatArray:
        scales = floats(self.scale, begin, end)
        # Divided, not multiplied by 1/x: the two round differently, and the format says divide.
        scales = scales / self.factor if self.reciprocal else scales * self.factor
        return scaled(packed_nibbles(matrix(self.packed)[begin:end], E2M1), scales)


def nvfp4_weight(
    module: str, packed: StoredTensor, scale: StoredTensor, global_scale: StoredTensor, *, reciprocal: bool
) -> Nvfp4Weight:
    """Check the three tensors of a matrix; CheckpointError names the one that does not fit."""
    need_dtype(packed, "U8")
    n_rows, n_bytes = need_matrix(packed)
    n_groups = groups(module, packed.path, 2 * n_bytes, GROUP_SIZE)
    need_scales(scale, (n_rows, n_groups), dtypes=("F8_E4M3",))
    need_scales(global_scale, (1,), (), dtypes=("F32",))
    factor = floats(global_scale).reshape(-1)[0]
    if factor <= 0:
        raise CheckpointError(f"{global_scale.path}: tensor {global_scale.key} is {factor:g}, needed a scale > 0")
    return Nvfp4Weight(
        module=module,
        path=packed.path,
        shape=(n_rows, 2 * n_bytes),
        label=f"nvfp4 group {GROUP_SIZE}",
        packed=packed,
        scale=scale,
        factor=factor,
        reciprocal=reciprocal,
    )
