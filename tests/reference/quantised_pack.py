"""Quantised matrices packed from the definitions of their formats, with the values that they stand for.

Written for tests, with none of the package's code: codes are found by search in tables built bit by bit, and rows are
packed through whole numbers as wide as the row. Each function takes float32 [out, in] and returns the stored tensors by
suffix and the dequantised values (float32 arithmetic in the order of the format's formula).
"""

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float32]


@dataclass(frozen=True)
class Stored:
    """One tensor of a safetensors file."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


@dataclass(frozen=True)
class Packed:
    """The tensors of one module by suffix ("weight_packed"), and the values they stand for."""

    tensors: dict[str, Stored]
    values: FloatArray


def write_safetensors(path: Path, tensors: Mapping[str, Stored]) -> None:
    """A safetensors file: length of the header, the header as JSON, the tensors one after the other."""
    header: dict[str, Any] = {}
    offset = 0
    # Wide elements first, as the library does, so that every tensor is aligned to its own elements.
    order = sorted(tensors, key=lambda name: (-_WIDTHS[tensors[name].dtype], name))
    for name in order:
        end = offset + len(tensors[name].data)
        header[name] = {
            "dtype": tensors[name].dtype,
            "shape": list(tensors[name].shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(tensors[name].data for name in order))


_WIDTHS = {"F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "U8": 1, "I8": 1, "I32": 4, "U32": 4, "I64": 8}


def f32(values: Any) -> Stored:
    array = np.asarray(values, "<f4")
    return Stored("F32", array.shape, array.tobytes())


def bf16(values: Any) -> Stored:
    """Values that bfloat16 has: the upper half of a float32 is stored, the lower one must be 0."""
    bits = np.asarray(values, "<f4").view("<u4")
    assert not (bits & 0xFFFF).any()
    return Stored("BF16", bits.shape, (bits >> 16).astype("<u2").tobytes())


def i64(values: Any) -> Stored:
    array = np.asarray(values, "<i8")
    return Stored("I64", array.shape, array.tobytes())


def to_bf16(values: Any) -> FloatArray:
    """Cut to bfloat16 (towards zero: any nearby value serves)."""
    return (np.asarray(values, np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32)


# Small floating-point numbers.


def small_float(code: int, n_exponent: int, n_mantissa: int) -> float:
    """The value of sign | exponent | mantissa, with subnormals; the bias is 2^(n_exponent - 1) - 1."""
    mantissa = code & ((1 << n_mantissa) - 1)
    exponent = (code >> n_mantissa) & ((1 << n_exponent) - 1)
    sign = -1.0 if code >> (n_mantissa + n_exponent) else 1.0
    bias = (1 << (n_exponent - 1)) - 1
    if exponent == 0:
        return sign * mantissa * 2.0 ** (1 - bias - n_mantissa)
    return sign * (1 + mantissa / (1 << n_mantissa)) * 2.0 ** (exponent - bias)


E2M1 = np.array([small_float(code, 2, 1) for code in range(16)])
# In e4m3fn the largest exponent is used for numbers too; only S.1111.111 is not a number.
E4M3 = np.array([small_float(code, 4, 3) for code in range(256) if code & 127 != 127])
E4M3_CODES = np.array([code for code in range(256) if code & 127 != 127], np.uint8)


def nearest(values: NDArray[Any], table: NDArray[np.float64]) -> NDArray[np.int64]:
    """Index of the closest table entry of each value (the first one on ties)."""
    flat = np.asarray(values, np.float64).reshape(-1, 1)
    return np.abs(flat - table).argmin(axis=1).reshape(np.shape(values))


def e4m3(values: NDArray[Any]) -> tuple[Stored, FloatArray]:
    """Rounded to e4m3: as stored, and as numbers."""
    index = nearest(values, E4M3)
    return Stored("F8_E4M3", index.shape, E4M3_CODES[index].tobytes()), E4M3[index].astype(np.float32)


def pack_rows(codes: NDArray[Any], bits: int, unit: int) -> bytes:
    """Rows of unsigned codes as one little-endian number each, filled up to a multiple of `unit` bytes."""
    rows = []
    for row in codes.tolist():
        number = sum(code << (bits * i) for i, code in enumerate(row))
        n_bytes = -(-len(row) * bits // (8 * unit)) * unit
        rows.append(number.to_bytes(n_bytes, "little"))
    return b"".join(rows)


def by_group(weight: FloatArray, size: int) -> FloatArray:
    """[out, in] -> [out, in / size, size]"""
    return weight.reshape(len(weight), -1, size)


# The formats.


def nvfp4(weight: FloatArray, *, reciprocal: bool) -> Packed:
    """compressed-tensors (reciprocal: w = fp4 * (scale / global_scale)) or ModelOpt (w = fp4 * (scale * scale_2))."""
    n_out, n_in = weight.shape
    groups = by_group(weight, 16)
    largest = np.abs(groups).max(axis=2)
    unit = np.float32(largest.max() / (6 * 448))
    global_scale = np.float32(1) / unit if reciprocal else unit
    scale, scale_values = e4m3(largest / 6 / unit)
    step = scale_values / global_scale if reciprocal else scale_values * global_scale
    codes = nearest(groups / np.where(step == 0, 1, step)[:, :, None], E2M1)
    packed = Stored("U8", (n_out, n_in // 2), pack_rows(codes.reshape(n_out, n_in), 4, 1))
    values = E2M1[codes].astype(np.float32) * step[:, :, None]
    if reciprocal:
        tensors = {"weight_packed": packed, "weight_scale": scale, "weight_global_scale": f32([global_scale])}
    else:
        tensors = {"weight": packed, "weight_scale": scale, "weight_scale_2": f32(global_scale)}
    return Packed(tensors, values.reshape(weight.shape))


def int_pack(weight: FloatArray, *, bits: int = 4, group_size: int | None = 32, symmetric: bool = True) -> Packed:
    """compressed-tensors "pack-quantized"; group_size None: a scale a row. bf16 scales, as published files have."""
    n_out, n_in = weight.shape
    groups = by_group(weight, group_size or n_in)
    low, high = -(1 << (bits - 1)), (1 << (bits - 1)) - 1
    if symmetric:
        scale = to_bf16(np.abs(groups).max(axis=2) / (high + 0.5) * 1.01)
        zero = np.zeros(scale.shape, np.int64)
    else:
        bottom, top = np.minimum(groups.min(axis=2), 0), np.maximum(groups.max(axis=2), 0)
        scale = to_bf16((top - bottom) / (high - low) * 1.01)
        zero = np.clip(np.rint(low - bottom / scale), low, high).astype(np.int64)
    q = np.clip(np.rint(groups / scale[:, :, None]) + zero[:, :, None], low, high).astype(np.int64)
    values = (q - zero[:, :, None]).astype(np.float32) * scale[:, :, None]
    n_words = -(-n_in * bits // 32)
    tensors = {
        "weight_packed": Stored("I32", (n_out, n_words), pack_rows((q - low).reshape(n_out, n_in), bits, 4)),
        "weight_scale": bf16(scale),
        "weight_shape": i64([n_out, n_in]),
    }
    if not symmetric:
        # Packed along the outputs: pack columns as rows, then transpose the words.
        words = np.frombuffer(pack_rows((zero - low).T, bits, 4), "<i4").reshape(scale.shape[1], -1).T
        tensors["weight_zero_point"] = Stored("I32", words.shape, words.tobytes())
    return Packed(tensors, values.reshape(weight.shape))


def fp8(
    weight: FloatArray,
    *,
    block: tuple[int, int] | None,
    name: str = "weight_scale",
    scalar: bool = False,
    power_of_two: bool = False,
) -> Packed:
    """e4m3 with a scale a block; block None: one scale for the tensor, (1, in): one a row. scalar: with no axes."""
    n_out, n_in = weight.shape
    high, wide = block or (n_out, n_in)
    scale = np.zeros((-(-n_out // high), -(-n_in // wide)), np.float32)
    codes = np.zeros(weight.shape, np.uint8)
    values = np.zeros(weight.shape, np.float32)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            part = np.s_[i * high : (i + 1) * high, j * wide : (j + 1) * wide]
            scale[i, j] = np.abs(weight[part]).max() / np.float32(448)
            if power_of_two:
                scale[i, j] = 2.0 ** np.ceil(np.log2(scale[i, j]))
            stored, numbers = e4m3(weight[part] / scale[i, j])
            codes[part] = np.frombuffer(stored.data, np.uint8).reshape(numbers.shape)
            values[part] = numbers * scale[i, j]
    scales = scale if block else scale.reshape(() if scalar else (1,))
    return Packed({"weight": Stored("F8_E4M3", weight.shape, codes.tobytes()), name: f32(scales)}, values)


def mlx(weight: FloatArray, *, bits: int = 4, group_size: int = 32) -> Packed:
    """MLX's affine form: w = scales * q + biases, q unsigned."""
    n_out, n_in = weight.shape
    groups = by_group(weight, group_size)
    bottom, top = groups.min(axis=2), groups.max(axis=2)
    biases = to_bf16(bottom)
    scales = to_bf16((top - bottom) / ((1 << bits) - 1) * 1.02)
    q = np.clip(np.rint((groups - biases[:, :, None]) / scales[:, :, None]), 0, (1 << bits) - 1).astype(np.int64)
    values = q.astype(np.float32) * scales[:, :, None] + biases[:, :, None]
    tensors = {
        "weight": Stored("U32", (n_out, n_in * bits // 32), pack_rows(q.reshape(n_out, n_in), bits, 4)),
        "scales": bf16(scales),
        "biases": bf16(biases),
    }
    return Packed(tensors, values.reshape(weight.shape))
