"""Writing a GGUF file that is either complete or not there."""

import contextlib
import os
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from laguna_gguf.errors import CheckpointError, ConfigError

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
    """A tensor to write; `encode` returns its bytes [n_rows, bytes a row] when it is its turn."""

    name: str
    ggml_type: int
    ne: tuple[int, ...]
    n_bytes: int
    encode: Callable[[], NDArray[np.uint8]]


def check_outfile(outfile: Path) -> None:
    """ConfigError unless a file can be created under this name."""
    if "\0" in str(outfile):
        raise ConfigError(f"outfile: {str(outfile)!r} is not a path (null byte)")
    try:
        if outfile.is_dir():
            raise ConfigError(f"outfile: {outfile} is a directory, needed a file name")
        if not outfile.parent.is_dir():
            raise ConfigError(f"outfile: the directory {outfile.parent} does not exist")
    except OSError as error:
        raise ConfigError(f"outfile: {outfile} is not a usable path ({error})") from error


def write_gguf(
    outfile: Path, architecture: str, metadata: Mapping[str, Any], tensors: Iterable[PlannedTensor]
) -> int:
    """Write a GGUF file; returns its size in bytes.

    The file appears under its name once it is complete and on disk: on any error nothing new is left and an earlier
    file of that name is untouched. Metadata values are those that `GgufFile.get` returns; whole numbers become u32.
    CheckpointError when writing fails.
    """
    check_outfile(outfile)
    temporary = outfile.with_name(f".{outfile.name}.{secrets.token_hex(4)}.part")
    try:
        _write(temporary, architecture, metadata, list(tensors))
        size = temporary.stat().st_size
        os.replace(temporary, outfile)
        _sync_directory(outfile.parent)
        return size
    except (OSError, UnicodeEncodeError) as error:  # a tokenizer.json can hold text that is not Unicode
        raise CheckpointError(f"{outfile}: cannot be written ({error})") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def _write(path: Path, architecture: str, metadata: Mapping[str, Any], tensors: list[PlannedTensor]) -> None:
    writer = gguf.GGUFWriter(path, architecture)
    try:
        for key, value in metadata.items():
            _add_value(writer, key, value)
        for tensor in tensors:
            n_rows = int(np.prod(tensor.ne[1:], dtype=np.int64))
            byte_shape = (*tensor.ne[:0:-1], tensor.n_bytes // n_rows)
            writer.add_tensor_info(f"{tensor.name}.weight", byte_shape, np.dtype(np.uint8), tensor.n_bytes,
                                   raw_dtype=gguf.GGMLQuantizationType(tensor.ggml_type))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for tensor in tensors:
            writer.write_tensor_data(tensor.encode())  # one at a time: only one encoded copy in memory
        for file in writer.fout or ():
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


def _sync_directory(directory: Path) -> None:
    if os.name == "nt":  # directories cannot be opened there
        return
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
