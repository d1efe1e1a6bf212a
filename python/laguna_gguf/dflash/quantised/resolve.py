"""From the stored tensors of a Hugging Face directory to one weight a module, quantised or not.

A module is what its tensors make it: a plain weight loads whatever the configuration declares; a quantised one must
also be declared, with the same kind, group size and width.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from laguna_gguf.dflash.config import DrafterConfig
from laguna_gguf.dflash.names import hf_names, is_norm
from laguna_gguf.dflash.quantised import declared as d
from laguna_gguf.dflash.quantised.declared import Declared, Scheme
from laguna_gguf.dflash.quantised.fp8 import fp8_weight
from laguna_gguf.dflash.quantised.int_pack import int_pack_weight
from laguna_gguf.dflash.quantised.mlx import mlx_weight
from laguna_gguf.dflash.quantised.nvfp4 import nvfp4_weight
from laguna_gguf.dflash.quantised.weight import QuantisedWeight
from laguna_gguf.dflash.safetensors_dir import GGML_TYPES, StoredTensor
from laguna_gguf.errors import CheckpointError, ConfigError

Weight = StoredTensor | QuantisedWeight

DROPPED = frozenset({
    "input_scale", "input_global_scale", "input_zero_point", "output_scale", "output_zero_point",
    "q_scale", "k_scale", "v_scale", "kv_scale", "prob_scale", "q_zero_point", "k_zero_point", "v_zero_point",
})  # fmt: skip
"""Ranges of activations and of the KV cache: they say how to round at run time and change no weight."""

_WEIGHT = "weight"
_PARTS = frozenset({
    "weight_packed", "weight_scale", "weight_global_scale", "weight_scale_2", "weight_scale_inv", "weight_shape",
    "weight_zero_point", "weight_g_idx", "scales", "biases",
})  # fmt: skip


@dataclass(frozen=True)
class Resolved:
    """What a directory's tensors stand for."""

    weights: dict[str, Weight]
    """Module -> its weight. Tensors that belong to none keep their name, and are refused as unknown later."""
    dropped: list[str] = field(default_factory=list)
    """Stored tensors that are left out (see DROPPED), sorted."""


def resolve(tensors: Mapping[str, StoredTensor], config: DrafterConfig, declared: Declared, source: Path) -> Resolved:
    """Find the weight of every module; `tensors` by name without prefix.

    CheckpointError for tensors that are missing or contradict each other, ConfigError for quantised ones that the
    configuration does not declare like that.
    """
    matrices, norms = _modules(config)
    weights: dict[str, Weight] = {}
    parts: dict[str, dict[str, StoredTensor]] = {}
    dropped = []
    for name, tensor in tensors.items():
        module, _, part = name.rpartition(".")
        if part in DROPPED and (module in matrices or re.fullmatch(r"layers\.\d+\.self_attn(\.attn)?", module)):
            dropped.append(tensor.key)
        elif part == _WEIGHT or (part in _PARTS and module in matrices | norms):
            parts.setdefault(module, {})[part] = tensor
        else:
            weights[name] = tensor
    for module, stored in parts.items():
        if module in weights:
            raise CheckpointError(f"{source}: tensor {module} occurs with and without '.{_WEIGHT}'")
        if stored.keys() == {_WEIGHT} and (module not in matrices or stored[_WEIGHT].dtype in GGML_TYPES):
            weights[module] = stored[_WEIGHT]
        elif module in norms:
            raise CheckpointError(
                f"{source}: {module} has {_listed(stored)}, needed a plain {module}.{_WEIGHT}: norms "
                "are never quantised"
            )
        else:
            weights[module] = _quantised(module, stored, declared, source)
    return Resolved(weights, sorted(dropped))


def _modules(config: DrafterConfig) -> tuple[set[str], set[str]]:
    """Names of the matrices (fused and split) and of the norms of a drafter."""
    names = hf_names(config)
    norms = {part for internal, parts in names.items() if is_norm(internal) for part in parts}
    matrices = {part for internal, parts in names.items() if not is_norm(internal) for part in parts}
    matrices |= {f"layers.{layer}.self_attn.qkv_proj" for layer in range(config.num_hidden_layers)}
    return matrices, norms


def _quantised(module: str, parts: Mapping[str, StoredTensor], declared: Declared, source: Path) -> QuantisedWeight:
    """The weight of a matrix that is more than one plain tensor."""
    if _WEIGHT in parts and "weight_packed" in parts:
        raise CheckpointError(f"{source}: {module} has both {_WEIGHT} and weight_packed, needed one of them")
    carrier = parts.get("weight_packed") or parts.get(_WEIGHT)
    if carrier is None:
        raise CheckpointError(f"{source}: {module} has {_listed(parts)}, but neither {_WEIGHT} nor weight_packed")
    form = ("weight_packed" if "weight_packed" in parts else _WEIGHT, carrier.dtype)
    match form:
        case "weight_packed", "U8":
            _declared(module, d.NVFP4, declared, source)
            names = ("weight_packed", "weight_scale", "weight_global_scale")
            _, scale, global_scale = _take(module, parts, source, *names)
            return nvfp4_weight(module, carrier, scale, global_scale, reciprocal=True)
        case "weight", "U8":
            _declared(module, d.NVFP4, declared, source)
            _, scale, global_scale = _take(module, parts, source, _WEIGHT, "weight_scale", "weight_scale_2")
            return nvfp4_weight(module, carrier, scale, global_scale, reciprocal=False)
        case "weight_packed", "I32":
            scheme = _declared(module, d.INT_PACK, declared, source)
            return _int_pack(module, parts, scheme, source)
        case "weight", "F8_E4M3":
            scheme = _declared(module, d.FP8, declared, source)
            name = "weight_scale_inv" if "weight_scale_inv" in parts else "weight_scale"
            _, scale = _take(module, parts, source, _WEIGHT, name)
            return fp8_weight(module, carrier, scale, strategy=scheme.strategy, block=scheme.block)
        case "weight", "U32":
            scheme = _declared(module, d.MLX, declared, source)
            _, scales, biases = _take(module, parts, source, _WEIGHT, "scales", "biases")
            assert scheme.group_size is not None
            return mlx_weight(module, carrier, scales, biases, bits=scheme.bits, group_size=scheme.group_size)
    if carrier.dtype in GGML_TYPES and form[0] == _WEIGHT:
        raise CheckpointError(
            f"{source}: {module} has {_listed(parts)} and a weight of dtype {carrier.dtype}, needed the weight alone"
        )
    raise CheckpointError(
        f"{carrier.path}: tensor {carrier.key} has dtype {carrier.dtype}, needed one of "
        f"{', '.join(GGML_TYPES)}, or quantised U8 (nvfp4), F8_E4M3 (fp8), I32 (int4 in "
        "weight_packed), U32 (MLX)"
    )


def _int_pack(module: str, parts: Mapping[str, StoredTensor], scheme: Scheme, source: Path) -> QuantisedWeight:
    needed = ["weight_packed", "weight_scale", "weight_shape"]
    if "weight_g_idx" in parts:
        raise CheckpointError(f"{source}: {module}.weight_g_idx: columns in activation order, needed groups in order")
    if not scheme.symmetric:
        needed.append("weight_zero_point")
    elif "weight_zero_point" in parts:
        raise CheckpointError(f"{source}: {module}.weight_zero_point is there, but {scheme.field}.symmetric is true")
    packed, scale, shape, *zero_point = _take(module, parts, source, *needed)
    return int_pack_weight(
        module,
        packed,
        scale,
        shape,
        zero_point[0] if zero_point else None,
        bits=scheme.bits,
        group_size=scheme.group_size,
    )


def _declared(module: str, kind: str, declared: Declared, source: Path) -> Scheme:
    """The scheme for a module whose tensors are of a kind; ConfigError unless the configuration agrees."""
    try:
        scheme = declared.scheme(module)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from error
    if scheme is None:
        raise ConfigError(
            f"{source}: {declared.field}: {module} is stored as {kind}, needed a scheme for it; found "
            "none (missing, not targeted, or excluded)"
        )
    if scheme.kind != kind:
        raise ConfigError(f"{source}: {scheme.field}: {module} is declared as {scheme.kind}, its tensors are {kind}")
    return scheme


def _take(module: str, parts: Mapping[str, StoredTensor], source: Path, *names: str) -> list[StoredTensor]:
    """Exactly these parts of a module; CheckpointError names those missing or too many."""
    missing = [name for name in names if name not in parts]
    if missing:
        raise CheckpointError(
            f"{source}: tensor {module}.{missing[0]} is missing, needed beside {module}.{names[0]} "
            f"of dtype {parts[names[0]].dtype}"
        )
    extra = sorted(parts.keys() - set(names))
    if extra:
        raise CheckpointError(
            f"{source}: unexpected tensor {module}.{extra[0]} beside {module}.{names[0]} of dtype "
            f"{parts[names[0]].dtype}, needed only {', '.join(names)}"
        )
    return [parts[name] for name in names]


def _listed(parts: Mapping[str, StoredTensor]) -> str:
    return ", ".join(sorted(parts))
