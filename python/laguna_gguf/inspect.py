"""What a file or directory is, whether it is sound, and what a drafter in it expects of its target."""

from collections import Counter
from collections.abc import Iterable
from os import PathLike
from pathlib import Path
from typing import Any

from laguna_gguf import _native
from laguna_gguf.dflash.checkpoint import read_checkpoint
from laguna_gguf.dflash.config import DrafterConfig, parse_config, read_json
from laguna_gguf.dflash.families import FAMILIES, LAGUNA, family_of_config, family_of_gguf
from laguna_gguf.dflash.gguf_config import find_dialect, open_gguf, parse_gguf_config
from laguna_gguf.errors import CheckpointError, ConfigError, LagunaError
from laguna_gguf.hub import resolve
from laguna_gguf.inspection.scoring import KINDS, inspect_scoring_file
from laguna_gguf.inspection.targets import inspect_target, inspect_target_directory

DRAFTER = "drafter"
TARGET = "target"
OTHER = "other"

_TARGET_ARCHITECTURE = "laguna"


def inspect(path: str | PathLike[str]) -> dict[str, Any]:
    """Describe a GGUF file (any shard of a split one) or a Hugging Face directory, local or `hf://`.

    Returns a dict: path; kind ("drafter", "target", "scoring_head", "segment_probe", "other"); architecture; family (of
    a drafter, also of one that this package cannot use); dialect ("hf", "A", "B", "C" or None); sound (bool) and
    problems (list of messages: why it cannot be used); notes (what is odd but no obstacle); config (drafter: fields of
    DrafterConfig; target: n_layer, n_embd, n_vocab and more; others: keys of their schema); tensors (count, bytes, by
    type). For a drafter shapes (tensor -> ne, ggml order), captured_layers (`outputs`: 0-based layer outputs, `inputs`:
    the +1 numbering of GGUF and EAGLE keys) and defaults (fields left out -> value used). For a target tokenizer and
    drafters (what a drafter needs to fit, and which published ones do).
    Raises CheckpointError only when there is nothing at the path.
    """
    source = resolve(path)
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
        "notes": [],
        "config": {},
        "tensors": {},
    }
    try:
        if source.is_dir():
            _inspect_directory(source, report)
        else:
            _inspect_file(source, report)
    except LagunaError as error:
        report["problems"].append(str(error))
    report["sound"] = not report["problems"]
    return report


def _inspect_directory(source: Path, report: dict[str, Any]) -> None:
    if not (source / "config.json").is_file():  # opening a FIFO would wait
        raise CheckpointError(f"{source}: no config.json")
    config = read_json(source / "config.json")
    if not isinstance(config, dict):
        raise ConfigError(f"{source}: config.json is not an object")
    architectures = config.get("architectures")
    report["architecture"] = architectures[0] if isinstance(architectures, list) and architectures else None
    family = family_of_config(config)
    if family is not None:
        report |= {"kind": DRAFTER, "family": family, "dialect": "hf"}
        if family != LAGUNA:
            raise _foreign(source, family, "architectures", architectures)
        parsed, defaults = parse_config(source)
        _describe_config(parsed, defaults, report)
        _describe_weights(source, report)
    elif config.get("model_type") == _TARGET_ARCHITECTURE:
        report["kind"] = TARGET
        inspect_target_directory(source, config, report)


def _inspect_file(source: Path, report: dict[str, Any]) -> None:
    file = open_gguf(source)
    arch = file.get("general.architecture")
    report["architecture"] = arch
    report["gguf"] = {"version": file.version, "alignment": file.alignment, "files": len(file.paths)}
    report["tensors"] = _summary((t.ggml_type, t.n_bytes) for t in file.tensors())
    family = family_of_gguf(arch, file.keys(), (t.name for t in file.tensors()))
    if family is not None:
        report |= {"kind": DRAFTER, "family": family}
        report["dialect"] = find_dialect(file).name  # raises for other families, naming them
        report["family"] = LAGUNA
        parsed = parse_gguf_config(file)
        _describe_config(parsed.config, parsed.defaults, report)
        _describe_weights(source, report)
    elif isinstance(arch, str) and arch in KINDS:
        report["kind"] = KINDS[arch]
        inspect_scoring_file(file, arch, report)
    elif arch == _TARGET_ARCHITECTURE:
        report["kind"] = TARGET
        inspect_target(file, arch, report)


def _foreign(source: Path, family: str, field: str, found: Any) -> ConfigError:
    return ConfigError(f"{source}: {FAMILIES[family]}: {field} is {found!r}, needed {FAMILIES[LAGUNA]}")


def _describe_config(config: DrafterConfig, defaults: dict[str, Any], report: dict[str, Any]) -> None:
    report["config"] = config.as_dict()
    report["captured_layers"] = captured_layers(config)
    report["defaults"] = dict(defaults)


def _describe_weights(source: Path, report: dict[str, Any]) -> None:
    checkpoint = read_checkpoint(source)
    report["defaults"] = dict(checkpoint.defaults)
    report["shapes"] = {name: list(t.ne) for name, t in checkpoint.tensors.items()}
    if checkpoint.dropped:
        report["dropped"] = list(checkpoint.dropped)
    if checkpoint.quantised:
        report["quantised"] = dict(checkpoint.quantised)
    if not report["tensors"]:
        report["tensors"] = _summary((t.ggml_type, t.n_bytes) for t in checkpoint.tensors.values())


def captured_layers(config: DrafterConfig) -> dict[str, list[int]]:
    """The target's captured layers in both numberings in use."""
    return {"outputs": list(config.target_layer_ids), "inputs": [i + 1 for i in config.target_layer_ids]}


def _summary(tensors: Iterable[tuple[int, int]]) -> dict[str, Any]:
    entries = list(tensors)
    types = Counter(_native.type_name(ggml_type) for ggml_type, _ in entries)
    return {"count": len(entries), "bytes": sum(n for _, n in entries), "types": dict(types)}
