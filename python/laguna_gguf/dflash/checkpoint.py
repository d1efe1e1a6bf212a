"""Reading a drafter's weights from a Hugging Face directory or a GGUF file, into one normal form."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from laguna_gguf import _native
from laguna_gguf.dflash import names
from laguna_gguf.dflash.config import DrafterConfig, parse_config, read_json
from laguna_gguf.dflash.gguf_config import find_dialect, open_gguf, parse_gguf_config
from laguna_gguf.dflash.safetensors_dir import GGML_TYPES, SafetensorsDir, StoredTensor
from laguna_gguf.errors import CheckpointError, ConfigError

F32 = 0
_WEIGHT = ".weight"
_PREFIX = "model."
_NOT_WEIGHTS = ("i8", "i16", "i32", "i64", "f64")


@dataclass(frozen=True)
class TensorData:
    """One weight in ggml's layout: `ne[0]` is the contiguous axis, `data` the flat raw bytes."""

    ggml_type: int
    ne: tuple[int, ...]
    data: NDArray[np.uint8]


@dataclass(frozen=True)
class Checkpoint:
    """A complete drafter: exactly the tensors of `names.internal_shapes`, finite, norms in float32."""

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

    def native_tensors(self) -> dict[str, tuple[int, tuple[int, ...], NDArray[np.uint8]]]:
        """The argument that the native Drafter takes."""
        return {name: (t.ggml_type, t.ne, t.data) for name, t in self.tensors.items()}


def read_checkpoint(path: str | PathLike[str]) -> Checkpoint:
    """Read a drafter from a Hugging Face directory (config.json and safetensors) or a GGUF file of any dialect.

    Raises ConfigError when the configuration is not that of a Laguna DFlash drafter, CheckpointError when files are
    missing or damaged, tensors are missing, unknown, misshapen or not finite.
    """
    source = Path(path)
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
    if raw.get("quantization_config") is not None:
        raise ConfigError(f"{source}: quantization_config: quantised checkpoints are not supported, needed f32, f16 or "
                          "bf16 weights")
    with SafetensorsDir(source) as directory:
        stored, fused = _normalise(directory.tensors, config, source)
        _check_captured(config, _columns(stored, "fc"), _count_aux(stored, "aux_hidden_norms."), source)
        expected = names.hf_names(config)
        fused_names = {f"layers.{layer}.self_attn.qkv_proj" for layer in fused}
        split_names = {f"layers.{layer}.self_attn.{letter}_proj" for layer in fused for letter in "qkv"}
        wanted = {n for parts in expected.values() for n in parts} - split_names | fused_names
        _check_names(stored, wanted, source)
        tensors = {}
        for layer in fused:
            name = f"layers.{layer}.self_attn.qkv_proj"
            for internal, part in _split_qkv(_load(stored[name], name, _fused_shape(config)), config).items():
                key = f"blk.{layer}.{internal}"
                tensors[key] = part
                expected[key] = [f"{name} rows"]
        for internal, ne in names.internal_shapes(config).items():
            if internal not in tensors:
                tensors[internal] = _load_parts(stored, expected[internal], ne, internal)
    tensors = {name: tensors[name] for name in names.internal_shapes(config)}
    _check_finite(tensors, expected, source)
    context_length = raw.get("max_position_embeddings")
    return Checkpoint(
        config=config,
        tensors=tensors,
        dialect="hf",
        source=source,
        defaults=defaults,
        origins=expected,
        context_length=context_length if type(context_length) is int and context_length > 0 else None,
    )


def _normalise(
    tensors: Mapping[str, StoredTensor], config: DrafterConfig, source: Path
) -> tuple[dict[str, StoredTensor], list[int]]:
    """Names without prefix and ".weight", and the layers whose q, k and v are fused."""
    stored: dict[str, StoredTensor] = {}
    for key, tensor in tensors.items():
        name = key.removeprefix(_PREFIX)
        # A bias (or anything else) keeps its suffix and is then an unknown tensor.
        name = name.removesuffix(_WEIGHT) if name.endswith(_WEIGHT) else name
        if name in stored:
            raise CheckpointError(f"{source}: tensor {name} occurs with and without the prefix {_PREFIX!r}")
        stored[name] = tensor
    fused = []
    for layer in range(config.num_hidden_layers):
        prefix = f"layers.{layer}.self_attn."
        split = [letter for letter in "qkv" if f"{prefix}{letter}_proj" in stored]
        if f"{prefix}qkv_proj" in stored:
            if split:
                raise CheckpointError(f"{source}: {prefix}qkv_proj and {prefix}{split[0]}_proj in one layer, needed "
                                      "either the fused or the split form")
            fused.append(layer)
        elif 0 < len(split) < 3:
            missing = next(letter for letter in "qkv" if letter not in split)
            raise CheckpointError(f"{source}: {prefix}{missing}_proj is missing beside {prefix}{split[0]}_proj")
        elif not split:
            fused.append(layer)  # reported as a missing qkv_proj
    return stored, fused


def _fused_shape(config: DrafterConfig) -> tuple[int, int]:
    n_heads = config.num_attention_heads + 2 * config.num_key_value_heads
    return config.hidden_size, n_heads * config.head_dim


def _split_qkv(fused: TensorData, config: DrafterConfig) -> dict[str, TensorData]:
    shapes = names.block_shapes(config)
    rows = fused.data.reshape(fused.ne[1], -1)
    parts: dict[str, TensorData] = {}
    begin = 0
    for name in names.QKV:
        end = begin + shapes[name][1]
        parts[name] = TensorData(fused.ggml_type, shapes[name], rows[begin:end].reshape(-1))
        begin = end
    return parts


def _load(tensor: StoredTensor, name: str, ne: tuple[int, ...]) -> TensorData:
    if tensor.shape != ne[::-1]:
        raise CheckpointError(f"{tensor.path}: tensor {name} has shape {list(tensor.shape)}, needed {list(ne[::-1])}")
    if tensor.dtype not in GGML_TYPES:
        raise CheckpointError(f"{tensor.path}: tensor {name} has dtype {tensor.dtype}, needed one of "
                              f"{', '.join(GGML_TYPES)}")
    return TensorData(GGML_TYPES[tensor.dtype], ne, tensor.read())


def _load_parts(
    stored: Mapping[str, StoredTensor], parts: list[str], ne: tuple[int, ...], internal: str
) -> TensorData:
    if internal == names.AUX_NORM:
        return _stack_norms([_load(stored[part], part, ne[:1]) for part in parts])
    tensor = _load(stored[parts[0]], parts[0], ne)
    return _as_f32(tensor) if names.is_norm(internal) else tensor


def _columns(stored: Mapping[str, StoredTensor], name: str) -> int | None:
    return stored[name].shape[-1] if name in stored and stored[name].shape else None


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
    n_aux = (stacked.ne[1] if len(stacked.ne) > 1 else 1) if stacked is not None else (
        _count_aux(stored, dialect.aux_norms.removesuffix("{i}")))
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
        raise CheckpointError(f"{source}: tensor {name} has type {_native.type_name(tensor.ggml_type)}, which is not "
                              "one for weights")
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
        raise ConfigError(f"{source}: target_layer_ids: found {n_captured} layers, needed num_hidden_layers = "
                          f"{config.num_hidden_layers} (fc has {fc_columns} columns, {n_aux} aux norms)")


def _count_aux(stored: Iterable[str], prefix: str) -> int:
    return sum(1 for name in stored if name.startswith(prefix) and name.removeprefix(prefix).isdecimal())


def _check_names(stored: Iterable[str], wanted: set[str], source: Path) -> None:
    found = set(stored)
    missing, unknown = sorted(wanted - found), sorted(found - wanted)
    if not missing and not unknown:
        return
    problems = [f"{label} {', '.join(part[:8])}{f' and {len(part) - 8} more' if len(part) > 8 else ''}"
                for label, part in (("missing", missing), ("unknown", unknown)) if part]
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
        if Path(path).is_dir():
            parse_config(path)
        else:
            find_dialect(open_gguf(path))
    except (CheckpointError, ConfigError):
        return False
    return True
