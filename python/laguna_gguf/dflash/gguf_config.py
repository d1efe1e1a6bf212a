"""Drafter metadata in GGUF files: three dialects, told apart by markers and read through small tables."""

from dataclasses import dataclass, field
from os import PathLike, fspath
from typing import Any

import numpy as np

from laguna_gguf import _native
from laguna_gguf.dflash.config import DEFAULT_SLIDING_WINDOW, DrafterConfig
from laguna_gguf.dflash.families import FAMILIES, LAGUNA, family_of_gguf
from laguna_gguf.errors import ConfigError


@dataclass(frozen=True)
class Dialect:
    """Keys and combine-tensor names of one way to write a drafter. Several keys: the first present one counts."""

    name: str
    architecture: str
    block_size: tuple[str, ...]
    mask_token_id: tuple[str, ...]
    target_layer_ids: tuple[str, ...]
    id_offset: int
    """What the file adds to a 0-based output id."""
    fc: str
    hidden_norm: str
    aux_norms: str
    """With `{i}`: one 1-D tensor a captured layer; without: one tensor ne [H, A]."""


DIALECT_A = Dialect(
    name="A",
    architecture="dflash",
    block_size=("dflash.block_size",),
    mask_token_id=("tokenizer.ggml.mask_token_id",),
    target_layer_ids=("dflash.target_layers",),
    id_offset=1,
    fc="fc",
    hidden_norm="enc.output_norm",
    aux_norms="enc.aux_norm",
)
_DRAFT = "dflash-draft"
_NESTED = "dflash-draft.dflash"
DIALECT_B = Dialect(
    name="B",
    architecture=_DRAFT,
    block_size=(f"{_NESTED}.block_size",),
    mask_token_id=(f"{_NESTED}.mask_token_id",),
    target_layer_ids=(f"{_NESTED}.target_layer_ids",),
    id_offset=0,
    fc="dflash_fc",
    hidden_norm="dflash_hidden_norm",
    aux_norms="dflash_aux_hidden_norm.{i}",
)
DIALECT_C = Dialect(
    name="C",
    architecture=_DRAFT,
    block_size=(f"{_NESTED}.block_size", f"{_DRAFT}.block_size"),
    mask_token_id=(f"{_NESTED}.mask_token_id", f"{_DRAFT}.mask_token_id", "tokenizer.ggml.mask_token_id"),
    target_layer_ids=(f"{_NESTED}.target_layer_ids", f"{_DRAFT}.target_layer_ids"),
    id_offset=0,
    fc="dflash.fc",
    hidden_norm="dflash.hidden_norm",
    aux_norms="dflash.aux_hidden_norm.{i}",
)

_INTEGERS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
}


@dataclass(frozen=True)
class GgufConfig:
    """A drafter's configuration, the dialect it was read from, and the defaults filled in (field -> value)."""

    config: DrafterConfig
    dialect: Dialect
    defaults: dict[str, Any] = field(default_factory=dict)
    context_length: int | None = None


def open_gguf(path: str | PathLike[str]) -> _native.GgufFile:
    """Open and validate a GGUF file; CheckpointError when that fails."""
    return _native.GgufFile(fspath(path))


def find_dialect(file: _native.GgufFile) -> Dialect:
    """ConfigError, naming what the file is, unless it is a Laguna drafter."""
    path, architecture = file.paths[0], file.get("general.architecture")
    family = family_of_gguf(architecture, file.keys(), (t.name for t in file.tensors()))
    if family in ("dspark", "dflash2"):
        raise ConfigError(
            f"{path}: {FAMILIES[family]}, by its tensors: general.architecture is {architecture!r}, needed "
            f"{FAMILIES[LAGUNA]} without more (architectures)"
        )
    if architecture == DIALECT_A.architecture:
        if file.get("dflash.decoder_arch") == "laguna":
            return DIALECT_A
        raise ConfigError(
            f"{path}: {FAMILIES['dflash']}: dflash.decoder_arch is {file.get('dflash.decoder_arch')!r}, needed "
            "'laguna' (model_type)"
        )
    if architecture == _DRAFT:
        if file.get(f"{_NESTED}.laguna") is True:
            return DIALECT_B
        # The tensor alone also occurs in drafters of other families; only Laguna's have the output gate.
        if file.tensor("dflash.fc.weight") is not None and file.tensor("blk.0.attn_gate.weight") is not None:
            return DIALECT_C
        raise ConfigError(
            f"{path}: {FAMILIES['dflash']}: needed {_NESTED}.laguna = true, or the tensors dflash.fc and "
            "blk.0.attn_gate of a Laguna one (model_type)"
        )
    kind = FAMILIES[family] if family is not None else "not a Laguna DFlash drafter"
    if architecture == "laguna":
        kind = "a Laguna target model, not its drafter"
    raise ConfigError(
        f"{path}: {kind}: general.architecture is {architecture!r}, needed 'dflash' or '{_DRAFT}' (architectures)"
    )


def parse_gguf_config(file: _native.GgufFile) -> GgufConfig:
    """The drafter's configuration from an open file. ConfigError names the config.json field and the GGUF key."""
    dialect = find_dialect(file)
    try:
        return _Parser(file, dialect).parse()
    except ConfigError as error:
        raise ConfigError(f"{file.paths[0]} (dialect {dialect.name}): {error}") from error


class _Parser:
    def __init__(self, file: _native.GgufFile, dialect: Dialect) -> None:
        self.file = file
        self.dialect = dialect
        self.arch = dialect.architecture
        self.defaults: dict[str, Any] = {}

    def parse(self) -> GgufConfig:
        integers = {name: self.integer(name, f"{self.arch}.{key}") for name, key in _INTEGERS.items()}
        config = DrafterConfig(
            **integers,
            rms_norm_eps=self.number("rms_norm_eps", f"{self.arch}.attention.layer_norm_rms_epsilon"),
            rope_theta=self.number("rope_theta", f"{self.arch}.rope.freq_base"),
            vocab_size=self.vocab_size(),
            sliding_window=self.sliding_window(integers["num_hidden_layers"]),
            block_size=self.integer("block_size", *self.dialect.block_size),
            mask_token_id=self.integer("mask_token_id", *self.dialect.mask_token_id),
            num_target_layers=self.optional_integer("num_target_layers", f"{self.arch}.num_target_layers"),
            target_layer_ids=self.layer_ids(),
            causal=self.causal(),
        )
        self.check_contract(config)
        context_length = self.optional_integer("max_position_embeddings", f"{self.arch}.context_length")
        return GgufConfig(config, self.dialect, self.defaults, context_length)

    def optional_integer(self, name: str, *keys: str) -> int | None:
        for key in keys:
            value = self.file.get(key)
            if value is None:
                continue
            if isinstance(value, np.ndarray) and value.size and value.dtype.kind in "iu" and (value == value[0]).all():
                value = int(value[0])  # the same number for every layer
            if isinstance(value, bool) or not isinstance(value, int):
                raise ConfigError(f"{name}: {key} is {value!r}, needed a whole number")
            return value
        return None

    def integer(self, name: str, *keys: str) -> int:
        value = self.optional_integer(name, *keys)
        if value is None:
            raise ConfigError(f"{name}: missing, needed as {' or '.join(keys)}")
        return value

    def number(self, name: str, key: str) -> float:
        value = self.file.get(key)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ConfigError(f"{name}: {key} is {value!r}, needed a number")
        # Files hold float32: the shortest decimal that means it is what config.json says (1e-06, not 9.99999997e-07).
        with np.errstate(over="ignore"):
            return float(str(np.float32(value)))

    def vocab_size(self) -> int:
        tokens = self.file.get("tokenizer.ggml.tokens")
        if isinstance(tokens, list):
            return len(tokens)
        return self.integer("vocab_size", f"{self.arch}.vocab_size")

    def layer_ids(self) -> tuple[int, ...]:
        for key in self.dialect.target_layer_ids:
            value = self.file.get(key)
            if value is None:
                continue
            if not isinstance(value, np.ndarray) or value.dtype.kind not in "iu":
                raise ConfigError(f"target_layer_ids: {key} is not an array of whole numbers")
            return tuple(int(i) - self.dialect.id_offset for i in value)
        raise ConfigError(f"target_layer_ids: missing, needed as {' or '.join(self.dialect.target_layer_ids)}")

    def sliding_window(self, n_layers: int) -> int:
        pattern_key = f"{self.arch}.attention.sliding_window_pattern"
        pattern = self.file.get(pattern_key)
        if pattern is not None and pattern is not True:
            if not isinstance(pattern, np.ndarray) or pattern.size != n_layers or not (pattern == 1).all():
                raise ConfigError(
                    f"layer_types: {pattern_key} is {pattern!r}, needed {n_layers} times true (every "
                    "layer is sliding_attention)"
                )
        window = self.optional_integer("sliding_window", f"{self.arch}.attention.sliding_window")
        if window is None:
            self.defaults["sliding_window"] = window = DEFAULT_SLIDING_WINDOW
        return window

    def causal(self) -> bool:
        value = self.file.get(f"{self.arch}.attention.causal")
        if value is None:
            self.defaults["causal"] = value = True
        return value

    def check_contract(self, config: DrafterConfig) -> None:
        arch = self.arch
        for name, key, needed in (
            ("head_dim", f"{arch}.attention.value_length", config.head_dim),
            ("head_dim", f"{arch}.rope.dimension_count", config.head_dim),
            ("num_experts", f"{arch}.expert_count", 0),
            ("target_layer_ids", f"{_NESTED}.n_target_features", len(config.target_layer_ids) * config.hidden_size),
        ):
            found = self.optional_integer(name, key)
            if found is not None and found != needed:
                raise ConfigError(f"{name}: {key} is {found}, needed {needed}")
        scaling = self.file.get(f"{arch}.rope.scaling.type")
        if scaling not in (None, "none"):
            raise ConfigError(f"rope_parameters: {arch}.rope.scaling.type is {scaling!r}, needed none")
