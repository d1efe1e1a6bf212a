"""Integers packed into int32 words, as compressed-tensors writes them (format "pack-quantized").

`weight_packed` i32 [out, ceil(in * bits / 32)], lowest bits first, each value stored with an offset of 2^(bits-1);
`weight_scale` [out, in / group_size] (a group), [out, 1] (a channel) or [1] (a tensor); `weight_shape` i64 [out, in].
Asymmetric: `weight_zero_point`, packed the same way but along the outputs, i32 [ceil(out * bits / 32), n_groups], with
the same offset (or i8 [out, n_groups], plain). w = (q - zero_point) * weight_scale.
Source: compressed_tensors.compressors.pack_quantized. Of its widths 4 and 8 bits are read; the others straddle bytes.
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
    need_shape,
    packed_nibbles,
    scaled,
)
from laguna_gguf.dflash.safetensors_dir import StoredTensor
from laguna_gguf.errors import CheckpointError

BITS = (4, 8)


@dataclass(frozen=True)
class IntPackWeight(QuantisedWeight):
    """See the module. `n_groups`: scales a row."""

    packed: StoredTensor = field(repr=False)
    scale: StoredTensor = field(repr=False)
    zero_point: StoredTensor | None = field(repr=False)
    bits: int
    n_groups: int

    def rows(self, begin: int, end: int) -> FloatArray:
        n_columns = self.shape[1]
        values = _unpack(matrix(self.packed)[begin:end], self.bits)[:, :n_columns]
        values = np.ascontiguousarray(values)  # the last word of a row can have values to spare
        if self.zero_point is not None:
            groups_of_columns = values.reshape(end - begin, self.n_groups, -1)
            groups_of_columns -= self._zero_points(begin, end)[:, :, None]
        one_a_row = len(self.scale.shape) == 2 and self.scale.shape[0] == self.shape[0]
        scales = floats(self.scale, begin, end) if one_a_row else floats(self.scale)
        return scaled(values, scales.reshape(-1, self.n_groups))

    def _zero_points(self, begin: int, end: int) -> FloatArray:
        assert self.zero_point is not None
        if self.zero_point.dtype == "I8":
            return matrix(self.zero_point)[begin:end].view(np.int8).astype(np.float32)
        per_word = 32 // self.bits
        first = begin // per_word
        words = self.zero_point.view.view("<i4").reshape(self.zero_point.shape)[first : -(-end // per_word)]
        columns = np.ascontiguousarray(words.T).view(np.uint8)  # [n_groups, 4 * words]: outputs along a row
        return _unpack(columns, self.bits)[:, begin - first * per_word : end - first * per_word].T


def _unpack(packed: np.ndarray, bits: int) -> FloatArray:
    """Bytes of little-endian words [n, n_bytes] to signed values [n, n_bytes * 8 / bits]."""
    if bits == 4:
        return packed_nibbles(packed, np.arange(16, dtype=np.float32) - 8)
    return packed.astype(np.float32) - 128


def int_pack_weight(
    module: str,
    packed: StoredTensor,
    scale: StoredTensor,
    shape: StoredTensor,
    zero_point: StoredTensor | None,
    *,
    bits: int,
    group_size: int | None,
) -> IntPackWeight:
    """Check the tensors of a matrix (CheckpointError). group_size None: one scale a row, or one for all."""
    need_dtype(packed, "I32")
    n_rows, n_words = need_matrix(packed)
    n_columns = _columns(shape, n_rows)
    if -(-n_columns * bits // 32) != n_words:
        raise CheckpointError(
            f"{packed.path}: tensor {packed.key} has rows of {n_words} words, needed "
            f"{-(-n_columns * bits // 32)} for {n_columns} values of {bits} bits ({shape.key})"
        )
    if group_size is None:
        n_groups = 1
        need_scales(scale, (n_rows, 1), (1,), (1, 1), ())
    else:
        n_groups = groups(module, packed.path, n_columns, group_size)
        need_scales(scale, (n_rows, n_groups))
    if zero_point is not None:
        need_dtype(zero_point, "I32", "I8")
        packed_rows = -(-n_rows * bits // 32)
        need_shape(zero_point, (n_rows if zero_point.dtype == "I8" else packed_rows, n_groups))
    return IntPackWeight(
        module=module,
        path=packed.path,
        shape=(n_rows, n_columns),
        label=f"int{bits} "
        + (f"group {group_size}" if group_size else "channel")
        + ("" if zero_point is None else " with zero points"),
        packed=packed,
        scale=scale,
        zero_point=zero_point,
        bits=bits,
        n_groups=n_groups,
    )


def _columns(shape: StoredTensor, n_rows: int) -> int:
    need_dtype(shape, "I64", "I32")
    need_shape(shape, (2,))
    values = shape.view.view("<i8" if shape.dtype == "I64" else "<i4").tolist()
    if values[0] != n_rows or values[1] < 1:
        raise CheckpointError(f"{shape.path}: tensor {shape.key} is {values}, needed [{n_rows}, number of columns]")
    return int(values[1])
