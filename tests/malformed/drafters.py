"""Drafter files of every dialect with keys and tensors that can be changed one by one, written without checks."""

from typing import Any

from fixtures import FloatArray, dialect_tensors, drafter_config, drafter_tensors
from malformed import builder as b
from malformed.builder import GgufBuilder

Key = tuple[int, Any]
"""Value type and value; a list stands for an array of that element type."""


def dialect_keys(config: dict[str, Any], dialect: str) -> dict[str, Key]:
    """Every key of a sound file, with those that published files leave out."""
    arch = "dflash" if dialect == "A" else "dflash-draft"
    nested = "dflash" if dialect == "A" else "dflash-draft.dflash"
    dflash = config["dflash_config"]
    n_layers, ids = config["num_hidden_layers"], dflash["target_layer_ids"]
    keys: dict[str, Key] = {
        "general.architecture": (b.STRING, arch),
        f"{arch}.block_count": (b.U32, n_layers),
        f"{arch}.context_length": (b.U32, config["max_position_embeddings"]),
        f"{arch}.embedding_length": (b.U32, config["hidden_size"]),
        f"{arch}.feed_forward_length": (b.U32, config["intermediate_size"]),
        f"{arch}.attention.head_count": (b.U32, config["num_attention_heads"]),
        f"{arch}.attention.head_count_kv": (b.U32, config["num_key_value_heads"]),
        f"{arch}.attention.key_length": (b.U32, config["head_dim"]),
        f"{arch}.attention.value_length": (b.U32, config["head_dim"]),
        f"{arch}.attention.layer_norm_rms_epsilon": (b.F32, config["rms_norm_eps"]),
        f"{arch}.attention.sliding_window": (b.U32, config["sliding_window"]),
        f"{arch}.attention.sliding_window_pattern": (b.BOOL, [True] * n_layers),
        f"{arch}.attention.causal": (b.BOOL, 1),
        f"{arch}.rope.freq_base": (b.F32, config["rope_theta"]),
        f"{arch}.num_target_layers": (b.U32, dflash["num_target_layers"]),
        f"{nested}.block_size": (b.U32, dflash["block_size"]),
        "tokenizer.ggml.model": (b.STRING, "gpt2"),
        "tokenizer.ggml.tokens": (b.STRING, [f"t{i}" for i in range(config["vocab_size"])]),
    }
    if dialect == "A":
        keys["dflash.decoder_arch"] = (b.STRING, "laguna")
        keys["tokenizer.ggml.mask_token_id"] = (b.U32, dflash["mask_token_id"])
        keys["dflash.target_layers"] = (b.I32, [i + 1 for i in ids])
        return keys
    if dialect == "B":
        keys[f"{nested}.laguna"] = (b.BOOL, 1)
    keys[f"{nested}.mask_token_id"] = (b.U32, dflash["mask_token_id"])
    keys[f"{nested}.n_target_features"] = (b.U32, len(ids) * config["hidden_size"])
    keys[f"{nested}.target_layer_ids"] = (b.I32, ids)
    return keys


def drafter_parts(dialect: Any, **overrides: Any) -> tuple[dict[str, Key], dict[str, FloatArray]]:
    """Keys and tensors of a sound drafter; overrides as in `drafter_config`."""
    config = drafter_config(**overrides)
    return dialect_keys(config, dialect), dialect_tensors(drafter_tensors(config), config, dialect)


def build(keys: dict[str, Key], tensors: dict[str, FloatArray]) -> GgufBuilder:
    """The file of these keys and f32 tensors."""
    builder = GgufBuilder()
    for name, (kind, value) in keys.items():
        if isinstance(value, list):
            builder.array_key(name, kind, value)
        else:
            builder.key(name, kind, value)
    for name, tensor in tensors.items():
        builder.tensor(name, tensor.shape[::-1], data=tensor.tobytes())
    return builder
