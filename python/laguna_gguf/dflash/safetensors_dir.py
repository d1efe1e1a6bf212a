"""Safetensors files of a Hugging Face directory, single or sharded, checked before a tensor is read."""

import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from laguna_gguf.dflash.config import parse_json, read_json
from laguna_gguf.errors import CheckpointError, ConfigError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_SHARDS = 4096
MAX_HEADER_BYTES = 100_000_000
"""As in the safetensors library."""

GGML_TYPES = {"F32": 0, "F16": 1, "BF16": 30}
"""Accepted dtypes -> ggml type."""

_ALIGNMENT = 4
"""Bytes of the largest weight type that is read in place (f32)."""


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor is; `shape` has the contiguous axis last."""

    key: str
    path: Path
    dtype: str
    """As the header names it: F32, BF16, F8_E4M3, U8, ..."""
    shape: tuple[int, ...]
    view: NDArray[np.uint8] = field(repr=False)
    """The raw bytes, flat: a read-only view of the mapped file."""

    @property
    def aligned(self) -> bool:
        """Whether `view` may be read as numbers in place; files of the safetensors library always are."""
        return self.view.ctypes.data % _ALIGNMENT == 0


class SafetensorsDir:
    """All tensors of a directory by key. CheckpointError for missing, damaged or contradictory files.

    Files are mapped, not read: a tensor costs memory only while its pages are used. A mapping lives as long as a view.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.tensors: dict[str, StoredTensor] = {}
        for path, indexed_keys in self._shards():
            self._open(path, indexed_keys)

    def _shards(self) -> list[tuple[Path, set[str] | None]]:
        if (self.directory / SINGLE_FILE).is_file():
            return [(self.directory / SINGLE_FILE, None)]
        index_path = self.directory / INDEX_FILE
        if not index_path.is_file():
            raise CheckpointError(f"{self.directory}: neither {SINGLE_FILE} nor {INDEX_FILE}")
        try:
            index = read_json(index_path)
        except ConfigError as error:
            raise CheckpointError(str(error)) from error
        weight_map = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{index_path}: no weight_map")
        shards: dict[str, set[str]] = {}
        for key, name in weight_map.items():
            if not isinstance(name, str) or not _is_plain_name(name):
                raise CheckpointError(
                    f"{index_path}: shard name {name!r} of tensor {key}, needed a plain file name inside the directory"
                )
            shards.setdefault(name, set()).add(key)
        if len(shards) > MAX_SHARDS:
            raise CheckpointError(f"{index_path}: {len(shards)} shards, at most {MAX_SHARDS} are accepted")
        return [(self.directory / name, keys) for name, keys in shards.items()]

    def _open(self, path: Path, indexed_keys: set[str] | None) -> None:
        if not path.is_file():
            raise CheckpointError(f"{path}: missing shard")
        header = _read_header(path)
        try:
            # The library checks that shapes, dtypes and offsets fit the file.
            with safe_open(path, framework="np") as file:
                keys = set(file.keys())
            mapped = np.memmap(path, np.uint8, mode="r")
        except (SafetensorError, OSError, ValueError) as error:
            raise CheckpointError(f"{path}: damaged safetensors file ({error})") from error
        if indexed_keys is not None and keys != indexed_keys:
            missing, extra = sorted(indexed_keys - keys), sorted(keys - indexed_keys)
            raise CheckpointError(f"{path}: not what {INDEX_FILE} says: missing {missing}, not listed {extra}")
        for key in sorted(keys):  # so that of several faults always the same one is reported
            entry = header.entries[key]
            begin, end = (header.data_begin + offset for offset in entry["data_offsets"])
            view = np.asarray(mapped[begin:end])
            if view.size != end - begin:
                raise CheckpointError(f"{path}: damaged safetensors file (tensor {key} ends after the file)")
            self.tensors[key] = StoredTensor(key, path, entry["dtype"], tuple(entry["shape"]), view)


def _is_plain_name(name: str) -> bool:
    return name not in ("", ".", "..") and not any(c in name for c in "/\\:\0")


@dataclass(frozen=True)
class _Header:
    entries: dict[str, Any]
    data_begin: int


def _read_header(path: Path) -> _Header:
    """The library keeps the last of two equal keys; which one was meant cannot be known, so refuse."""
    try:
        with path.open("rb") as file:
            prefix = file.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            if not 2 <= length <= min(MAX_HEADER_BYTES, path.stat().st_size - 8):
                raise CheckpointError(
                    f"{path}: damaged safetensors file (a header of {length} bytes in a file of {path.stat().st_size})"
                )
            header = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from error
    try:
        entries = parse_json(header, str(path))
    except ConfigError as error:
        raise CheckpointError(str(error)) from error
    if not isinstance(entries, dict):
        raise CheckpointError(f"{path}: damaged safetensors file (the header is not an object)")
    return _Header(entries, 8 + length)
