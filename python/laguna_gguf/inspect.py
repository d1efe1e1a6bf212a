"""What a file or directory is, whether it is sound, and what a drafter in it expects of its target."""

from collections import Counter
from collections.abc import Iterable
from os import PathLike
from pathlib import Path
from typing import Any

from laguna_gguf import _native
from laguna_gguf.dflash.checkpoint import Checkpoint, read_checkpoint
from laguna_gguf.dflash.config import DrafterConfig, read_json
from laguna_gguf.dflash.gguf_config import find_dialect, open_gguf
from laguna_gguf.errors import CheckpointError, ConfigError, LagunaError

DRAFTER = "drafter"
TARGET = "target"
OTHER = "other"

_DRAFTER_ARCHITECTURES = ("dflash", "dflash-draft")
_TARGET_ARCHITECTURE = "laguna"


def inspect(path: str | PathLike[str]) -> dict[str, Any]:
    """Describe a GGUF file (any shard of a split one) or a Hugging Face directory.

    Returns a dict: path; kind ("drafter", "target", "other"); architecture; dialect ("hf", "A", "B", "C" or None);
    sound (bool) and problems (list of messages: why it cannot be used); config (drafter: fields of DrafterConfig;
    target: n_layer, n_embd, n_vocab); tensors (count, bytes, by type); and for a drafter shapes (tensor -> ne, ggml
    order), captured_layers (`outputs`: 0-based layer outputs, `inputs`: the +1 numbering of GGUF and EAGLE keys) and
    defaults (fields left out -> value used).
    Raises CheckpointError only when there is nothing at the path.
    """
    source = Path(path)
    try:
        exists = source.exists()
    except OSError as error:
        raise CheckpointError(f"{source}: cannot be read ({error})") from error
    if not exists:
        raise CheckpointError(f"{str(source)!r}: no such file or directory")
    report: dict[str, Any] = {
        "path": str(source),
        "kind": OTHER,
        "architecture": None,
        "dialect": None,
        "sound": True,
        "problems": [],
        "config": {},
        "tensors": {},
    }
    try:
        if source.is_dir():
            _inspect_directory(source, report)
        else:
            _inspect_file(source, report)
    except LagunaError as error:
        report["sound"] = False
        report["problems"].append(str(error))
    return report


def _inspect_directory(source: Path, report: dict[str, Any]) -> None:
    config = read_json(source / "config.json")
    if not isinstance(config, dict):
        raise ConfigError(f"{source}: config.json is not an object")
    architectures = config.get("architectures")
    report["architecture"] = architectures[0] if isinstance(architectures, list) and architectures else None
    if "dflash_config" in config:
        report["kind"] = DRAFTER
        report["dialect"] = "hf"
        _describe_drafter(source, report)
    elif config.get("model_type") == _TARGET_ARCHITECTURE:
        report["kind"] = TARGET
        fields = {"n_layer": "num_hidden_layers", "n_embd": "hidden_size", "n_vocab": "vocab_size"}
        report["config"] = {name: config.get(field) for name, field in fields.items()}


def _inspect_file(source: Path, report: dict[str, Any]) -> None:
    file = open_gguf(source)
    arch = file.get("general.architecture")
    report["architecture"] = arch
    report["gguf"] = {"version": file.version, "alignment": file.alignment, "files": len(file.paths)}
    report["tensors"] = _summary((t.ggml_type, t.n_bytes) for t in file.tensors())
    if arch in _DRAFTER_ARCHITECTURES:
        report["kind"] = DRAFTER
        report["dialect"] = find_dialect(file).name
        _describe_drafter(source, report)
    elif arch == _TARGET_ARCHITECTURE:
        report["kind"] = TARGET
        tokens = file.get("tokenizer.ggml.tokens")
        report["config"] = {
            "n_layer": file.get(f"{arch}.block_count"),
            "n_embd": file.get(f"{arch}.embedding_length"),
            "n_vocab": len(tokens) if isinstance(tokens, list) else file.get(f"{arch}.vocab_size"),
        }


def _describe_drafter(source: Path, report: dict[str, Any]) -> None:
    checkpoint = read_checkpoint(source)
    report["dialect"] = checkpoint.dialect
    report["config"] = checkpoint.config.as_dict()
    report["captured_layers"] = captured_layers(checkpoint.config)
    report["defaults"] = dict(checkpoint.defaults)
    report["shapes"] = {name: list(t.ne) for name, t in checkpoint.tensors.items()}
    report["tensors"] = report["tensors"] or _checkpoint_summary(checkpoint)


def captured_layers(config: DrafterConfig) -> dict[str, list[int]]:
    """The target's captured layers in both numberings in use."""
    return {"outputs": list(config.target_layer_ids), "inputs": [i + 1 for i in config.target_layer_ids]}


def _checkpoint_summary(checkpoint: Checkpoint) -> dict[str, Any]:
    return _summary((t.ggml_type, t.data.nbytes) for t in checkpoint.tensors.values())


def _summary(tensors: Iterable[tuple[int, int]]) -> dict[str, Any]:
    entries = list(tensors)
    types = Counter(_native.type_name(ggml_type) for ggml_type, _ in entries)
    return {"count": len(entries), "bytes": sum(n for _, n in entries), "types": dict(types)}
