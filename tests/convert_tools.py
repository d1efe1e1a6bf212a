"""Targets for conversions: only what one reads of them, metadata and tokenizer."""

import json
from pathlib import Path
from typing import Any

import gguf

N_VOCAB = 320


def write_tokenizer(path: Path, n_vocab: int = N_VOCAB) -> None:
    """A byte-level BPE tokenizer: 200 plain tokens, 2 merges, a few added ones, and ids that no token has."""
    vocab = {f"t{i}": i for i in range(30, 230)}
    added = [
        {"id": 2, "content": "<eos>", "special": True},
        {"id": 12, "content": "<|MASK|>", "special": False},
        {"id": 24, "content": "</assistant>", "special": False},
        {"id": 25, "content": "<tool>", "special": False},
        {"id": n_vocab - 1, "content": "<last>", "special": True},
    ]
    data = {
        "added_tokens": added,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Split"}, {"type": "ByteLevel"}]},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<eos>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        },
        "model": {"type": "BPE", "vocab": vocab, "merges": [["t", "30"], ["t", "3 1"]]},
    }
    path.mkdir(exist_ok=True)
    (path / "tokenizer.json").write_text(json.dumps(data))
    (path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<eos>", "eos_token": "<eos>"}))
    (path / "chat_template.jinja").write_text("{{ messages }}")


def write_target_dir(path: Path, **overrides: Any) -> Path:
    config = {
        "model_type": "laguna",
        "architectures": ["LagunaForCausalLM"],
        "hidden_size": 64,
        "num_hidden_layers": 8,
        "vocab_size": N_VOCAB,
        "bos_token_id": 2,
        "eos_token_id": [2, 24],
    } | overrides
    write_tokenizer(path)
    (path / "config.json").write_text(json.dumps(config))
    return path


def write_target_gguf(path: Path, *, n_layer: int = 8, n_embd: int = 64, n_vocab: int = N_VOCAB) -> Path:
    """Metadata of a target: a conversion reads nothing else."""
    w = gguf.GGUFWriter(path, "laguna")
    w.add_uint32("laguna.block_count", n_layer)
    w.add_uint32("laguna.embedding_length", n_embd)
    w.add_string("tokenizer.ggml.model", "gpt2")
    w.add_string("tokenizer.ggml.pre", "laguna")
    w.add_array("tokenizer.ggml.tokens", [f"tökén{i}".encode() if i != 7 else b"\xff\xfe" for i in range(n_vocab)])
    w.add_array("tokenizer.ggml.token_type", [1 + i % 6 for i in range(n_vocab)])
    w.add_key_value("tokenizer.ggml.scores", [0.5] * n_vocab, gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.FLOAT32)
    w.add_array("tokenizer.ggml.merges", ["a b", "ab c"])
    w.add_uint32("tokenizer.ggml.eos_token_id", 2)
    w.add_uint32("tokenizer.ggml.mask_token_id", 99)  # the drafter's own counts
    w.add_bool("tokenizer.ggml.add_bos_token", True)
    w.add_string("tokenizer.chat_template", "{{ messages }}")
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return path
