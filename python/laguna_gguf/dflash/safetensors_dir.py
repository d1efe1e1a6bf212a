"""Safetensors files of a Hugging Face directory, single or sharded, checked before a tensor is read."""

import struct
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
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


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor is; `shape` has the contiguous axis last."""

    key: str
    file: Any
    path: Path
    dtype: str
    shape: tuple[int, ...]

    def read(self) -> NDArray[np.uint8]:
        """The raw bytes, flat (a copy)."""
        try:
            array = self.file.get_tensor(self.key)
        except (SafetensorError, OSError, ValueError) as error:
            raise CheckpointError(f"{self.path}: tensor {self.key} cannot be read ({error})") from error
        return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


class SafetensorsDir(AbstractContextManager["SafetensorsDir"]):
    """All tensors of a directory by key. CheckpointError for missing, damaged or contradictory files."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.tensors: dict[str, StoredTensor] = {}
        self._open_files: list[Any] = []
        try:
            for path, indexed_keys in self._shards():
                self._open(path, indexed_keys)
        except BaseException:
            self._close()
            raise

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
                raise CheckpointError(f"{index_path}: shard name {name!r} of tensor {key}, needed a plain file name "
                                      "inside the directory")
            shards.setdefault(name, set()).add(key)
        if len(shards) > MAX_SHARDS:
            raise CheckpointError(f"{index_path}: {len(shards)} shards, at most {MAX_SHARDS} are accepted")
        return [(self.directory / name, keys) for name, keys in shards.items()]

    def _open(self, path: Path, indexed_keys: set[str] | None) -> None:
        if not path.is_file():
            raise CheckpointError(f"{path}: missing shard")
        _check_header(path)
        try:
            file = safe_open(path, framework="np").__enter__()
            self._open_files.append(file)
            keys = set(file.keys())
            if indexed_keys is not None and keys != indexed_keys:
                missing, extra = sorted(indexed_keys - keys), sorted(keys - indexed_keys)
                raise CheckpointError(f"{path}: not what {INDEX_FILE} says: missing {missing}, not listed {extra}")
            for key in keys:
                part = file.get_slice(key)
                self.tensors[key] = StoredTensor(key, file, path, str(part.get_dtype()), tuple(part.get_shape()))
        except (SafetensorError, OSError, ValueError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"{path}: damaged safetensors file ({error})") from error

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def _close(self) -> None:
        while self._open_files:
            self._open_files.pop().__exit__(None, None, None)


def _is_plain_name(name: str) -> bool:
    return name not in ("", ".", "..") and not any(c in name for c in '/\\:\0')


def _check_header(path: Path) -> None:
    """The library keeps the last of two equal keys; which one was meant cannot be known, so refuse."""
    try:
        with path.open("rb") as file:
            prefix = file.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            if not 2 <= length <= min(MAX_HEADER_BYTES, path.stat().st_size - 8):
                raise CheckpointError(f"{path}: damaged safetensors file (a header of {length} bytes in a file of "
                                      f"{path.stat().st_size})")
            header = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from error
    try:
        parse_json(header, str(path))
    except ConfigError as error:
        raise CheckpointError(str(error)) from error
