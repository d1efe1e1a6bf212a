"""The numeric fixture of the demo pair: hidden rows, an anchor, and the logits that the reference computes for them.

`PYTHONPATH=tests:tools python tests/demo_pair_fixture.py` writes tests/data/demo_pair_logits.npz from the shipped
files.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from gguf import GGUFReader
from numpy.typing import NDArray

from captured_llama import CapturedLlama, new_capture
from reference.dflash_numpy import ReferenceDrafter

HERE = Path(__file__).resolve().parent
FIXTURE = HERE / "data" / "demo_pair_logits.npz"
N_ROWS = 150
"""Context rows: more than the drafter's window of 128."""

_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_gate": "self_attn.g_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def reference_drafter(drafter_path: Path, target_path: Path) -> ReferenceDrafter:
    """The independent numpy drafter on the tensors of two F32 GGUF files, read by gguf's own reader."""
    reader = GGUFReader(drafter_path)
    raw = {t.name.removesuffix(".weight"): np.array(t.data, np.float32) for t in reader.tensors}
    key = {name: field.contents() for name, field in reader.fields.items()}
    n_layers = key["dflash.block_count"]
    tensors = {"fc": raw["fc"], "hidden_norm": raw["enc.output_norm"], "norm": raw["output_norm"]}
    tensors |= {f"aux_hidden_norms.{i}": row for i, row in enumerate(raw["enc.aux_norm"])}
    for i in range(n_layers):
        tensors |= {f"layers.{i}.{hf}": raw[f"blk.{i}.{name}"] for name, hf in _BLOCK.items()}
        qkv = [raw[f"blk.{i}.attn_{part}"] for part in "qkv"]
        tensors[f"layers.{i}.self_attn.qkv_proj"] = np.concatenate(qkv)
    config = {
        "num_hidden_layers": n_layers,
        "num_attention_heads": key["dflash.attention.head_count"],
        "num_key_value_heads": key["dflash.attention.head_count_kv"],
        "head_dim": key["dflash.attention.key_length"],
        "rms_norm_eps": key["dflash.attention.layer_norm_rms_epsilon"],
        "rope_theta": key["dflash.rope.freq_base"],
        "sliding_window": key["dflash.attention.sliding_window"],
        "dflash_config": {
            "mask_token_id": key["tokenizer.ggml.mask_token_id"],
            "target_layer_ids": [i - 1 for i in key["dflash.target_layers"]],
        },
    }
    target = {t.name: np.array(t.data, np.float32) for t in GGUFReader(target_path).tensors}
    return ReferenceDrafter(config, tensors, target["token_embd.weight"], target["output.weight"])


def make_fixture(target_path: Path, drafter_path: Path, prompt: str) -> dict[str, NDArray]:
    """Capture N_ROWS rows of a text and compute the block's logits by the reference."""
    layers = [i - 1 for i in GGUFReader(drafter_path).fields["dflash.target_layers"].contents()]
    width = GGUFReader(drafter_path).fields["dflash.embedding_length"].contents()
    capture = new_capture(layers, width)
    llama = CapturedLlama(target_path, capture)
    ids = llama.tokenize(prompt.encode(), add_bos=True, special=True)
    assert len(ids) > N_ROWS, f"the text has {len(ids)} tokens; needed more than {N_ROWS}"
    llama.decode_all(ids[:N_ROWS])
    features = capture.rows().astype(np.float16)  # small to store; the reference sees the rounded values as well
    llama.close()
    reference = reference_drafter(drafter_path, target_path)
    reference.append(features.astype(np.float32), 0)
    _, logits = reference.draft(ids[N_ROWS], 15)
    return {"features": features, "anchor": np.int32(ids[N_ROWS]), "logits": logits.astype(np.float32)}


def main() -> None:
    from measure_demo_pair import exact_pair, load_prompts

    text = "".join(prompt["prompt"] for prompt in load_prompts()[:4])
    with exact_pair() as (target, drafter):
        FIXTURE.parent.mkdir(exist_ok=True)
        np.savez_compressed(FIXTURE, **make_fixture(target, drafter, text))


if __name__ == "__main__":
    main()
