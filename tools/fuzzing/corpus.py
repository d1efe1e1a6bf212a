"""Sound inputs of every kind that the package reads, as small as they get."""

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.numpy import save

from fixtures import drafter_config, drafter_tensors, layout_tensors
from malformed import builder as b
from malformed.builder import GgufBuilder
from malformed.drafters import build, drafter_parts
from quantised_fixtures import FORMS, quantised_drafter

TINY: dict[str, Any] = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "vocab_size": 32,
    "target_layer_ids": [5],
}
WIDE = 32
"""Hidden size of the quantised drafters."""

QUANTISED = ("nvfp4", "modelopt-file", "int4-zero-points", "fp8-tensor", "fp8-block", "mlx-4")

TARGET_ROLE, DRAFTER_ROLE, OTHER_ROLE = "target", "drafter", "other"


@dataclass(frozen=True)
class Seed:
    """Files by name, the one to open (or "." for the folder), and what a conversion would use it as."""

    name: str
    files: dict[str, bytes]
    opened: str
    role: str
    hidden: int = TINY["hidden_size"]


def target_gguf(hidden: int) -> bytes:
    """A target that fits drafters of a hidden size."""
    builder = GgufBuilder().key("general.architecture", b.STRING, "laguna")
    builder.key("laguna.block_count", b.U32, 8).key("laguna.embedding_length", b.U32, hidden)
    builder.array_key("laguna.attention.head_count", b.U32, [2, 4] * 4)
    builder.key("laguna.attention.sliding_window", b.U32, 16)
    builder.key("tokenizer.ggml.model", b.STRING, "gpt2").key("tokenizer.ggml.pre", b.STRING, "laguna")
    builder.array_key("tokenizer.ggml.tokens", b.STRING, [f"t{i}" for i in range(TINY["vocab_size"])])
    builder.array_key("tokenizer.ggml.token_type", b.I32, [1] * TINY["vocab_size"])
    builder.array_key("tokenizer.ggml.scores", b.F32, [0.5] * TINY["vocab_size"])
    builder.key("tokenizer.ggml.eos_token_id", b.U32, 2).key("tokenizer.chat_template", b.STRING, "{{ messages }}")
    return builder.tensor("token_embd.weight", (hidden, TINY["vocab_size"])).build()


def _scoring(arch: str, prefix: str, keys: dict[str, tuple[int, Any]], tensors: dict[str, tuple[int, ...]]) -> bytes:
    builder = GgufBuilder().key("general.architecture", b.STRING, arch)
    builder.key(f"{prefix}.base_model", b.STRING, "Qwen/Qwen3.5-0.8B")
    builder.key(f"{prefix}.runtime_gguf_sha256", b.STRING, "0" * 64)
    builder.key(f"{prefix}.feature_tap", b.STRING, "post_block14_residual_before_block15")
    for key, (kind, value) in keys.items():
        builder.key(f"{prefix}.{key}", kind, value)
    for name, ne in tensors.items():
        builder.tensor(f"{prefix}.{name}", ne)
    return builder.build()


def _head() -> bytes:
    keys = {"schema": (b.STRING, "qwen3_5_0_8b_nope_qk_mass_v1")}
    return _scoring("pflash_scoring_head", "scoringhead", keys, {"attn_q.weight": (8, 16), "attn_k.weight": (8, 4)})


def _probe() -> bytes:
    keys: dict[str, tuple[int, Any]] = {
        "schema": (b.STRING, "qwen3_5_0_8b_segment_probe_v1"),
        "threshold": (b.F32, 0.5),
        "norm_eps": (b.F32, 1e-5),
        "min_segment": (b.U32, 4),
        "max_segment": (b.U32, 64),
        "conv_taps": (b.U32, 3),
    }
    one = {"fc2.weight": (4,), "fc2.bias": (1,), "conv.weight": (3,), "conv.bias": (1,)}
    tensors: dict[str, tuple[int, ...]] = {
        "norm.weight": (8,),
        "norm.bias": (8,),
        "fc1.weight": (8, 4),
        "fc1.bias": (4,),
    }
    tensors |= one | {f"subunit.{name}": ne for name, ne in one.items()}
    return _scoring("segmentprobe", "segmentprobe", keys, tensors)


def _split() -> dict[str, bytes]:
    keys, tensors = drafter_parts("A", **TINY)
    names = list(tensors)
    files = {}
    for i in range(3):
        part = build(keys if i == 0 else {}, {name: tensors[name] for name in names[i::3]})
        part.key("split.no", b.U16, i).key("split.count", b.U16, 3).key("split.tensors.count", b.I32, len(names))
        files[f"m-{i + 1:05d}-of-00003.gguf"] = part.build()
    return files


def _directory(layout: Any) -> dict[str, bytes]:
    config = drafter_config(**TINY)
    tensors = layout_tensors(drafter_tensors(config), config, layout)
    files = {"config.json": json.dumps(config).encode()}
    if layout != "sharded":
        return files | {"model.safetensors": save(tensors)}
    names = list(tensors)
    weight_map: dict[str, str] = {}
    for i in range(2):
        shard = f"model-{i + 1:05d}-of-00002.safetensors"
        files[shard] = save({name: tensors[name] for name in names[i::2]})
        weight_map |= dict.fromkeys(names[i::2], shard)
    return files | {"model.safetensors.index.json": json.dumps({"weight_map": weight_map}).encode()}


def _quantised_directory(form: str) -> dict[str, bytes]:
    """A checkpoint in one of the quantised forms; rows hold one group of 32."""
    shape = TINY | {"hidden_size": WIDE, "intermediate_size": WIDE, "head_dim": 16}
    with tempfile.TemporaryDirectory() as folder:
        quantised_drafter(FORMS[form], **shape).write(Path(folder))
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def _target_directory() -> dict[str, bytes]:
    n_vocab = TINY["vocab_size"]
    config = {"model_type": "laguna", "hidden_size": 8, "num_hidden_layers": 8, "vocab_size": n_vocab,
              "eos_token_id": [2, 24]}  # fmt: skip
    tokenizer = {
        "added_tokens": [{"id": 2, "content": "<eos>", "special": True}, {"id": 24, "content": "</assistant>"}],
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "ByteLevel"}]},
        "model": {"type": "BPE", "vocab": {f"t{i}": i for i in range(3, 20)}, "merges": [["t", "3"]]},
    }
    return {
        "config.json": json.dumps(config).encode(),
        "tokenizer.json": json.dumps(tokenizer).encode(),
        "tokenizer_config.json": json.dumps({"bos_token": "<eos>", "eos_token": "<eos>"}).encode(),
    }


def seeds() -> list[Seed]:
    """One of each kind."""
    found = []
    for dialect in "ABC":
        keys, tensors = drafter_parts(dialect, **TINY)
        found.append(Seed(f"dialect-{dialect}", {"x.gguf": build(keys, tensors).build()}, "x.gguf", DRAFTER_ROLE))
    found.append(Seed("split", _split(), "m-00001-of-00003.gguf", DRAFTER_ROLE))
    found += [Seed(f"dir-{layout}", _directory(layout), ".", DRAFTER_ROLE) for layout in ("fused", "split", "sharded")]
    found += [Seed(f"dir-{form}", _quantised_directory(form), ".", DRAFTER_ROLE, WIDE) for form in QUANTISED]
    found.append(Seed("target", {"x.gguf": target_gguf(TINY["hidden_size"])}, "x.gguf", TARGET_ROLE))
    found.append(Seed("target-dir", _target_directory(), ".", TARGET_ROLE))
    found.append(Seed("head", {"x.gguf": _head()}, "x.gguf", OTHER_ROLE))
    found.append(Seed("probe", {"x.gguf": _probe()}, "x.gguf", OTHER_ROLE))
    return found
