"""Writing a drafter as a Hugging Face directory: config.json and one safetensors file, a few rows at a time."""

import json
import os
import struct
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from laguna_gguf import _native
from laguna_gguf.convert.aside import written_aside
from laguna_gguf.convert.outtypes import OUTTYPES, OutType, encode_rows, encode_tensor, n_bytes
from laguna_gguf.convert.writer import PlannedTensor, Progress, write_pieces
from laguna_gguf.dflash import names
from laguna_gguf.dflash.checkpoint import Checkpoint, TensorData
from laguna_gguf.dflash.safetensors_dir import SINGLE_FILE

_DTYPES = {"f32": "F32", "f16": "F16", "bf16": "BF16"}
_ALIGNMENT = 8


def main_type(checkpoint: Checkpoint) -> OutType:
    """The type of a directory's matrices: the widest that the source stores as such, bf16 for quantised sources."""
    stored = {name for name in checkpoint.tensors if not names.is_norm(name)} - checkpoint.quantised.keys()
    types = {checkpoint.tensors[name].ggml_type for name in stored}
    found = {outtype.name for outtype in OUTTYPES.values() if outtype.ggml_type in types and outtype.name in _DTYPES}
    if "f32" in found or {"f16", "bf16"} <= found:
        return OUTTYPES["f32"]
    return OUTTYPES["f16"] if found == {"f16"} else OUTTYPES["bf16"]


def plan_hf(checkpoint: Checkpoint) -> list[PlannedTensor]:
    """The tensors of the directory: fused qkv, one aux norm a captured layer, no prefix.

    Matrices are all of `main_type`; a norm too where that changes no value, else it stays f32.
    """
    outtype = main_type(checkpoint)
    planned = []
    for name, (internal, row) in _targets(checkpoint).items():
        if names.is_norm(internal[0]):
            planned.append(_plan_norm(checkpoint, f"{name}.weight", internal[0], row, outtype))
        else:
            planned.append(_plan_matrix(checkpoint, f"{name}.weight", internal, outtype))
    # Wider types first, as the safetensors library orders them: every offset is then aligned.
    return sorted(planned, key=lambda tensor: -_native.type_size(tensor.ggml_type)[1])


def _plan_matrix(checkpoint: Checkpoint, name: str, internal: list[str], outtype: OutType) -> PlannedTensor:
    """One internal tensor, or several joined by rows (q, k and v)."""
    parts = [(part, checkpoint.tensors[part]) for part in internal]
    ne = (parts[0][1].ne[0], sum(tensor.ne[1] for _, tensor in parts))
    origins = dict.fromkeys(origin for part in internal for origin in checkpoint.origins[part])
    encode = partial(_encode_parts, parts, outtype)
    return PlannedTensor(name, list(origins), outtype.ggml_type, ne, n_bytes(ne, outtype), encode)


def _plan_norm(checkpoint: Checkpoint, name: str, internal: str, row: int | None, outtype: OutType) -> PlannedTensor:
    """A norm, or one row of the stacked aux norms."""
    tensor, origins = checkpoint.tensors[internal], checkpoint.origins[internal]
    if row is not None and len(origins) == tensor.ne[-1]:  # stacked from tensors of their own
        origins = origins[row : row + 1]
    values = _native.dequantize(tensor.data, tensor.ggml_type, tensor.ne[0])[row or 0 :][:1]
    chosen = outtype if _is_exact(values, outtype) else OUTTYPES["f32"]
    ne = tensor.ne[:1]
    encode = partial(_encode_norm, name, values, chosen)
    return PlannedTensor(name, origins, chosen.ggml_type, ne, n_bytes(ne, chosen), encode)


def write_hf(
    outdir: Path, config: dict[str, Any], tensors: list[PlannedTensor], progress: Progress | None = None
) -> int:
    """Write a new directory; returns the size of its files in bytes. It appears complete or not at all."""
    with written_aside(outdir, directory=True) as temporary:
        with (temporary / "config.json").open("w", encoding="utf-8") as text:
            text.write(json.dumps(config, indent=2) + "\n")
            text.flush()
            os.fsync(text.fileno())
        with (temporary / SINGLE_FILE).open("wb") as file:
            file.write(_header(tensors))
            for tensor in tensors:
                write_pieces(file, tensor, progress)
            file.flush()
            os.fsync(file.fileno())
        size = sum(path.stat().st_size for path in temporary.iterdir())
    return size


def _targets(checkpoint: Checkpoint) -> dict[str, tuple[list[str], int | None]]:
    """Name in the directory -> internal tensors to join by rows, or one row of the stacked aux norms."""
    targets: dict[str, tuple[list[str], int | None]] = {}
    for internal, stored in names.hf_names(checkpoint.config).items():
        block, _, part = internal.rpartition(".")
        if internal == names.AUX_NORM:
            targets |= {name: ([internal], row) for row, name in enumerate(stored)}
        elif part == names.QKV[0]:
            fused = stored[0].removesuffix("q_proj") + "qkv_proj"
            targets[fused] = ([f"{block}.{name}" for name in names.QKV], None)
        elif part not in names.QKV:
            targets[stored[0]] = ([internal], None)
    return targets


def _header(tensors: list[PlannedTensor]) -> bytes:
    """A safetensors header: 8 bytes of length, JSON, padding. Offsets follow the order of `tensors`."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        entries[tensor.name] = {
            "dtype": _DTYPES[_native.type_name(tensor.ggml_type)],
            "shape": list(tensor.ne[::-1]),
            "data_offsets": [offset, offset + tensor.n_bytes],
        }
        offset += tensor.n_bytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return struct.pack("<Q", len(text)) + text


def _is_exact(values: NDArray[np.float32], outtype: OutType) -> bool:
    if outtype.name == "f32":
        return True
    with np.errstate(over="ignore"):
        rounded = _native.dequantize(_native.quantize(values, outtype.ggml_type), outtype.ggml_type, values.shape[1])
    return np.array_equal(rounded, values)


def _encode_parts(parts: list[tuple[str, TensorData]], outtype: OutType) -> Iterator[NDArray[np.uint8]]:
    for name, tensor in parts:
        yield from encode_tensor(name, tensor, outtype)


def _encode_norm(name: str, values: NDArray[np.float32], outtype: OutType) -> Iterator[NDArray[np.uint8]]:
    yield encode_rows(name, values, outtype)
