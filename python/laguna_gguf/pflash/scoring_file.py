"""What scoring heads and segment probes have in common: a schema, and a binding to one drafter file by its hash."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from laguna_gguf import _native
from laguna_gguf.convert.writer import PlannedTensor, write_gguf
from laguna_gguf.errors import CheckpointError, TargetMismatchError
from laguna_gguf.inspection.scoring import inspect_scoring_file
from laguna_gguf.pflash.drafter_file import DrafterFile
from laguna_gguf.pflash.hashing import file_sha256


def read_scoring_file(path: str | os.PathLike[str], arch: str, drafter: DrafterFile) -> tuple[_native.GgufFile, dict]:
    """(file, its checked configuration) of a head or probe that belongs to `drafter`.

    CheckpointError: missing, damaged, of another kind, or not as its schema says. TargetMismatchError: made for another
    drafter file, or of another width.
    """
    if not Path(path).is_file():
        raise CheckpointError(f"{path} not found; needed a GGUF file of architecture {arch!r}")
    file = _native.GgufFile(str(path))
    found = file.get("general.architecture")
    if found != arch:
        raise CheckpointError(f"{path} has architecture {found!r}; needed {arch!r}")
    if drafter.arch != "qwen35":
        raise TargetMismatchError(
            f"{path}: no {arch} file is defined for drafters of architecture {drafter.arch!r}; leave it out"
        )
    report: dict[str, Any] = {"problems": [], "config": {}}
    inspect_scoring_file(file, arch, report)
    if report["problems"]:
        raise CheckpointError(f"{path} is refused: {'; '.join(report['problems'])}")
    config = report["config"]
    if config["n_embd"] != drafter.n_embd:
        raise TargetMismatchError(
            f"{path} reads taps of width {config['n_embd']}; the drafter's are {drafter.n_embd} wide"
        )
    wanted, actual = config["runtime_gguf_sha256"].lower(), file_sha256(drafter.path)
    if wanted != actual:
        raise TargetMismatchError(
            f"{path} belongs to another drafter: runtime_gguf_sha256 is {wanted}, {drafter.path} has {actual}. "
            "Use the drafter file it was trained on, or train another one"
        )
    return file, config


def read_f32(file: _native.GgufFile, name: str) -> NDArray[np.float32]:
    """A checked f32 tensor in numpy order."""
    tensor = file.tensor(name)
    assert tensor is not None, name
    return tensor.data().view("<f4").reshape(tensor.ne[::-1]).astype(np.float32)


def _bytes(values: NDArray[np.float32]) -> Iterator[NDArray[np.uint8]]:
    yield values.reshape(-1).view(np.uint8)


def write_scoring_file(
    outfile: str | os.PathLike[str],
    arch: str,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, NDArray[np.float32]],
) -> None:
    """Write float32 tensors (numpy order) under their full names; complete or not at all."""
    planned = []
    for name, values in tensors.items():
        data = np.ascontiguousarray(values, dtype="<f4")
        if not np.isfinite(data).all():
            raise CheckpointError(f"{name} holds values that are not finite; nothing was written")
        planned.append(
            PlannedTensor(
                name,
                [],
                int(gguf.GGMLQuantizationType.F32),
                data.shape[::-1],
                data.nbytes,
                partial(_bytes, data),
            )
        )
    write_gguf(Path(outfile), arch, metadata, planned)
