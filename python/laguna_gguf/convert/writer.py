"""Writing a GGUF file tensor by tensor, a few rows at a time."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from laguna_gguf.convert.aside import written_aside

Progress = Callable[[int], None]
"""Called with the number of bytes of tensor data just written."""

_ARRAY_TYPES = {
    "b": gguf.GGUFValueType.BOOL,
    "u1": gguf.GGUFValueType.UINT8,
    "i1": gguf.GGUFValueType.INT8,
    "u2": gguf.GGUFValueType.UINT16,
    "i2": gguf.GGUFValueType.INT16,
    "u4": gguf.GGUFValueType.UINT32,
    "i4": gguf.GGUFValueType.INT32,
    "u8": gguf.GGUFValueType.UINT64,
    "i8": gguf.GGUFValueType.INT64,
    "f4": gguf.GGUFValueType.FLOAT32,
    "f8": gguf.GGUFValueType.FLOAT64,
}


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor to write."""

    name: str
    """As in the file."""
    sources: list[str]
    """Tensors of the source that it is made of."""
    ggml_type: int
    ne: tuple[int, ...]
    n_bytes: int
    encode: Callable[[], Iterator[NDArray[np.uint8]]]
    """Called when it is its turn: the bytes, in pieces of whole rows."""


def write_gguf(
    outfile: Path,
    architecture: str,
    metadata: Mapping[str, Any],
    tensors: Iterable[PlannedTensor],
    progress: Progress | None = None,
) -> int:
    """Write a GGUF file; returns its size in bytes.

    The file appears under its name once it is complete and on disk: on any error nothing new is left and an earlier
    file of that name is untouched. Metadata values are those that `GgufFile.get` returns; whole numbers become u32.
    CheckpointError when writing fails.
    """
    with written_aside(outfile) as temporary:
        _write(temporary, architecture, metadata, list(tensors), progress)
        size = temporary.stat().st_size
    return size


def write_pieces(file: Any, tensor: PlannedTensor, progress: Progress | None) -> None:
    """Write a tensor's bytes to an open file; only one piece of it is in memory in its new form."""
    written = 0
    for piece in tensor.encode():
        file.write(np.ascontiguousarray(piece).data)
        written += piece.nbytes
        if progress is not None:
            progress(piece.nbytes)
    if written != tensor.n_bytes:
        raise AssertionError(f"{tensor.name}: wrote {written} of {tensor.n_bytes} bytes")


def _write(
    path: Path,
    architecture: str,
    metadata: Mapping[str, Any],
    tensors: list[PlannedTensor],
    progress: Progress | None,
) -> None:
    writer = gguf.GGUFWriter(path, architecture)
    try:
        for key, value in metadata.items():
            _add_value(writer, key, value)
        for tensor in tensors:
            n_rows = int(np.prod(tensor.ne[1:], dtype=np.int64))
            byte_shape = (*tensor.ne[:0:-1], tensor.n_bytes // n_rows)
            raw_dtype = gguf.GGMLQuantizationType(tensor.ggml_type)
            writer.add_tensor_info(tensor.name, byte_shape, np.dtype(np.uint8), tensor.n_bytes, raw_dtype=raw_dtype)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        assert writer.fout is not None
        (file,) = writer.fout
        # GGUFWriter.write_tensor_data would want each tensor whole.
        for tensor in tensors:
            writer.write_padding(file, file.tell())
            write_pieces(file, tensor, progress)
        writer.write_padding(file, file.tell())
        file.flush()
        os.fsync(file.fileno())
    finally:
        writer.close()


def _add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_key_value(key, value, gguf.GGUFValueType.BOOL)
    elif isinstance(value, int):
        fits = 0 <= value < 2**32
        writer.add_key_value(key, value, gguf.GGUFValueType.UINT32 if fits else gguf.GGUFValueType.INT64)
    elif isinstance(value, float):
        writer.add_key_value(key, value, gguf.GGUFValueType.FLOAT32)
    elif isinstance(value, str):
        writer.add_key_value(key, _bytes(value), gguf.GGUFValueType.STRING)
    elif isinstance(value, np.ndarray):
        kind = "b" if value.dtype.kind == "b" else f"{value.dtype.kind}{value.dtype.itemsize}"
        if value.size:
            writer.add_key_value(key, value.tolist(), gguf.GGUFValueType.ARRAY, _ARRAY_TYPES[kind])
    elif value:
        strings = [_bytes(text) for text in value]
        writer.add_key_value(key, strings, gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.STRING)


def _bytes(text: str) -> bytes:
    """The inverse of how the native reader decodes, so that copied keys are exact."""
    return text.encode("utf-8", "surrogateescape")
