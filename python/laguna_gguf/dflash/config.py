"""The configuration of a Laguna DFlash drafter: fields, rules and where they are read from."""

import itertools
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from os import PathLike
from pathlib import Path
from typing import Any, NoReturn

from laguna_gguf.dflash.families import FAMILIES, family_of_config
from laguna_gguf.errors import CheckpointError, ConfigError, TargetMismatchError
from laguna_gguf.paths import path_argument

ARCHITECTURE = "DFlashLagunaForCausalLM"
MODEL_TYPE = "laguna"
_TARGET_ARCHITECTURE = "LagunaForCausalLM"
DEFAULT_SLIDING_WINDOW = 512
"""Window of every published Laguna drafter; GGUF exports often leave the key out."""

MAX_BLOCK_SIZE = 4096
MAX_SLIDING_WINDOW = 1 << 20
MAX_HEAD_DIM = 1024
MAX_LAYERS = 1024
MAX_TARGET_LAYERS = 1 << 16
MAX_HEADS = 1 << 14
MAX_HIDDEN_SIZE = 1 << 20
MAX_INTERMEDIATE_SIZE = 1 << 22
MAX_VOCAB_SIZE = 1 << 24
MAX_CONFIG_BYTES = 16 << 20
_FLOAT32_MIN, _FLOAT32_MAX = 2.0**-126, (2.0 - 2.0**-23) * 2.0**127

_INTEGER_RANGES = {
    "hidden_size": (1, MAX_HIDDEN_SIZE),
    "intermediate_size": (1, MAX_INTERMEDIATE_SIZE),
    "num_hidden_layers": (1, MAX_LAYERS),
    "num_attention_heads": (1, MAX_HEADS),
    "num_key_value_heads": (1, MAX_HEADS),
    "head_dim": (2, MAX_HEAD_DIM),
    "vocab_size": (1, MAX_VOCAB_SIZE),
    "sliding_window": (2, MAX_SLIDING_WINDOW),
    "block_size": (2, MAX_BLOCK_SIZE),
}


def _reject(field: str, found: object, needed: str) -> NoReturn:
    raise ConfigError(f"{field}: found {_shown(found)}, needed {needed}")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True)
class DrafterConfig:
    """Shape and contract of a Laguna DFlash drafter. Construction checks every rule (ConfigError).

    `target_layer_ids` are 0-based: entry t means the residual stream *after* target layer t. `num_target_layers` is
    None when a GGUF file does not say. Whether `len(target_layer_ids)` fits `num_hidden_layers` is judged with the
    weights.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    vocab_size: int
    sliding_window: int
    block_size: int
    mask_token_id: int
    num_target_layers: int | None
    target_layer_ids: tuple[int, ...]
    causal: bool = True

    def __post_init__(self) -> None:
        for field, (low, high) in _INTEGER_RANGES.items():
            value = getattr(self, field)
            if not _is_int(value) or not low <= value <= high:
                _reject(field, value, f"a whole number in {low}..{high}")
        for field in ("rms_norm_eps", "rope_theta"):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                _reject(field, value, "a number")
            if not _is_positive(value):
                _reject(field, value, "a finite number > 0 (as float32)")
            object.__setattr__(self, field, float(value))
        if self.head_dim % 2 != 0:
            _reject("head_dim", self.head_dim, "an even number (rotary pairs)")
        if self.num_attention_heads % self.num_key_value_heads != 0:
            _reject(
                "num_attention_heads",
                self.num_attention_heads,
                f"a multiple of num_key_value_heads = {self.num_key_value_heads}",
            )
        if not _is_int(self.mask_token_id) or not 0 <= self.mask_token_id < self.vocab_size:
            _reject("mask_token_id", self.mask_token_id, f"a token id in 0..{self.vocab_size - 1} (vocab_size)")
        if self.causal is not True:
            _reject("causal", self.causal, "true: the block is drafted causally")
        self._check_target_layers()

    def _check_target_layers(self) -> None:
        n_target = self.num_target_layers
        if n_target is not None and (not _is_int(n_target) or not 1 <= n_target <= MAX_TARGET_LAYERS):
            _reject("num_target_layers", n_target, f"a whole number in 1..{MAX_TARGET_LAYERS}")
        ids = self.target_layer_ids
        if not isinstance(ids, (list, tuple)) or not ids or not all(_is_int(i) for i in ids):
            _reject("target_layer_ids", ids, "a non-empty list of layer numbers")
        high = MAX_TARGET_LAYERS if n_target is None else n_target
        if not all(0 <= i < high for i in ids):
            _reject("target_layer_ids", list(ids), f"layer numbers in 0..{high - 1} (num_target_layers)")
        if any(a >= b for a, b in itertools.pairwise(ids)):
            _reject("target_layer_ids", list(ids), "strictly increasing layer numbers")
        object.__setattr__(self, "target_layer_ids", tuple(ids))

    @classmethod
    def from_json(cls, source: str | PathLike[str] | Mapping[str, Any]) -> "DrafterConfig":
        """Read a Hugging Face `config.json`: its path, its directory, or its content as a dict.

        Raises ConfigError for every field that is not the contract of a Laguna DFlash drafter, CheckpointError for a
        missing file or duplicate keys.
        """
        return parse_config(source)[0]

    @classmethod
    def from_gguf(cls, path: str | PathLike[str]) -> "DrafterConfig":
        """Read the metadata of a drafter GGUF of any dialect (CheckpointError for a damaged file, ConfigError)."""
        from laguna_gguf.dflash.gguf_config import open_gguf, parse_gguf_config

        return parse_gguf_config(open_gguf(path_argument("path", path))).config

    def validate_target(self, n_layer: int, n_embd: int, n_vocab: int) -> None:
        """Raise TargetMismatchError unless a target of this shape is the one the drafter was trained on."""
        if self.num_target_layers is None:
            if n_layer <= self.target_layer_ids[-1]:
                raise TargetMismatchError(
                    f"target_layer_ids: the drafter reads the target's layer {self.target_layer_ids[-1]}, this target "
                    f"has {n_layer} layers; give the target that the drafter was trained for"
                )
        elif n_layer != self.num_target_layers:
            raise TargetMismatchError(
                f"num_target_layers: the drafter needs a target of {self.num_target_layers} "
                f"layers, this one has {n_layer}"
            )
        if n_embd != self.hidden_size:
            raise TargetMismatchError(
                f"hidden_size: the drafter needs a target of {self.hidden_size}, this one has {n_embd}"
            )
        if n_vocab != self.vocab_size:
            raise TargetMismatchError(
                f"vocab_size: the drafter needs a target of {self.vocab_size} tokens, this one has {n_vocab}"
            )

    def as_dict(self) -> dict[str, Any]:
        """Fields by name; `target_layer_ids` as a list."""
        return {**asdict(self), "target_layer_ids": list(self.target_layer_ids)}


def _is_positive(value: float) -> bool:
    """Whether a number is finite and > 0 also as the float32 that GGUF files and the computation have."""
    try:
        return math.isfinite(value) and _FLOAT32_MIN <= value <= _FLOAT32_MAX
    except OverflowError:  # an int beyond float's range
        return False


def read_json(path: Path, max_bytes: int = MAX_CONFIG_BYTES) -> Any:
    """Parse a JSON file. CheckpointError when it is missing or repeats a key, ConfigError when it is not JSON."""
    try:
        if path.exists() and not path.is_file():  # opening a pipe would wait for ever
            raise CheckpointError(f"{path}: not a regular file")
        if path.stat().st_size > max_bytes:
            raise ConfigError(f"{path}: {path.stat().st_size} bytes, at most {max_bytes} are read")
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text ({error})") from error
    except (ConfigError, CheckpointError):
        raise
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        raise CheckpointError(f"{str(path)!r}: cannot be read ({error})") from error
    return parse_json(text, str(path))


def parse_json(text: str | bytes, source: str) -> Any:
    """Parse JSON text; `source` names it in messages."""

    def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            seen: set[str] = set()
            for key, _ in pairs:
                if key in seen:
                    raise CheckpointError(f"{source}: duplicate key {_shown(key)}")
                seen.add(key)
        return result

    try:
        return json.loads(text, object_pairs_hook=without_duplicates)
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{source}: not valid JSON ({error})") from error


def parse_config(source: str | PathLike[str] | Mapping[str, Any]) -> tuple[DrafterConfig, dict[str, Any]]:
    """Returns the configuration and the defaults that were filled in (field -> value)."""
    if isinstance(source, Mapping):
        return _parse_fields(source)
    path = Path(path_argument("source", source))
    path = path / "config.json" if path.is_dir() else path
    data = read_json(path)
    try:
        if not isinstance(data, dict):
            _reject("config.json", data, "an object")
        return _parse_fields(data)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def _parse_fields(data: Mapping[str, Any]) -> tuple[DrafterConfig, dict[str, Any]]:
    _check_family(data)
    dflash = data.get("dflash_config")
    if not isinstance(dflash, Mapping):
        _reject("dflash_config", dflash, "an object")
    defaults: dict[str, Any] = {}

    def required(fields: Mapping[str, Any], name: str) -> Any:
        if name not in fields:
            raise ConfigError(f"{name}: missing, needed in config.json{'' if fields is data else ' (dflash_config)'}")
        return fields[name]

    if "causal" not in dflash:
        defaults["causal"] = True
    config = DrafterConfig(
        **{
            name: required(data, name)
            for name in (
                "hidden_size",
                "intermediate_size",
                "num_hidden_layers",
                "num_attention_heads",
                "num_key_value_heads",
                "head_dim",
                "rms_norm_eps",
                "rope_theta",
                "vocab_size",
                "sliding_window",
            )
        },
        **{
            name: required(dflash, name)
            for name in ("block_size", "mask_token_id", "num_target_layers", "target_layer_ids")
        },
        causal=dflash.get("causal", True),
    )
    if config.num_target_layers is None:
        _reject("num_target_layers", None, "the target's number of layers")
    _check_contract(data, config, defaults)
    return config, defaults


def _check_family(data: Mapping[str, Any]) -> None:
    architectures = data.get("architectures")
    if architectures != [ARCHITECTURE]:
        family = family_of_config(data)
        what = FAMILIES[family] if family is not None else None
        if architectures == [_TARGET_ARCHITECTURE]:
            what = "a Laguna target model, not its drafter"
        _reject("architectures", architectures, f"[{ARCHITECTURE!r}]" + (f"; this is {what}" if what else ""))
    if data.get("model_type") != MODEL_TYPE:
        _reject("model_type", data.get("model_type"), repr(MODEL_TYPE))


def _check_contract(data: Mapping[str, Any], config: DrafterConfig, defaults: dict[str, Any]) -> None:
    """The fields that only say "as expected" or "another model"."""
    n_layers = config.num_hidden_layers
    if data.get("rope_parameters") is not None:
        _reject("rope_parameters", data["rope_parameters"], "no such object: plain rotary embedding with rope_theta")
    if data.get("rope_scaling") is not None:
        _reject("rope_scaling", data["rope_scaling"], "no scaling")
    _check_equal(data, "num_experts", 0, missing=0)
    _check_equal(data, "attention_bias", False, missing=False)
    _check_equal(data, "hidden_act", "silu", missing="silu")
    _check_equal(data, "partial_rotary_factor", 1.0, missing=1.0)
    gating = data.get("gating")
    if gating is not True and gating != "per-head":
        _reject("gating", gating, "'per-head' or true")
    layer_types = data.get("layer_types")
    if layer_types != ["sliding_attention"] * n_layers:
        _reject("layer_types", layer_types, f"{n_layers} times 'sliding_attention' (num_hidden_layers)")
    if data.get("sliding_windows") is None:
        defaults["sliding_windows"] = [config.sliding_window] * n_layers
    else:
        windows = data["sliding_windows"]
        if not isinstance(windows, list) or len(windows) != n_layers:
            _reject("sliding_windows", windows, f"{n_layers} entries (num_hidden_layers)")
        if not all(_is_int(w) and w == config.sliding_window for w in windows):
            _reject("sliding_windows", windows, f"{config.sliding_window} (sliding_window) in every layer")
    draft_vocab_size = data.get("draft_vocab_size")
    if draft_vocab_size is None:
        defaults["draft_vocab_size"] = config.vocab_size
    elif not _is_int(draft_vocab_size) or draft_vocab_size != config.vocab_size:
        _reject("draft_vocab_size", draft_vocab_size, f"{config.vocab_size} (vocab_size)")
    inputs = data.get("eagle_aux_hidden_state_layer_ids")
    needed = [i + 1 for i in config.target_layer_ids]
    if inputs is not None and inputs != needed:
        _reject("eagle_aux_hidden_state_layer_ids", inputs, f"{needed} (target_layer_ids + 1)")


def _check_equal(data: Mapping[str, Any], field: str, needed: Any, *, missing: Any) -> None:
    found = data.get(field, missing)
    if found is None:
        found = missing
    if isinstance(found, bool) != isinstance(needed, bool) or found != needed:
        _reject(field, found, repr(needed))
