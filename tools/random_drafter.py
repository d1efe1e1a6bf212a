"""Random drafters of prompt compression, as GGUF files that llama.cpp loads. Needs numpy and gguf only.

They have every mechanism of Qwen3.5 (Gated DeltaNet, gated full attention in every fourth block, partial RoPE) or of
Qwen3-0.6B, at any size, and say nothing sensible: for tests and for measuring times.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import gguf
import numpy as np
from numpy.typing import NDArray

CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

Tensors = dict[str, NDArray[np.float32]]


@dataclass(frozen=True)
class DrafterShape:
    """Dimensions of a random drafter. The defaults are tiny."""

    arch: Literal["qwen35", "qwen3"] = "qwen35"
    n_layer: int = 17
    n_embd: int = 64
    n_ff: int = 96
    n_head: int = 4
    n_head_kv: int = 2
    head_dim: int = 32
    n_rot: int = 16
    n_vocab: int = 320
    context_length: int = 8192
    state_size: int = 16
    n_k_heads: int = 2
    n_v_heads: int = 2
    conv_kernel: int = 4
    full_attention_interval: int = 4
    gain: float = 0.25
    """Scale of what a block adds to the residual; small, so that rounding does not grow from block to block."""
    norm_eps: float = 1e-6
    rope_base: float = 10_000_000.0

    def is_full(self, layer: int) -> bool:
        return self.arch == "qwen3" or (layer + 1) % self.full_attention_interval == 0


TINY_QWEN35 = DrafterShape()
TINY_QWEN3 = DrafterShape(arch="qwen3", n_layer=15, n_rot=32, rope_base=1_000_000.0)


def tensor_shapes(shape: DrafterShape) -> dict[str, tuple[int, ...]]:
    """GGUF name -> shape in numpy order."""
    s, h, d = shape, shape.n_embd, shape.head_dim
    value_dim = s.state_size * s.n_v_heads
    conv_dim = 2 * s.state_size * s.n_k_heads + value_dim
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (s.n_vocab, h), "output_norm.weight": (h,)}
    for layer in range(s.n_layer):
        block: dict[str, tuple[int, ...]] = {"attn_norm.weight": (h,)}
        if s.is_full(layer):
            block |= {
                "attn_q.weight": (s.n_head * d * (2 if s.arch == "qwen35" else 1), h),
                "attn_k.weight": (s.n_head_kv * d, h),
                "attn_v.weight": (s.n_head_kv * d, h),
                "attn_output.weight": (h, s.n_head * d),
                "attn_q_norm.weight": (d,),
                "attn_k_norm.weight": (d,),
            }
        else:
            block |= {
                "attn_qkv.weight": (conv_dim, h),
                "attn_gate.weight": (value_dim, h),
                "ssm_conv1d.weight": (conv_dim, s.conv_kernel),
                "ssm_dt.bias": (s.n_v_heads,),
                "ssm_a": (s.n_v_heads,),
                "ssm_beta.weight": (s.n_v_heads, h),
                "ssm_alpha.weight": (s.n_v_heads, h),
                "ssm_norm.weight": (s.state_size,),
                "ssm_out.weight": (h, value_dim),
            }
        block |= {
            "post_attention_norm.weight" if s.arch == "qwen35" else "ffn_norm.weight": (h,),
            "ffn_gate.weight": (s.n_ff, h),
            "ffn_up.weight": (s.n_ff, h),
            "ffn_down.weight": (h, s.n_ff),
        }
        shapes |= {f"blk.{layer}.{name}": size for name, size in block.items()}
    return shapes


def random_tensors(shape: DrafterShape, seed: int = 0) -> Tensors:
    """Float32 weights; norms are uniform in [0.5, 1.5] and differ everywhere, so that none is forgotten unnoticed."""
    rng = np.random.default_rng(seed)
    tensors: Tensors = {}
    for name, size in tensor_shapes(shape).items():
        if name.endswith("norm.weight"):
            values = rng.uniform(0.5, 1.5, size)
        elif name.endswith("ssm_a"):
            values = -rng.uniform(0.3, 2.0, size)
        elif name.endswith(".bias"):
            values = rng.uniform(-1.0, 1.0, size)
        else:
            width = 1.0 if name == "token_embd.weight" else size[-1] ** -0.5
            if name.endswith(("attn_output.weight", "ssm_out.weight", "ffn_down.weight")):
                width *= shape.gain
            values = rng.uniform(-1.0, 1.0, size) * (np.sqrt(3.0) * width)
        tensors[name] = values.astype(np.float32)
    return tensors


def byte_level_tokens(n_vocab: int) -> tuple[list[str], list[str]]:
    """(tokens, merges): control tokens, the 256 bytes of GPT-2's table, then pairs of lower-case letters."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    alphabet = [chr(byte) if byte in plain else chr(next(others)) for byte in range(256)]
    letters = "etaoinsrhldcumfpgwybvkxjqz"
    n_pairs = n_vocab - len(CONTROL_TOKENS) - len(alphabet)
    pairs = [(a, b) for a in letters for b in letters][: max(n_pairs, 0)]
    tokens = [*CONTROL_TOKENS, *alphabet, *(a + b for a, b in pairs)]
    if n_vocab < len(CONTROL_TOKENS) + len(alphabet):
        raise ValueError(f"n_vocab is {n_vocab}; a byte-level vocabulary needs {len(CONTROL_TOKENS) + len(alphabet)}")
    tokens += [f"<unused{i}>" for i in range(n_vocab - len(tokens))]
    return tokens, [f"{a} {b}" for a, b in pairs]


def write_drafter(
    path: str | Path,
    shape: DrafterShape = TINY_QWEN35,
    tensors: Tensors | None = None,
    *,
    seed: int = 0,
    dtype: Literal["f32", "f16", "q8_0"] = "f32",
    metadata: dict[str, Any] | None = None,
    tokenizer: bool = True,
    vocabulary: tuple[list[str], list[str]] | None = None,
    general: dict[str, str] | None = None,
) -> Path:
    """Write a drafter; matrices as `dtype`, vectors and the convolution f32. `metadata`: integer keys that replace.

    vocabulary: (tokens, merges) of a byte-level BPE whose first tokens are CONTROL_TOKENS; None is a toy one. general:
    string keys, such as "general.name".
    """
    tensors = random_tensors(shape, seed) if tensors is None else tensors
    writer = gguf.GGUFWriter(str(path), shape.arch)
    for key, text in (general or {}).items():
        writer.add_string(key, text)
    arch = shape.arch
    numbers: dict[str, int] = {
        "block_count": shape.n_layer,
        "context_length": shape.context_length,
        "embedding_length": shape.n_embd,
        "feed_forward_length": shape.n_ff,
        "attention.head_count": shape.n_head,
        "attention.head_count_kv": shape.n_head_kv,
        "attention.key_length": shape.head_dim,
        "attention.value_length": shape.head_dim,
        "rope.dimension_count": shape.n_rot,
    }
    if arch == "qwen35":
        numbers |= {
            "full_attention_interval": shape.full_attention_interval,
            "ssm.conv_kernel": shape.conv_kernel,
            "ssm.state_size": shape.state_size,
            "ssm.group_count": shape.n_k_heads,
            "ssm.time_step_rank": shape.n_v_heads,
            "ssm.inner_size": shape.state_size * shape.n_v_heads,
        }
        third = shape.n_rot // 6
        writer.add_array("qwen35.rope.dimension_sections", [shape.n_rot // 2 - 2 * third, third, third, 0])
    for key, number in (numbers | (metadata or {})).items():
        writer.add_uint32(f"{arch}.{key}", number)
    writer.add_float32(f"{arch}.attention.layer_norm_rms_epsilon", shape.norm_eps)
    writer.add_float32(f"{arch}.rope.freq_base", shape.rope_base)
    if tokenizer:
        _add_tokenizer(writer, shape, vocabulary)
    else:
        writer.add_tokenizer_model("none")
        writer.add_vocab_size(shape.n_vocab)
    for name, tensor in tensors.items():
        if tensor.ndim == 1 or "conv1d" in name or dtype == "f32":
            writer.add_tensor(name, tensor)
        elif dtype == "f16":
            writer.add_tensor(name, tensor.astype(np.float16))
        else:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quants.quantize(tensor, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Path(path)


def _add_tokenizer(
    writer: gguf.GGUFWriter, shape: DrafterShape, vocabulary: tuple[list[str], list[str]] | None
) -> None:
    tokens, merges = byte_level_tokens(shape.n_vocab) if vocabulary is None else vocabulary
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen35" if shape.arch == "qwen35" else "qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types(
        [
            int(gguf.TokenType.CONTROL if i < len(CONTROL_TOKENS) else gguf.TokenType.NORMAL)
            for i in range(shape.n_vocab)
        ]
    )
    writer.add_token_merges(merges)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(False)
