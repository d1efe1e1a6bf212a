"""Write small Laguna targets as GGUF files that stock llama.cpp loads. Needs numpy and gguf only.

Tensors are passed under their GGUF names as float arrays in row-major order, so a matrix product is
``x @ tensor.T`` for a tensor of shape [n_out, n_in]; see `tensor_shapes` for the full list.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np

EOS_ID = 2
PAD_ID = 8
MASK_ID = 12
EOT_ID = 24

FILE_TYPES = {
    "f32": gguf.LlamaFileType.ALL_F32,
    "f16": gguf.LlamaFileType.MOSTLY_F16,
    "q8_0": gguf.LlamaFileType.MOSTLY_Q8_0,
}

SPECIAL_TOKENS: tuple[str, ...] = (
    "<unk>",
    "<reserved_1>",
    "〈|EOS|〉",  # 2: end of text, also the BOS
    "<reserved_3>",
    "<reserved_4>",
    "<reserved_5>",
    "<reserved_6>",
    "<reserved_7>",
    "<pad>",  # 8
    "<reserved_9>",
    "<reserved_10>",
    "<reserved_11>",
    "<mask>",  # 12: what the drafter reads in the rows to be drafted
    "<reserved_13>",
    "<reserved_14>",
    "<reserved_15>",
    "<think>",
    "</think>",
    "<reserved_18>",
    "<system>",
    "</system>",
    "<user>",
    "</user>",
    "<assistant>",
    "</assistant>",  # 24: end of the assistant's turn
)

# The tags are plain text of the conversation; the BOS is added by the template as Laguna's does.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<' + message['role'] + '>\\n' + message['content'] + '\\n</' + message['role'] + '>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<assistant>\\n' }}{% endif %}"
)


@dataclass(frozen=True)
class TargetConfig:
    """Hyper-parameters of a Laguna target. The defaults are those of the demo target."""

    n_vocab: int = 2048
    n_embd: int = 256
    n_layer: int = 8
    full_period: int = 4  # layers 0, full_period, 2 * full_period ... attend to everything
    n_head_full: int = 4
    n_head_swa: int = 6
    n_head_kv: int = 2
    head_dim: int = 64
    window: int = 128
    rope_base_full: float = 500000.0
    rope_dims_full: int = 32
    rope_base_swa: float = 10000.0
    rope_dims_swa: int = 64
    n_dense_lead: int = 1
    n_ff: int = 768
    n_expert: int = 8
    n_expert_used: int = 2
    n_ff_expert: int = 64
    n_ff_shared: int = 256
    expert_scale: float = 2.5
    rms_eps: float = 1e-6
    n_ctx_train: int = 2048
    tied: bool = False

    def is_full(self, layer: int) -> bool:
        """Whether a 0-based layer attends to the whole context instead of a window."""
        return layer % self.full_period == 0

    def n_head(self, layer: int) -> int:
        """Query heads of a layer."""
        return self.n_head_full if self.is_full(layer) else self.n_head_swa

    def is_dense(self, layer: int) -> bool:
        """Whether a layer has a plain feed-forward block instead of experts."""
        return layer < self.n_dense_lead


def tensor_shapes(config: TargetConfig) -> dict[str, tuple[int, ...]]:
    """GGUF name to row-major shape, for every tensor of a target."""
    h, d, c = config.n_embd, config.head_dim, config
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (c.n_vocab, h), "output_norm.weight": (h,)}
    if not c.tied:
        shapes["output.weight"] = (c.n_vocab, h)
    for layer in range(c.n_layer):
        heads = c.n_head(layer)
        block: dict[str, tuple[int, ...]] = {
            "attn_norm.weight": (h,),
            "attn_q.weight": (heads * d, h),
            "attn_k.weight": (c.n_head_kv * d, h),
            "attn_v.weight": (c.n_head_kv * d, h),
            "attn_output.weight": (h, heads * d),
            "attn_q_norm.weight": (d,),
            "attn_k_norm.weight": (d,),
            "attn_gate.weight": (heads, h),
            "ffn_norm.weight": (h,),
        }
        if c.is_dense(layer):
            block |= {"ffn_gate.weight": (c.n_ff, h), "ffn_up.weight": (c.n_ff, h), "ffn_down.weight": (h, c.n_ff)}
        else:
            block |= {
                "ffn_gate_inp.weight": (c.n_expert, h),
                "exp_probs_b.bias": (c.n_expert,),
                "ffn_gate_exps.weight": (c.n_expert, c.n_ff_expert, h),
                "ffn_up_exps.weight": (c.n_expert, c.n_ff_expert, h),
                "ffn_down_exps.weight": (c.n_expert, h, c.n_ff_expert),
                "ffn_gate_shexp.weight": (c.n_ff_shared, h),
                "ffn_up_shexp.weight": (c.n_ff_shared, h),
                "ffn_down_shexp.weight": (h, c.n_ff_shared),
            }
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in block.items()}
    return shapes


def random_target(config: TargetConfig, seed: int) -> dict[str, np.ndarray]:
    """Random float32 tensors of a target, with norm weights in [0.5, 1.5] that differ everywhere."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, shape in tensor_shapes(config).items():
        if name.endswith("norm.weight"):
            values = rng.uniform(0.5, 1.5, shape)
        elif name.endswith(".bias"):
            values = rng.uniform(-0.1, 0.1, shape)
        elif name == "token_embd.weight":
            values = rng.standard_normal(shape)
        else:
            values = rng.standard_normal(shape) / np.sqrt(shape[-1])
        tensors[name] = values.astype(np.float32)
    return tensors


def byte_alphabet() -> list[str]:
    """The 256 characters that stand for bytes 0..255 in a byte-level BPE vocabulary (GPT-2's table)."""
    keep = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in keep else chr(next(others)) for byte in range(256)]


def make_tokenizer(tokens: list[str], merges: list[str]) -> dict[str, Any]:
    """A tokenizer dict for `write_target_gguf` from a vocabulary whose first ids are `SPECIAL_TOKENS`."""
    if tuple(tokens[: len(SPECIAL_TOKENS)]) != SPECIAL_TOKENS:
        raise ValueError(f"the first {len(SPECIAL_TOKENS)} tokens must be SPECIAL_TOKENS")
    n_special = len(SPECIAL_TOKENS)
    types = [gguf.TokenType.CONTROL] * n_special + [gguf.TokenType.NORMAL] * (len(tokens) - n_special)
    return {
        "tokens": list(tokens),
        "types": [int(kind) for kind in types],
        "merges": list(merges),
        "pre": "laguna",
        "bos": EOS_ID,
        "eos": EOS_ID,
        "eot": EOT_ID,
        "pad": PAD_ID,
        "mask": MASK_ID,
        "unk": 0,
        "chat_template": CHAT_TEMPLATE,
    }


def toy_tokenizer(n_vocab: int) -> dict[str, Any]:
    """A valid byte-level tokenizer of exactly `n_vocab` >= 281 ids, merging pairs of lower-case letters first."""
    base = [*SPECIAL_TOKENS, *byte_alphabet()]
    if n_vocab < len(base):
        raise ValueError(f"n_vocab is {n_vocab}; a byte-level vocabulary with its specials needs {len(base)}")
    letters = "etaoinsrhldcumfpgwybvkxjqz"
    pairs = [(a, b) for a in letters for b in letters]
    pairs += [(a + b, c) for a, b in pairs for c in letters]
    pairs = pairs[: n_vocab - len(base)]
    if len(base) + len(pairs) < n_vocab:
        raise ValueError(f"n_vocab is {n_vocab}; a toy vocabulary has at most {len(base) + len(pairs)} ids")
    return make_tokenizer(base + [a + b for a, b in pairs], [f"{a} {b}" for a, b in pairs])


def write_target_gguf(
    path: str | Path,
    config: TargetConfig,
    tensors: dict[str, np.ndarray],
    tokenizer: dict[str, Any],
    dtype: str = "f16",
    metadata: dict[str, str] | None = None,
) -> None:
    """Write a Laguna target. Matrices are stored as `dtype` ("f32", "f16" or "q8_0"); vectors and the router stay F32.

    `metadata` adds string keys such as "general.name". Raises ValueError for a missing, unknown or misshapen tensor,
    and for a vocabulary of another size than the config's.
    """
    if dtype not in FILE_TYPES:
        raise ValueError(f"dtype is {dtype!r}; it must be one of {', '.join(FILE_TYPES)}")
    shapes = tensor_shapes(config)
    if set(shapes) != set(tensors):
        raise ValueError(f"tensor names differ from the config's: {sorted(set(shapes) ^ set(tensors))}")
    if len(tokenizer["tokens"]) != config.n_vocab:
        raise ValueError(f"the tokenizer has {len(tokenizer['tokens'])} tokens; the config says {config.n_vocab}")

    writer = gguf.GGUFWriter(str(path), "laguna")
    for key, text in (metadata or {}).items():
        writer.add_string(key, text)
    writer.add_file_type(FILE_TYPES[dtype])
    _add_hyper_parameters(writer, config)
    _add_tokenizer(writer, tokenizer)
    for name, shape in shapes.items():
        tensor = tensors[name]
        if tensor.shape != shape:
            raise ValueError(f"{name} has shape {tensor.shape}; the config needs {shape}")
        small = tensor.ndim == 1 or name.endswith("ffn_gate_inp.weight")
        if dtype == "q8_0" and not small:
            raw_dtype = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quants.quantize(tensor.astype(np.float32), raw_dtype), raw_dtype=raw_dtype)
        else:
            stored = np.float32 if small or dtype == "f32" else np.float16
            writer.add_tensor(name, np.ascontiguousarray(tensor, dtype=stored))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_hyper_parameters(writer: gguf.GGUFWriter, config: TargetConfig) -> None:
    layers = range(config.n_layer)
    writer.add_vocab_size(config.n_vocab)
    writer.add_context_length(config.n_ctx_train)
    writer.add_embedding_length(config.n_embd)
    writer.add_block_count(config.n_layer)
    writer.add_feed_forward_length(config.n_ff)
    writer.add_head_count([config.n_head(layer) for layer in layers])
    writer.add_head_count_kv(config.n_head_kv)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_eps)
    writer.add_rope_freq_base(config.rope_base_full)
    writer.add_rope_dimension_count(config.rope_dims_full)
    writer.add_float32("laguna.rope.freq_base_swa", config.rope_base_swa)
    writer.add_uint32("laguna.rope.dimension_count_swa", config.rope_dims_swa)
    writer.add_sliding_window(config.window)
    writer.add_array("laguna.attention.sliding_window_pattern", [not config.is_full(layer) for layer in layers])
    writer.add_leading_dense_block_count(config.n_dense_lead)
    writer.add_expert_count(config.n_expert)
    writer.add_expert_used_count(config.n_expert_used)
    writer.add_expert_feed_forward_length(config.n_ff_expert)
    writer.add_expert_shared_feed_forward_length(config.n_ff_shared)
    writer.add_expert_weights_norm(True)
    writer.add_expert_weights_scale(config.expert_scale)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def _add_tokenizer(writer: gguf.GGUFWriter, tokenizer: dict[str, Any]) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(tokenizer["pre"])
    writer.add_token_list(tokenizer["tokens"])
    writer.add_token_types(tokenizer["types"])
    writer.add_token_merges(tokenizer["merges"])
    writer.add_bos_token_id(tokenizer["bos"])
    writer.add_eos_token_id(tokenizer["eos"])
    writer.add_eot_token_id(tokenizer["eot"])
    writer.add_pad_token_id(tokenizer["pad"])
    writer.add_unk_token_id(tokenizer["unk"])
    writer.add_mask_token_id(tokenizer["mask"])
    writer.add_add_bos_token(True)
    writer.add_chat_template(tokenizer["chat_template"])
