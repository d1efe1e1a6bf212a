"""Output types and the rounding of weights to them."""

import math
from collections.abc import Iterator
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
Q4_K = 12
Q5_K = 13
Q6_K = 14
BF16 = 30

HF = "hf"
"""The outtype that stands for a Hugging Face directory instead of a GGUF file."""

_CHUNK_VALUES = 1 << 20
"""Values converted at a time: what a conversion holds beside one tensor of the source."""


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
    OutType("q4_k", Q4_K, 14, larger="q5_k"),
    OutType("q5_k", Q5_K, 16, larger="q6_k"),
    OutType("q6_k", Q6_K, 18, larger="q8_0"),
)
OUTTYPES: dict[str, OutType] = {outtype.name: outtype for outtype in _ALL}
"""Types of a GGUF file's matrices. Every matrix has the same one (llama.cpp's "_S" file types, without its mixes)."""


def find_outtype(name: str) -> OutType | None:
    """The type of that name in any case, None for "hf"; ConfigError, naming the supported ones, for another name."""
    key = name.lower() if isinstance(name, str) else name
    if key == HF:
        return None
    if not isinstance(key, str) or key not in OUTTYPES:
        raise ConfigError(f"outtype: found {name!r}, needed one of {', '.join((*OUTTYPES, HF))}")
    return OUTTYPES[key]


def tensor_outtype(name: str, tensor: TensorData, asked: OutType) -> OutType:
    """The type to write one tensor in: f32 for norms, else the asked one or the next larger that its rows fit."""
    if is_norm(name):
        return OUTTYPES["f32"]
    chosen = asked
    while tensor.ne[0] % _native.type_size(chosen.ggml_type)[0] != 0 and chosen.larger is not None:
        chosen = OUTTYPES[chosen.larger]
    return chosen


def n_bytes(ne: tuple[int, ...], outtype: OutType) -> int:
    """Size of a tensor of shape `ne` in a type."""
    block, block_bytes = _native.type_size(outtype.ggml_type)
    return math.prod(ne) // block * block_bytes


def encode_tensor(name: str, tensor: TensorData, outtype: OutType) -> Iterator[NDArray[np.uint8]]:
    """Raw bytes of consecutive rows in `outtype`; rounding as `encode_rows`. The tensor is loaded once, here."""
    n_rows = math.prod(tensor.ne[1:])
    rows = tensor.data.reshape(n_rows, -1)
    step = max(1, _CHUNK_VALUES // tensor.ne[0])
    for begin in range(0, n_rows, step):
        part = rows[begin : begin + step]
        if tensor.ggml_type == outtype.ggml_type:
            yield part
        else:
            yield encode_rows(name, _native.dequantize(part, tensor.ggml_type, tensor.ne[0]), outtype)


def encode_rows(name: str, values: NDArray[np.float32], outtype: OutType) -> NDArray[np.uint8]:
    """Raw bytes [n_rows, bytes a row] of float32 [n_rows, n_per_row].

    Floats are rounded to nearest even, quantised types are ggml's own. CheckpointError when a value overflows.
    """
    if outtype.ggml_type == F32:
        return values.view(np.uint8)
    if outtype.ggml_type in (F16, BF16):
        with np.errstate(over="ignore"):
            encoded = values.astype(np.float16 if outtype.ggml_type == F16 else ml_dtypes.bfloat16).view(np.uint8)
    else:
        encoded = _native.quantize(values, outtype.ggml_type)
    # Also a block's scale can overflow: it is a float16.
    if not _native.all_finite(encoded, outtype.ggml_type, values.shape[1]):
        raise CheckpointError(
            f"tensor {name}: values up to {np.abs(values).max():g} do not fit into {outtype.name}; choose another "
            "outtype"
        )
    return encoded
