"""Reading a drafter's weights from a Hugging Face directory or a GGUF file, into one normal form."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from laguna_gguf import _native, hub
from laguna_gguf.dflash import names
from laguna_gguf.dflash.config import DrafterConfig, parse_config, read_json
from laguna_gguf.dflash.gguf_config import find_dialect, open_gguf, parse_gguf_config
from laguna_gguf.dflash.quantised import Declared, QuantisedWeight, Weight, parse_declared, resolve
from laguna_gguf.dflash.safetensors_dir import GGML_TYPES, SafetensorsDir, StoredTensor
from laguna_gguf.dflash.tensor_data import F32, TensorData
from laguna_gguf.errors import CheckpointError, ConfigError

__all__ = ["F32", "Checkpoint", "TensorData", "is_drafter", "read_checkpoint"]

_WEIGHT = ".weight"
_PREFIX = "model."
_ROWS = " rows"
_NOT_WEIGHTS = ("i8", "i16", "i32", "i64", "f64")


@dataclass(frozen=True)
class Checkpoint:
    """A complete drafter: exactly the tensors of `names.internal_shapes`, finite, norms in float32.

    Weights are views of the mapped source wherever it stores them in a type of ggml's.
    """

    config: DrafterConfig
    tensors: dict[str, TensorData]
    dialect: str
    """"hf", "A", "B" or "C"."""
    source: Path
    defaults: dict[str, Any] = field(default_factory=dict)
    """Fields that the source leaves out and the values used (field -> value)."""
    origins: dict[str, list[str]] = field(default_factory=dict)
    """Internal name -> names in the source."""
    context_length: int | None = None
    gguf: _native.GgufFile | None = None
    """The open source when it is a GGUF file (its tokenizer keys are read from it)."""
    dropped: list[str] = field(default_factory=list)
    """Tensors of the source that a drafter's weights do not need: scales of activations and of the KV cache."""
    quantised: dict[str, str] = field(default_factory=dict)
    """Internal name -> how the source stores it ("nvfp4 ..."); only weights that had to be dequantised."""

    def native_tensors(self) -> dict[str, tuple[int, tuple[int, ...], NDArray[np.uint8]]]:
        """The argument that the native Drafter takes."""
        return {name: (t.ggml_type, t.ne, t.data) for name, t in self.tensors.items()}


def read_checkpoint(path: str | PathLike[str]) -> Checkpoint:
    """Read a drafter from a Hugging Face directory (config.json and safetensors) or a GGUF file of any dialect.

    Both can also be a `hf://` source or a repository in a Hugging Face cache (see hub.py). Quantised directories are
    dequantised when a tensor's data is asked for.

    Raises ConfigError when the configuration is not that of a Laguna DFlash drafter, CheckpointError when files are
    missing or damaged, tensors are missing, unknown, misshapen or not finite.
    """
    source = hub.resolve(path)
    try:
        if source.is_dir():
            return _read_directory(source)
        if not source.exists():
            raise CheckpointError(f"{str(source)!r}: no such file or directory")
    except OSError as error:
        raise CheckpointError(f"{source}: cannot be read ({error})") from error
    if source.suffix in (".safetensors", ".json"):
        raise CheckpointError(f"{source}: give the directory that holds it")
    return _read_gguf(source)


# Hugging Face directory


def _read_directory(source: Path) -> Checkpoint:
    if not (source / "config.json").is_file():
        raise CheckpointError(f"{source}: no config.json")
    config, defaults = parse_config(source)
    raw = read_json(source / "config.json")
    declared = _parse_declared(raw, source)
    resolved = resolve(_without_prefix(SafetensorsDir(source).tensors, source), config, declared, source)
    stored = resolved.weights
    fused = _fused_layers(stored, config, source)
    _check_captured(config, _columns(stored, "fc"), _count_aux(stored, "aux_hidden_norms."), source)
    expected = names.hf_names(config)
    fused_names = {f"layers.{layer}.self_attn.qkv_proj" for layer in fused}
    split_names = {f"layers.{layer}.self_attn.{letter}_proj" for layer in fused for letter in "qkv"}
    wanted = {n for parts in expected.values() for n in parts} - split_names | fused_names
    _check_names(stored, wanted, source)
    tensors: dict[str, TensorData] = {}
    for layer in fused:
        name = f"layers.{layer}.self_attn.qkv_proj"
        for internal, part in _split_qkv(stored[name], name, config).items():
            key = f"blk.{layer}.{internal}"
            tensors[key] = part
            expected[key] = [f"{name}{_ROWS}"]
    for internal, ne in names.internal_shapes(config).items():
        if internal not in tensors:
            tensors[internal] = _load_parts(stored, expected[internal], ne, internal)
    tensors = {name: tensors[name] for name in names.internal_shapes(config)}
    labels = _quantised_labels(stored, expected)
    # What is dequantised was checked when its type was found.
    _check_finite({name: t for name, t in tensors.items() if name not in labels}, expected, source)
    context_length = raw.get("max_position_embeddings")
    return Checkpoint(
        config=config,
        tensors=tensors,
        dialect="hf",
        source=source,
        defaults=defaults,
        origins=expected,
        context_length=context_length if type(context_length) is int and context_length > 0 else None,
        dropped=resolved.dropped,
        quantised=labels,
    )


def _parse_declared(raw: Mapping[str, Any], source: Path) -> Declared:
    try:
        return parse_declared(raw, source)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from error


def _without_prefix(tensors: Mapping[str, StoredTensor], source: Path) -> dict[str, StoredTensor]:
    stored: dict[str, StoredTensor] = {}
    for key, tensor in tensors.items():
        name = key.removeprefix(_PREFIX)
        if name in stored:
            raise CheckpointError(f"{source}: tensor {name} occurs with and without the prefix {_PREFIX!r}")
        stored[name] = tensor
    return stored


def _fused_layers(stored: Mapping[str, Weight], config: DrafterConfig, source: Path) -> list[int]:
    """The layers whose q, k and v are one tensor."""
    fused = []
    for layer in range(config.num_hidden_layers):
        prefix = f"layers.{layer}.self_attn."
        split = [letter for letter in "qkv" if f"{prefix}{letter}_proj" in stored]
        if f"{prefix}qkv_proj" in stored:
            if split:
                raise CheckpointError(
                    f"{source}: {prefix}qkv_proj and {prefix}{split[0]}_proj in one layer, needed "
                    "either the fused or the split form"
                )
            fused.append(layer)
        elif 0 < len(split) < 3:
            missing = next(letter for letter in "qkv" if letter not in split)
            raise CheckpointError(f"{source}: {prefix}{missing}_proj is missing beside {prefix}{split[0]}_proj")
        elif not split:
            fused.append(layer)  # reported as a missing qkv_proj
    return fused


def _fused_shape(config: DrafterConfig) -> tuple[int, int]:
    n_heads = config.num_attention_heads + 2 * config.num_key_value_heads
    return config.hidden_size, n_heads * config.head_dim


def _split_qkv(fused: Weight, name: str, config: DrafterConfig) -> dict[str, TensorData]:
    shapes = names.block_shapes(config)
    _check_weight(fused, name, _fused_shape(config))
    parts: dict[str, TensorData] = {}
    begin = 0
    for part in names.QKV:
        end = begin + shapes[part][1]
        parts[part] = _rows(fused, begin, end)
        begin = end
    return parts


def _check_weight(weight: Weight, name: str, ne: tuple[int, ...]) -> None:
    if weight.shape != ne[::-1]:
        raise CheckpointError(f"{weight.path}: tensor {name} has shape {list(weight.shape)}, needed {list(ne[::-1])}")
    if isinstance(weight, StoredTensor) and weight.dtype not in GGML_TYPES:
        raise CheckpointError(
            f"{weight.path}: tensor {name} has dtype {weight.dtype}, needed one of {', '.join(GGML_TYPES)}"
        )


def _rows(weight: Weight, begin: int, end: int) -> TensorData:
    """Some rows of a checked weight; nothing is copied before its bytes are asked for."""
    if isinstance(weight, QuantisedWeight):
        return weight.tensor(begin, end)
    rows = weight.view.reshape(weight.shape[0], -1)[begin:end].reshape(-1)
    ne = (*weight.shape[:0:-1], end - begin)
    return TensorData(GGML_TYPES[weight.dtype], ne, rows if weight.aligned else rows.copy)


def _load(weight: Weight, name: str, ne: tuple[int, ...]) -> TensorData:
    _check_weight(weight, name, ne)
    return _rows(weight, 0, ne[-1])


def _load_parts(stored: Mapping[str, Weight], parts: list[str], ne: tuple[int, ...], internal: str) -> TensorData:
    if internal == names.AUX_NORM:
        return _stack_norms([_load(stored[part], part, ne[:1]) for part in parts])
    tensor = _load(stored[parts[0]], parts[0], ne)
    return _as_f32(tensor) if names.is_norm(internal) else tensor


def _columns(stored: Mapping[str, Weight], name: str) -> int | None:
    return stored[name].shape[-1] if name in stored and stored[name].shape else None


def _quantised_labels(stored: Mapping[str, Weight], origins: Mapping[str, list[str]]) -> dict[str, str]:
    """Internal name -> how it is stored, of the weights that are dequantised."""
    weights = {name: stored.get(parts[0].removesuffix(_ROWS)) for name, parts in origins.items()}
    return {name: weight.label for name, weight in weights.items() if isinstance(weight, QuantisedWeight)}


# GGUF file


def _read_gguf(source: Path) -> Checkpoint:
    file = open_gguf(source)
    parsed = parse_gguf_config(file)
    config, dialect = parsed.config, parsed.dialect
    stored = {t.name.removesuffix(_WEIGHT): t for t in file.tensors()}
    if len(stored) != len(file.tensors()):
        raise CheckpointError(f"{source}: a tensor occurs with and without {_WEIGHT!r}")
    fc = stored.get(dialect.fc)
    stacked = stored.get(dialect.aux_norms)
    n_aux = (
        (stacked.ne[1] if len(stacked.ne) > 1 else 1)
        if stacked is not None
        else (_count_aux(stored, dialect.aux_norms.removesuffix("{i}")))
    )
    _check_captured(config, fc.ne[0] if fc is not None and fc.ne else None, n_aux, source)
    origins = names.gguf_names(config, dialect)
    _check_names(stored, {n for parts in origins.values() for n in parts}, source)
    tensors = {}
    for internal, ne in names.internal_shapes(config).items():
        if internal == names.AUX_NORM and "{i}" in dialect.aux_norms:
            parts = [_checked(stored[part], part, ne[:1], source) for part in origins[internal]]
            tensors[internal] = _stack_norms(parts)
            continue
        tensor = _checked(stored[origins[internal][0]], origins[internal][0], ne, source)
        tensors[internal] = _as_f32(tensor) if names.is_norm(internal) else tensor
    _check_finite(tensors, origins, source)
    return Checkpoint(
        config=config,
        tensors=tensors,
        dialect=dialect.name,
        source=source,
        defaults=parsed.defaults,
        origins=origins,
        context_length=parsed.context_length,
        gguf=file,
    )


def _checked(tensor: _native.GgufTensor, name: str, ne: tuple[int, ...], source: Path) -> TensorData:
    if _without_trailing_ones(tensor.ne) != _without_trailing_ones(ne):
        raise CheckpointError(f"{source}: tensor {name} has shape {list(tensor.ne)}, needed {list(ne)} (ggml order)")
    if _native.type_name(tensor.ggml_type) in _NOT_WEIGHTS:
        raise CheckpointError(
            f"{source}: tensor {name} has type {_native.type_name(tensor.ggml_type)}, which is not one for weights"
        )
    return TensorData(tensor.ggml_type, ne, tensor.data())


def _without_trailing_ones(ne: tuple[int, ...]) -> tuple[int, ...]:
    while ne and ne[-1] == 1:
        ne = ne[:-1]
    return ne


# Both


def _check_captured(config: DrafterConfig, fc_columns: int | None, n_aux: int, source: Path) -> None:
    """Another number of captured layers than drafter layers is legal only when fc and the aux norms both have it."""
    n_captured = len(config.target_layer_ids)
    if n_captured == config.num_hidden_layers:
        return
    if fc_columns != n_captured * config.hidden_size or n_aux != n_captured:
        raise ConfigError(
            f"{source}: target_layer_ids: found {n_captured} layers, needed num_hidden_layers = "
            f"{config.num_hidden_layers} (fc has {fc_columns} columns, {n_aux} aux norms)"
        )


def _count_aux(stored: Iterable[str], prefix: str) -> int:
    return sum(1 for name in stored if name.startswith(prefix) and name.removeprefix(prefix).isdecimal())


def _check_names(stored: Iterable[str], wanted: set[str], source: Path) -> None:
    found = set(stored)
    missing, unknown = sorted(wanted - found), sorted(found - wanted)
    if not missing and not unknown:
        return
    problems = [
        f"{label} {', '.join(part[:8])}{f' and {len(part) - 8} more' if len(part) > 8 else ''}"
        for label, part in (("missing", missing), ("unknown", unknown))
        if part
    ]
    raise CheckpointError(f"{source}: tensors do not match the configuration: {'; '.join(problems)}")


def _as_f32(tensor: TensorData) -> TensorData:
    if tensor.ggml_type == F32:
        return tensor
    values = _native.dequantize(tensor.data, tensor.ggml_type, tensor.ne[0])
    return TensorData(F32, tensor.ne, values.reshape(-1).view(np.uint8))


def _stack_norms(parts: list[TensorData]) -> TensorData:
    data = np.concatenate([_as_f32(part).data for part in parts])
    return TensorData(F32, (parts[0].ne[0], len(parts)), data)


def _check_finite(tensors: Mapping[str, TensorData], origins: Mapping[str, list[str]], source: Path) -> None:
    for name, tensor in tensors.items():
        if not _native.all_finite(tensor.data, tensor.ggml_type, tensor.ne[0]):
            raise CheckpointError(f"{source}: tensor {' / '.join(origins[name])} has values that are not finite")


def is_drafter(path: str | PathLike[str]) -> bool:
    """Whether a path is a Laguna drafter by its configuration alone (its weights are not looked at)."""
    try:
        source = hub.resolve(path)
        if source.is_dir():
            parse_config(source)
        else:
            find_dialect(open_gguf(source))
    except (CheckpointError, ConfigError):
        return False
    return True
