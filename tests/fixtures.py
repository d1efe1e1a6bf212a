"""Small random drafter checkpoints for tests.

Norm weights are drawn from U(0.5, 1.5) and differ per layer and per norm: with unit norms (as in the published
checkpoints) a forgotten or swapped norm would go unnoticed.
"""

import json
from pathlib import Path
from typing import Any, Literal

import gguf
import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

Layout = Literal["fused", "split", "prefixed", "sharded"]
FloatArray = NDArray[np.float32]

REMOVE: Any = object()
"""As an override of `drafter_config`: leave this key out."""

_DFLASH_KEYS = ("block_size", "mask_token_id", "num_target_layers", "target_layer_ids", "causal")
_DTYPES: dict[str, Any] = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}


def drafter_config(**overrides: Any) -> dict[str, Any]:
    """A config.json of a small Laguna DFlash drafter.

    Overrides are config.json fields; those of `dflash_config` (block_size, mask_token_id, ...) are given flat. Fields
    that follow from others (layer_types, draft_vocab_size, eagle_aux_hidden_state_layer_ids) are derived unless given.
    """
    config: dict[str, Any] = {
        "architectures": ["DFlashLagunaForCausalLM"],
        "model_type": "laguna",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-6,
        "vocab_size": 320,
        "max_position_embeddings": 4096,
        "rope_theta": 500000.0,
        "sliding_window": 32,
        "gating": "per-head",
        "num_experts": 0,
        "attention_bias": False,
    }
    dflash: dict[str, Any] = {
        "block_size": 16,
        "mask_token_id": 12,
        "num_target_layers": 8,
        "target_layer_ids": [1, 4, 7],
        "causal": True,
    }
    for key, value in overrides.items():
        (dflash if key in _DFLASH_KEYS else config)[key] = value
    config.setdefault("draft_vocab_size", config["vocab_size"])
    config.setdefault("layer_types", ["sliding_attention"] * config["num_hidden_layers"])
    ids = dflash["target_layer_ids"]
    if ids is not REMOVE and all(isinstance(i, int) for i in ids):
        config.setdefault("eagle_aux_hidden_state_layer_ids", [i + 1 for i in ids])
    config.setdefault("dflash_config", dflash)
    if isinstance(config["dflash_config"], dict):
        config["dflash_config"] = {k: v for k, v in config["dflash_config"].items() if v is not REMOVE}
    return {k: v for k, v in config.items() if v is not REMOVE}


def drafter_tensors(config: dict[str, Any], *, seed: int = 0, dtype: str = "f32") -> dict[str, FloatArray]:
    """Random weights by HF name (fused qkv), float32 values that `dtype` represents exactly."""
    rng = np.random.default_rng(seed)
    h, i, d = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    nq, nkv = config["num_attention_heads"], config["num_key_value_heads"]
    n_captured = len(config["dflash_config"]["target_layer_ids"])

    def matrix(n_rows: int, n_cols: int) -> FloatArray:
        return (rng.standard_normal((n_rows, n_cols)) / np.sqrt(n_cols)).astype(np.float32)

    def norm(n: int) -> FloatArray:
        return rng.uniform(0.5, 1.5, n).astype(np.float32)

    tensors = {"fc.weight": matrix(h, n_captured * h), "hidden_norm.weight": norm(h), "norm.weight": norm(h)}
    for a in range(n_captured):
        tensors[f"aux_hidden_norms.{a}.weight"] = norm(h)
    for layer in range(config["num_hidden_layers"]):
        p = f"layers.{layer}."
        tensors[p + "input_layernorm.weight"] = norm(h)
        tensors[p + "post_attention_layernorm.weight"] = norm(h)
        tensors[p + "self_attn.qkv_proj.weight"] = matrix((nq + 2 * nkv) * d, h)
        tensors[p + "self_attn.o_proj.weight"] = matrix(h, nq * d)
        tensors[p + "self_attn.g_proj.weight"] = matrix(nq, h)
        tensors[p + "self_attn.q_norm.weight"] = norm(d)
        tensors[p + "self_attn.k_norm.weight"] = norm(d)
        tensors[p + "mlp.gate_proj.weight"] = matrix(i, h)
        tensors[p + "mlp.up_proj.weight"] = matrix(i, h)
        tensors[p + "mlp.down_proj.weight"] = matrix(h, i)
    return {name: t.astype(_DTYPES[dtype]).astype(np.float32) for name, t in tensors.items()}


def layout_tensors(tensors: dict[str, FloatArray], config: dict[str, Any], layout: Layout) -> dict[str, FloatArray]:
    """The same weights under the names of another checkpoint layout."""
    if layout == "prefixed":
        return {f"model.{name}": t for name, t in tensors.items()}
    if layout != "split":
        return dict(tensors)
    n_q = config["num_attention_heads"] * config["head_dim"]
    n_kv = config["num_key_value_heads"] * config["head_dim"]
    out: dict[str, FloatArray] = {}
    for name, t in tensors.items():
        if "qkv_proj" not in name:
            out[name] = t
            continue
        parts = np.split(t, [n_q, n_q + n_kv])
        for letter, part in zip("qkv", parts, strict=True):
            out[name.replace("qkv_proj", f"{letter}_proj")] = np.ascontiguousarray(part)
    return out


def save_tensors(path: Path, tensors: dict[str, FloatArray], *, dtype: str = "f32", n_shards: int = 1) -> None:
    """Write model.safetensors into `path`, or shards with their index."""
    stored = {name: t.astype(_DTYPES[dtype]) for name, t in tensors.items()}
    if n_shards == 1:
        save_file(stored, path / "model.safetensors")
        return
    names = sorted(stored)
    weight_map: dict[str, str] = {}
    for shard in range(n_shards):
        file = f"model-{shard + 1:05d}-of-{n_shards:05d}.safetensors"
        part = names[shard::n_shards]
        save_file({name: stored[name] for name in part}, path / file)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": sum(t.nbytes for t in stored.values())}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def write_drafter_dir(
    path: str | Path, *, seed: int = 0, layout: Layout = "fused", dtype: str = "f32", **config_overrides: Any
) -> dict[str, FloatArray]:
    """Write a random drafter as an HF directory (config.json and safetensors, no tokenizer).

    Returns its weights as float32 under the fused names without prefix ("layers.0.self_attn.qkv_proj.weight"), whatever
    `layout` is, with the values that were stored (rounded to `dtype`). `config_overrides`: see `drafter_config`.
    """
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    config = drafter_config(**config_overrides)
    tensors = drafter_tensors(config, seed=seed, dtype=dtype)
    (path / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    save_tensors(path, layout_tensors(tensors, config, layout), dtype=dtype, n_shards=3 if layout == "sharded" else 1)
    return tensors


_GGUF_BLOCK = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.o_proj": "attn_output",
    "self_attn.g_proj": "attn_gate",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_GGUF_COMBINE = {
    "A": ("fc", "enc.output_norm", None),
    "B": ("dflash_fc", "dflash_hidden_norm", "dflash_aux_hidden_norm"),
    "C": ("dflash.fc", "dflash.hidden_norm", "dflash.aux_hidden_norm"),
}


def dialect_tensors(
    tensors: dict[str, FloatArray], config: dict[str, Any], dialect: Literal["A", "B", "C"]
) -> dict[str, FloatArray]:
    """Fused Hugging Face weights under the names of a GGUF dialect (with ".weight")."""
    fc, hidden_norm, aux_norm = _GGUF_COMBINE[dialect]
    n_captured = len(config["dflash_config"]["target_layer_ids"])
    aux = [tensors[f"aux_hidden_norms.{a}.weight"] for a in range(n_captured)]
    out = {fc: tensors["fc.weight"], hidden_norm: tensors["hidden_norm.weight"], "output_norm": tensors["norm.weight"]}
    out |= {"enc.aux_norm": np.stack(aux)} if aux_norm is None else {f"{aux_norm}.{a}": t for a, t in enumerate(aux)}
    split = layout_tensors(tensors, config, "split")
    for layer in range(config["num_hidden_layers"]):
        names = _GGUF_BLOCK | {f"self_attn.{letter}_proj": f"attn_{letter}" for letter in "qkv"}
        out |= {f"blk.{layer}.{gguf_name}": split[f"layers.{layer}.{name}.weight"] for name, gguf_name in names.items()}
    return {f"{name}.weight": t for name, t in out.items()}


def write_drafter_gguf(
    path: str | Path,
    tensors: dict[str, FloatArray],
    config: dict[str, Any],
    *,
    dialect: Literal["A", "B", "C"] = "A",
    tokenizer: bool = True,
) -> Path:
    """Write fused float32 weights as a GGUF of any dialect, independently of the package's own converter.

    Only the keys that published files of that dialect carry, and the window. The tokenizer is a list of made-up tokens;
    without one the vocabulary's size is written instead.
    """
    arch = "dflash" if dialect == "A" else "dflash-draft"
    nested = "dflash" if dialect == "A" else "dflash-draft.dflash"
    dflash = config["dflash_config"]
    writer = gguf.GGUFWriter(path, arch)
    for key, field in {
        "block_count": "num_hidden_layers",
        "context_length": "max_position_embeddings",
        "embedding_length": "hidden_size",
        "feed_forward_length": "intermediate_size",
        "attention.head_count": "num_attention_heads",
        "attention.head_count_kv": "num_key_value_heads",
        "attention.key_length": "head_dim",
        "attention.value_length": "head_dim",
        "attention.sliding_window": "sliding_window",
    }.items():
        writer.add_uint32(f"{arch}.{key}", config[field])
    writer.add_float32(f"{arch}.attention.layer_norm_rms_epsilon", config["rms_norm_eps"])
    writer.add_float32(f"{arch}.rope.freq_base", config["rope_theta"])
    writer.add_uint32(f"{nested}.block_size", dflash["block_size"])
    if dialect == "A":
        writer.add_string("dflash.decoder_arch", "laguna")
        writer.add_uint32("tokenizer.ggml.mask_token_id", dflash["mask_token_id"])
        writer.add_array("dflash.target_layers", [i + 1 for i in dflash["target_layer_ids"]])
    else:
        if dialect == "B":
            writer.add_bool(f"{nested}.laguna", True)
        writer.add_uint32(f"{nested}.mask_token_id", dflash["mask_token_id"])
        writer.add_uint32(f"{nested}.n_target_features", len(dflash["target_layer_ids"]) * config["hidden_size"])
        writer.add_array(f"{nested}.target_layer_ids", list(dflash["target_layer_ids"]))
    if tokenizer:
        writer.add_string("tokenizer.ggml.model", "gpt2")
        writer.add_array("tokenizer.ggml.tokens", [f"t{i}" for i in range(config["vocab_size"])])
    else:
        writer.add_uint32(f"{arch}.vocab_size", config["vocab_size"])
    for name, tensor in dialect_tensors(tensors, config, dialect).items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Path(path)
