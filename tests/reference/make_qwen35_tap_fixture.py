"""Taps of a random Qwen3.5 from transformers' own modelling code: writes tests/data/qwen35_tap.npz.

    pip install torch transformers==5.24.0 numpy gguf
    python tests/reference/make_qwen35_tap_fixture.py

The weights are those of `random_drafter.random_tensors(SHAPE, SEED)`, so that the stored file holds only token ids, the
taps (output of block 14, float32) and a checksum of the weights.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from transformers import Qwen3_5TextConfig, Qwen3_5TextModel

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "tests")]

from random_drafter import random_tensors  # noqa: E402
from tap_model import TAP_SEED, TAP_SHAPE, weights_checksum  # noqa: E402

_FULL = {"attn_q": "q_proj", "attn_k": "k_proj", "attn_v": "v_proj", "attn_output": "o_proj"}
_LINEAR = {
    "attn_qkv": "in_proj_qkv",
    "attn_gate": "in_proj_z",
    "ssm_beta": "in_proj_b",
    "ssm_alpha": "in_proj_a",
    "ssm_out": "out_proj",
}
_PLUS_ONE = {"attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"}


def state_dict(shape, tensors):
    """GGUF tensors under the names and conventions of a checkpoint (norms as w - 1, A as its logarithm)."""
    out = {"embed_tokens.weight": tensors["token_embd.weight"], "norm.weight": tensors["output_norm.weight"] - 1}
    for layer in range(shape.n_layer):
        old, new = f"blk.{layer}.", f"layers.{layer}."

        def take(name, old=old):
            return tensors[f"{old}{name}.weight"]

        out |= {f"{new}{hf}.weight": take(name) - 1 for name, hf in _PLUS_ONE.items()}
        out |= {f"{new}mlp.{part}_proj.weight": take(f"ffn_{part}") for part in ("gate", "up", "down")}
        if shape.is_full(layer):
            out |= {f"{new}self_attn.{hf}.weight": take(name) for name, hf in _FULL.items()}
            out |= {f"{new}self_attn.{part}_norm.weight": take(f"attn_{part}_norm") - 1 for part in "qk"}
        else:
            out |= {f"{new}linear_attn.{hf}.weight": take(name) for name, hf in _LINEAR.items()}
            out[f"{new}linear_attn.conv1d.weight"] = take("ssm_conv1d")[:, None]
            out[f"{new}linear_attn.norm.weight"] = take("ssm_norm")
            out[f"{new}linear_attn.dt_bias"] = tensors[f"{old}ssm_dt.bias"]
            out[f"{new}linear_attn.A_log"] = np.log(-tensors[f"{old}ssm_a"])
    return {name: torch.from_numpy(np.ascontiguousarray(t)) for name, t in out.items()}


def main():
    shape = TAP_SHAPE
    third = shape.n_rot // 6
    config = Qwen3_5TextConfig(
        vocab_size=shape.n_vocab,
        hidden_size=shape.n_embd,
        intermediate_size=shape.n_ff,
        num_hidden_layers=shape.n_layer,
        num_attention_heads=shape.n_head,
        num_key_value_heads=shape.n_head_kv,
        head_dim=shape.head_dim,
        rms_norm_eps=shape.norm_eps,
        linear_conv_kernel_dim=shape.conv_kernel,
        linear_key_head_dim=shape.state_size,
        linear_value_head_dim=shape.state_size,
        linear_num_key_heads=shape.n_k_heads,
        linear_num_value_heads=shape.n_v_heads,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": shape.rope_base,
            "partial_rotary_factor": shape.n_rot / shape.head_dim,
            "mrope_section": [shape.n_rot // 2 - 2 * third, third, third],
            "mrope_interleaved": True,
        },
    )
    config._attn_implementation = "eager"
    tensors = random_tensors(shape, TAP_SEED)
    model = Qwen3_5TextModel(config).eval()
    missing, unexpected = model.load_state_dict(state_dict(shape, tensors), strict=False)
    if missing or unexpected:
        raise SystemExit(f"missing {missing}, unexpected {unexpected}")
    ids = np.random.default_rng(TAP_SEED).integers(3, shape.n_vocab, 150).astype(np.int32)
    with torch.no_grad():
        output = model(torch.from_numpy(ids.astype(np.int64))[None], output_hidden_states=True, use_cache=False)
    taps = output.hidden_states[15][0].float().numpy()
    path = ROOT / "tests" / "data" / "qwen35_tap.npz"
    np.savez_compressed(path, ids=ids, taps=taps, checksum=weights_checksum(tensors))
    print(f"{path}: {taps.shape}, standard deviation {taps.std():.4f}, {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
