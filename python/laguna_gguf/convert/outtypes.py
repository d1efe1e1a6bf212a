"""Output types and the rounding of weights to them."""

import math
from dataclasses import dataclass

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from laguna_gguf import _native
from laguna_gguf.dflash.checkpoint import F32, TensorData
from laguna_gguf.dflash.names import is_norm
from laguna_gguf.errors import CheckpointError, ConfigError

F16 = 1
Q8_0 = 8
BF16 = 30


@dataclass(frozen=True)
class OutType:
    """A type that matrices can be written in."""

    name: str
    ggml_type: int
    file_type: int
    """general.file_type (llama.cpp's LLAMA_FTYPE)."""
    larger: str | None = None
    """The type taken instead when a row is not a whole number of blocks."""


_ALL = (
    OutType("f32", F32, 0),
    OutType("f16", F16, 1),
    OutType("bf16", BF16, 32),
    OutType("q8_0", Q8_0, 7, larger="f16"),
)
OUTTYPES: dict[str, OutType] = {outtype.name: outtype for outtype in _ALL}


def find_outtype(name: str) -> OutType:
    """ConfigError, naming the supported ones, for any other name."""
    if name not in OUTTYPES:
        raise ConfigError(f"outtype: found {name!r}, needed one of {', '.join(OUTTYPES)}")
    return OUTTYPES[name]


def tensor_outtype(name: str, tensor: TensorData, asked: OutType) -> OutType:
    """The type to write one tensor in: f32 for norms, else the asked one or the next larger that its rows fit."""
    if is_norm(name):
        return OUTTYPES["f32"]
    chosen = asked
    while tensor.ne[0] % _native.type_size(chosen.ggml_type)[0] != 0 and chosen.larger is not None:
        chosen = OUTTYPES[chosen.larger]
    return chosen


def n_bytes(tensor: TensorData, outtype: OutType) -> int:
    """Size of a tensor in another type."""
    block, block_bytes = _native.type_size(outtype.ggml_type)
    return math.prod(tensor.ne) // block * block_bytes


def encode(name: str, tensor: TensorData, outtype: OutType) -> NDArray[np.uint8]:
    """Raw bytes [n_rows, bytes a row] in `outtype`, rounded to nearest even; CheckpointError when a value overflows."""
    n_rows = math.prod(tensor.ne[1:])
    if tensor.ggml_type == outtype.ggml_type:
        return tensor.data.reshape(n_rows, -1)
    values = _native.dequantize(tensor.data, tensor.ggml_type, tensor.ne[0])
    if outtype.ggml_type == F32:
        return values.view(np.uint8)
    if outtype.ggml_type in (F16, BF16):
        with np.errstate(over="ignore"):
            encoded = values.astype(np.float16 if outtype.ggml_type == F16 else ml_dtypes.bfloat16).view(np.uint8)
    else:
        encoded = _native.quantize(values, outtype.ggml_type)
    # Also a block's scale can overflow: it is a float16.
    if not _native.all_finite(encoded, outtype.ggml_type, tensor.ne[0]):
        raise CheckpointError(f"tensor {name}: values up to {np.abs(values).max():g} do not fit into {outtype.name}; "
                              "choose another outtype")
    return encoded
