"""What all quantised forms have in common: dequantising a stored matrix piece by piece, to the type it fits in.

Nothing is kept dequantised: a weight here is a few views of the mapped file, and its float32 values exist only in
pieces of about a million elements, or as the one tensor that somebody asked for.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from laguna_gguf.dflash.safetensors_dir import StoredTensor
from laguna_gguf.dflash.tensor_data import BF16, F32, Bytes, TensorData
from laguna_gguf.errors import CheckpointError

FloatArray = NDArray[np.float32]

_PIECE = 1 << 20
"""Elements dequantised at once."""

FLOAT_DTYPES: dict[str, np.dtype] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
}
"""Names of safetensors -> types that scales are stored in."""


@dataclass(frozen=True)
class QuantisedWeight(ABC):
    """A matrix that has to be dequantised. Construction checks all its tensors against each other (CheckpointError)."""

    module: str
    """Name in the source, without prefix: "layers.0.mlp.up_proj"."""
    path: Path
    """The file that holds the packed values."""
    shape: tuple[int, int]
    """[rows (outputs), columns (inputs)] once dequantised."""
    label: str
    """How it is stored, for reports: "nvfp4 group 16"."""

    @abstractmethod
    def rows(self, begin: int, end: int) -> FloatArray:
        """The float32 values of some rows, [end - begin, columns]."""

    def tensor(self, begin: int, end: int) -> TensorData:
        """Some rows as a weight that is dequantised when its bytes are asked for.

        bf16 when every value is one (the usual case for powers of two as scales), since that halves the memory at no
        loss; else f32, because a second rounding on top of the quantiser's would make another model. CheckpointError
        when a value is not finite.
        """
        exact = True
        for _, values in self._pieces(begin, end):
            if not np.isfinite(values).all():
                raise CheckpointError(
                    f"{self.path}: tensor {self.module} has values that are not finite once dequantised ({self.label})"
                )
            exact = exact and not (values.view(np.uint32) & 0xFFFF).any()
        ggml_type = BF16 if exact else F32
        return TensorData(ggml_type, (self.shape[1], end - begin), partial(self._bytes, begin, end, exact))

    def _bytes(self, begin: int, end: int, as_bf16: bool) -> Bytes:
        out = np.empty((end - begin, self.shape[1]), np.uint16 if as_bf16 else np.uint32)
        for row, values in self._pieces(begin, end):
            bits = values.view(np.uint32)
            out[row : row + len(values)] = bits >> 16 if as_bf16 else bits
        return out.reshape(-1).view(np.uint8)

    def _pieces(self, begin: int, end: int) -> Iterator[tuple[int, FloatArray]]:
        """(first row relative to `begin`, values [n, columns])"""
        step = max(_PIECE // self.shape[1], 1)
        for row in range(begin, end, step):
            with np.errstate(over="ignore", invalid="ignore"):  # infinities are reported with the tensor's name
                values = self.rows(row, min(row + step, end))
            yield row - begin, values


def matrix(tensor: StoredTensor) -> NDArray[np.uint8]:
    """The raw bytes of a 2-D tensor by row, [rows, bytes a row] (a view)."""
    return tensor.view.reshape(tensor.shape[0], -1)


def floats(tensor: StoredTensor, begin: int = 0, end: int | None = None) -> FloatArray:
    """Values of the rows of a tensor (all of a scalar) as float32. Its dtype is one of FLOAT_DTYPES."""
    values = tensor.view.view(FLOAT_DTYPES[tensor.dtype]).reshape(tensor.shape)
    return (values[begin:end] if values.ndim else values).astype(np.float32)


def packed_nibbles(packed: NDArray[np.uint8], values: NDArray[np.float32]) -> FloatArray:
    """Look up 4-bit codes [n, bytes], the low half of a byte first, in 16 values: [n, 2 * bytes]."""
    pairs = np.empty((256, 2), np.float32)
    codes = np.arange(256)
    pairs[:, 0] = values[codes & 15]
    pairs[:, 1] = values[codes >> 4]
    return pairs[packed].reshape(len(packed), -1)


def scaled(values: FloatArray, scales: FloatArray) -> FloatArray:
    """Multiply groups of columns in place: values [n, columns], scales [n or 1, n_groups] of equally long groups."""
    groups = values.reshape(len(values), scales.shape[1], -1)
    groups *= scales[:, :, None]
    return values


# Checks, all of which name the tensor, what was found and what is needed.


def need_shape(tensor: StoredTensor, *needed: tuple[int, ...]) -> None:
    """CheckpointError unless the tensor has one of the shapes."""
    if tensor.shape not in needed:
        shapes = " or ".join(str(list(shape)) for shape in needed)
        raise CheckpointError(f"{tensor.path}: tensor {tensor.key} has shape {list(tensor.shape)}, needed {shapes}")


def need_dtype(tensor: StoredTensor, *needed: str) -> None:
    """CheckpointError unless the tensor is stored in one of the types."""
    if tensor.dtype not in needed:
        raise CheckpointError(
            f"{tensor.path}: tensor {tensor.key} has dtype {tensor.dtype}, needed {' or '.join(needed)}"
        )


def need_matrix(tensor: StoredTensor) -> tuple[int, int]:
    """The shape of a tensor with two axes and at least one element; CheckpointError otherwise."""
    if len(tensor.shape) != 2 or 0 in tensor.shape:
        raise CheckpointError(f"{tensor.path}: tensor {tensor.key} has shape {list(tensor.shape)}, needed a matrix")
    return tensor.shape[0], tensor.shape[1]


def need_finite(tensor: StoredTensor) -> None:
    """CheckpointError unless every value is finite; checked in pieces."""
    n_rows = tensor.shape[0] if tensor.shape else 1
    step = max(_PIECE * n_rows // max(tensor.view.size, 1), 1)
    if not all(np.isfinite(floats(tensor, row, row + step)).all() for row in range(0, n_rows, step)):
        raise CheckpointError(
            f"{tensor.path}: tensor {tensor.key} has values that are not finite, needed finite scales"
        )


def need_scales(
    tensor: StoredTensor, *shapes: tuple[int, ...], dtypes: tuple[str, ...] = ("F32", "F16", "BF16")
) -> None:
    """The checks of a tensor of scales: dtype, shape, finite."""
    need_dtype(tensor, *dtypes)
    need_shape(tensor, *shapes)
    need_finite(tensor)


def groups(module: str, path: Path, n_columns: int, group_size: int) -> int:
    """Number of groups in a row; CheckpointError unless the group size divides it."""
    if n_columns % group_size:
        raise CheckpointError(
            f"{path}: {module} has rows of {n_columns}, needed a multiple of group_size = {group_size}"
        )
    return n_columns // group_size
