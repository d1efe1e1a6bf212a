"""Tensor names and shapes of a Laguna DFlash drafter: ours (dialect A) and those of each source."""

from laguna_gguf.dflash.config import DrafterConfig
from laguna_gguf.dflash.gguf_config import Dialect

Shape = tuple[int, ...]

FC = "fc"
AUX_NORM = "enc.aux_norm"
HIDDEN_NORM = "enc.output_norm"
OUTPUT_NORM = "output_norm"

NORMS = frozenset({"attn_norm", "ffn_norm", "attn_q_norm", "attn_k_norm"})

_HF_BLOCK = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_gate": "self_attn.g_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
QKV = ("attn_q", "attn_k", "attn_v")
"""Rows of the fused qkv_proj, in this order."""


def is_norm(name: str) -> bool:
    """Whether an internal name is a norm weight, kept as float32 everywhere."""
    return name in (AUX_NORM, HIDDEN_NORM, OUTPUT_NORM) or name.rpartition(".")[2] in NORMS


def block_shapes(config: DrafterConfig) -> dict[str, Shape]:
    """ggml shapes (ne, contiguous axis first) of the 12 tensors of one layer."""
    h, i, d = config.hidden_size, config.intermediate_size, config.head_dim
    n_q, n_kv = config.num_attention_heads * d, config.num_key_value_heads * d
    return {
        "attn_norm": (h,),
        "attn_q": (h, n_q),
        "attn_k": (h, n_kv),
        "attn_v": (h, n_kv),
        "attn_output": (n_q, h),
        "attn_q_norm": (d,),
        "attn_k_norm": (d,),
        "attn_gate": (h, config.num_attention_heads),
        "ffn_norm": (h,),
        "ffn_gate": (h, i),
        "ffn_up": (h, i),
        "ffn_down": (i, h),
    }


def internal_shapes(config: DrafterConfig) -> dict[str, Shape]:
    """ggml shapes of all tensors by internal name: 4 and 12 a layer."""
    h, n_captured = config.hidden_size, len(config.target_layer_ids)
    shapes = {FC: (n_captured * h, h), AUX_NORM: (h, n_captured), HIDDEN_NORM: (h,), OUTPUT_NORM: (h,)}
    for layer in range(config.num_hidden_layers):
        shapes |= {f"blk.{layer}.{name}": ne for name, ne in block_shapes(config).items()}
    return shapes


def aux_norm_names(pattern: str, n_captured: int) -> list[str]:
    """The tensors that make up enc.aux_norm under a naming pattern with or without `{i}`."""
    return [pattern.format(i=i) for i in range(n_captured)] if "{i}" in pattern else [pattern]


def gguf_names(config: DrafterConfig, dialect: Dialect) -> dict[str, list[str]]:
    """Internal name -> tensors of the file (without ".weight") that make it up."""
    names = {name: [name] for name in internal_shapes(config)}
    names[FC] = [dialect.fc]
    names[HIDDEN_NORM] = [dialect.hidden_norm]
    names[AUX_NORM] = aux_norm_names(dialect.aux_norms, len(config.target_layer_ids))
    return names


def hf_names(config: DrafterConfig) -> dict[str, list[str]]:
    """Internal name -> tensors of a split Hugging Face checkpoint (without ".weight")."""
    names = {
        FC: ["fc"],
        HIDDEN_NORM: ["hidden_norm"],
        OUTPUT_NORM: ["norm"],
        AUX_NORM: aux_norm_names("aux_hidden_norms.{i}", len(config.target_layer_ids)),
    }
    for layer in range(config.num_hidden_layers):
        names |= {f"blk.{layer}.{name}": [f"layers.{layer}.{hf}"] for name, hf in _HF_BLOCK.items()}
    return names
