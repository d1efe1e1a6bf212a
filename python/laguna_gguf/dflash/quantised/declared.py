"""What a checkpoint's configuration says about quantisation: a scheme for each module.

Read from `quantization_config` of config.json (compressed-tensors, ModelOpt, fp8), from `quantization` (MLX), or from
ModelOpt's hf_quant_config.json. The configuration only *declares*: published drafters carry the configuration of a
quantised model beside plain bf16 tensors, so resolve.py looks at the tensors first.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from laguna_gguf.dflash.config import read_json
from laguna_gguf.dflash.quantised import fp8, int_pack, mlx, nvfp4
from laguna_gguf.dflash.quantised.patterns import Matcher, strings
from laguna_gguf.errors import ConfigError

NVFP4 = "nvfp4"
INT_PACK = "int-pack"
FP8 = "fp8"
MLX = "mlx"

FIELD = "quantization_config"
MLX_FIELD = "quantization"
MODELOPT_FILE = "hf_quant_config.json"

_FORMATS = ("nvfp4-pack-quantized", "pack-quantized", "float-quantized", "naive-quantized", "mixed-precision", "dense")
_METHODS = ("compressed-tensors", "modelopt", "fp8", "mlx")
_MAX_GROUP_SIZE = 1 << 16


@dataclass(frozen=True)
class Scheme:
    """How a module's weight is declared to be stored."""

    kind: str
    """NVFP4, INT_PACK, FP8 or MLX."""
    field: str
    """Where the configuration says so, for messages."""
    bits: int = 4
    group_size: int | None = None
    """Columns that share a scale; None: all of a row."""
    strategy: str | None = None
    """fp8: tensor, channel or block; None: the scale's shape decides."""
    block: tuple[int, int] | None = None
    symmetric: bool = True


@dataclass(frozen=True)
class Declared:
    """A parsed configuration. `scheme(module)` is None for modules that it leaves unquantised."""

    field: str
    scheme: Callable[[str], Scheme | None]


def parse_declared(config: Mapping[str, Any], directory: Path) -> Declared:
    """Read what config.json (and hf_quant_config.json) declare. ConfigError names the field, found and needed."""
    field, data = FIELD, config.get(FIELD)
    if data is None and config.get(MLX_FIELD) is not None:
        field, data = MLX_FIELD, config[MLX_FIELD]
    if data is None and (directory / MODELOPT_FILE).is_file():
        field, data = MODELOPT_FILE, read_json(directory / MODELOPT_FILE)
        if isinstance(data, dict):
            data = {"quant_method": "modelopt", **_object(data.get("quantization"), f"{field}: quantization")}
    if data is None:
        return Declared(FIELD, lambda _: None)
    data = _object(data, field)
    method = data.get("quant_method")
    if method is None:
        # MLX writes its settings under both names, without a method.
        method = "mlx" if "bits" in data else "compressed-tensors" if "config_groups" in data else None
    if method == "compressed-tensors":
        return Declared(field, _compressed_tensors(data, field))
    if isinstance(method, str) and method.startswith("modelopt"):
        return Declared(field, _modelopt(data, field))
    if method == "fp8":
        return Declared(field, _fp8(data, field))
    if method == "mlx":
        return Declared(field, _mlx(data, field))
    _reject(f"{field}.quant_method", method, f"one of {', '.join(_METHODS)} (of other methods, give the bf16 drafter)")


# compressed-tensors


def _compressed_tensors(data: Mapping[str, Any], field: str) -> Callable[[str], Scheme | None]:
    _check_format(data.get("format"), f"{field}.format")
    sparsity = data.get("sparsity_config")
    if sparsity and (not isinstance(sparsity, dict) or sparsity.get("format") != "dense"):
        _reject(f"{field}.sparsity_config", sparsity, "dense weights")
    transforms = data.get("transform_config")
    if transforms and (not isinstance(transforms, dict) or transforms.get("config_groups")):
        _reject(f"{field}.transform_config", transforms, "weights that are not rotated")
    ignored = strings(data.get("ignore"), f"{field}.ignore")
    groups: list[tuple[list[str], Scheme]] = []
    for name, value in _object(data.get("config_groups") or {}, f"{field}.config_groups").items():
        group_field = f"{field}.config_groups.{name}"
        group = _object(value, group_field)
        _check_format(group.get("format"), f"{group_field}.format")
        targets = strings(group.get("targets"), f"{group_field}.targets")
        if group.get("weights") is not None:
            weights = _object(group["weights"], f"{group_field}.weights")
            groups.append((targets, _weights_scheme(weights, f"{group_field}.weights")))
    matcher = Matcher()

    def scheme(module: str) -> Scheme | None:
        if any(matcher.target(module, entry, f"{field}.ignore") is not None for entry in ignored):
            return None
        found = [
            (level, scheme)
            for targets, scheme in groups
            for target in targets
            if (level := matcher.target(module, target, f"{scheme.field} (targets)")) is not None
        ]
        return min(found, key=lambda match: match[0])[1] if found else None

    return scheme


def _check_format(value: object, field: str) -> None:
    if value is not None and value not in _FORMATS:
        _reject(field, value, f"one of {', '.join(_FORMATS)}")


def _weights_scheme(weights: Mapping[str, Any], field: str) -> Scheme:
    bits, kind = weights.get("num_bits", 8), weights.get("type", "int")
    if not isinstance(bits, int):
        _reject(f"{field}.num_bits", bits, "a whole number")
    strategy, group_size = weights.get("strategy"), weights.get("group_size")
    if group_size in (-1, None):
        group_size = None
    else:
        _group_size(group_size, f"{field}.group_size")
    if strategy is None:
        strategy = "group" if group_size else "channel" if weights.get("group_size") == -1 else "tensor"
    if (kind, bits) == ("float", 4):
        if group_size != nvfp4.GROUP_SIZE:
            _reject(f"{field}.group_size", group_size, f"{nvfp4.GROUP_SIZE} (nvfp4)")
        return Scheme(NVFP4, field, group_size=group_size)
    if (kind, bits) == ("float", 8):
        if strategy not in (fp8.TENSOR, fp8.CHANNEL, fp8.BLOCK):
            _reject(f"{field}.strategy", strategy, f"{fp8.TENSOR}, {fp8.CHANNEL} or {fp8.BLOCK} (fp8)")
        block = _block(weights.get("block_structure"), f"{field}.block_structure") if strategy == fp8.BLOCK else None
        return Scheme(FP8, field, bits=8, strategy=strategy, block=block)
    if kind == "int" and bits in int_pack.BITS:
        if strategy not in ("group", "channel", "tensor") or (strategy == "group") != (group_size is not None):
            _reject(
                f"{field}.strategy",
                f"{strategy} with group_size {group_size}",
                "group with a group_size, channel or tensor",
            )
        symmetric = weights.get("symmetric", True)
        if not isinstance(symmetric, bool):
            _reject(f"{field}.symmetric", symmetric, "true or false")
        return Scheme(INT_PACK, field, bits=bits, group_size=group_size, symmetric=symmetric)
    _reject(f"{field}.num_bits, type", f"{bits}, {kind}", "4 bits float (nvfp4), 8 bits float (fp8), 4 or 8 bits int")


# ModelOpt, fp8, MLX


def _modelopt(data: Mapping[str, Any], field: str) -> Callable[[str], Scheme | None]:
    algorithm = data.get("quant_algo")
    if algorithm != "MIXED_PRECISION":
        whole = None if algorithm is None else _modelopt_scheme(data, field)
        return _all_but(whole, data, field, "exclude_modules", "ignore")
    layers = _object(data.get("quantized_layers"), f"{field}.quantized_layers")
    schemes: list[tuple[str, Scheme]] = []
    for name, value in layers.items():
        layer = f"{field}.quantized_layers.{name}"
        schemes.append((name, _modelopt_scheme(_object(value, layer), layer)))
    matcher = Matcher()
    return lambda module: next((s for name, s in schemes if matcher.name(module, name, s.field)), None)


def _all_but(whole: Scheme | None, data: Mapping[str, Any], field: str, *keys: str) -> Callable[[str], Scheme | None]:
    """One scheme for every module that is not in the lists under `keys`."""
    excluded = [(name, f"{field}.{key}") for key in keys for name in strings(data.get(key), f"{field}.{key}")]
    matcher = Matcher()
    return lambda module: None if any(matcher.name(module, *entry) for entry in excluded) else whole


def _modelopt_scheme(data: Mapping[str, Any], field: str) -> Scheme:
    algorithm = data.get("quant_algo")
    name = algorithm.upper() if isinstance(algorithm, str) else algorithm
    if name == "NVFP4":
        group_size = data.get("group_size", nvfp4.GROUP_SIZE)
        if group_size is not None and group_size != nvfp4.GROUP_SIZE:
            _reject(f"{field}.group_size", group_size, f"{nvfp4.GROUP_SIZE} (nvfp4)")
        return Scheme(NVFP4, field, group_size=nvfp4.GROUP_SIZE)
    strategies = {"FP8": fp8.TENSOR, "FP8_PER_CHANNEL_PER_TOKEN": fp8.CHANNEL, "FP8_PB_WO": fp8.BLOCK}
    if not isinstance(name, str) or name not in strategies:
        _reject(f"{field}.quant_algo", algorithm, f"NVFP4, {', '.join(strategies)} or MIXED_PRECISION")
    strategy = strategies[name]
    return Scheme(FP8, field, bits=8, strategy=strategy, block=(128, 128) if strategy == fp8.BLOCK else None)


def _fp8(data: Mapping[str, Any], field: str) -> Callable[[str], Scheme | None]:
    if data.get("fmt", "e4m3") != "e4m3":
        _reject(f"{field}.fmt", data["fmt"], "e4m3")
    block = data.get("weight_block_size")
    whole = Scheme(FP8, field, bits=8)
    if block is not None:
        whole = Scheme(FP8, field, bits=8, strategy=fp8.BLOCK, block=_block(block, f"{field}.weight_block_size"))
    return _all_but(whole, data, field, "modules_to_not_convert", "ignored_layers")


def _mlx(data: Mapping[str, Any], field: str) -> Callable[[str], Scheme | None]:
    whole = _mlx_scheme(data, field)
    # An object under a module's name overrides the settings for it, false leaves it unquantised.
    overrides = [
        (name, _mlx_scheme({**data, **value}, f"{field}.{name}") if isinstance(value, dict) else None)
        for name, value in data.items()
        if isinstance(value, dict) or value is False
    ]
    matcher = Matcher()
    return lambda module: next((s for name, s in overrides if matcher.name(module, name, f"{field}.{name}")), whole)


def _mlx_scheme(data: Mapping[str, Any], field: str) -> Scheme:
    if data.get("mode", "affine") != "affine":
        _reject(f"{field}.mode", data["mode"], "affine")
    bits = data.get("bits")
    if not isinstance(bits, int) or bits not in mlx.BITS:
        _reject(f"{field}.bits", bits, " or ".join(str(b) for b in mlx.BITS))
    return Scheme(MLX, field, bits=bits, group_size=_group_size(data.get("group_size"), f"{field}.group_size"))


# Values


def _object(value: object, field: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        _reject(field, value, "an object")
    return value


def _group_size(value: object, field: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MAX_GROUP_SIZE:
        _reject(field, value, f"a whole number in 1..{_MAX_GROUP_SIZE}")
    return value


def _block(value: object, field: str) -> tuple[int, int]:
    if isinstance(value, str) and (match := re.fullmatch(r"(\d{1,6})x(\d{1,6})", value)):  # of older releases
        value = [int(match[1]), int(match[2])]
    if not isinstance(value, list) or len(value) != 2:
        _reject(field, value, "two whole numbers")
    return _group_size(value[0], field), _group_size(value[1], field)


def _reject(field: str, found: object, needed: str) -> NoReturn:
    text = repr(found)
    raise ConfigError(f"{field}: found {text if len(text) <= 120 else text[:117] + '...'}, needed {needed}")
