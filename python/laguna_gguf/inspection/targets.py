"""Laguna target models: shape, window, experts, tokenizer, end-of-generation tokens, and which drafters fit."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from laguna_gguf import _native
from laguna_gguf.convert.tokenizer import read_json_file
from laguna_gguf.errors import LagunaError

RELEASES = {
    "Laguna-XS.2, Laguna-XS-2.1": {"n_layer": 40, "n_embd": 2048, "n_vocab": 100352},
    "Laguna-S-2.1": {"n_layer": 48, "n_embd": 3072, "n_vocab": 100352},
}
"""Published targets with published drafters. Three numbers decide what fits; within them, what it was trained on."""

TURN_END = "</assistant>"
"""Laguna's end of a turn; a file that does not count it as an end generates on."""

_END_KEYS = ("eos", "eot", "eom")


def inspect_target(file: _native.GgufFile, arch: str, report: dict[str, Any]) -> None:
    """Fill config, tokenizer, drafters, notes and problems of a target in GGUF."""
    get = file.get

    def value(key: str) -> Any:
        return _plain(get(f"{arch}.{key}"))

    tokens = get("tokenizer.ggml.tokens")
    tokens = tokens if isinstance(tokens, list) else None
    report["config"] = {
        "n_layer": value("block_count"),
        "n_embd": value("embedding_length"),
        "n_vocab": len(tokens) if tokens is not None else value("vocab_size"),
    } | _known(
        n_head=value("attention.head_count"),
        n_head_kv=value("attention.head_count_kv"),
        head_dim=value("attention.key_length"),
        sliding_window=value("attention.sliding_window"),
        n_expert=value("expert_count"),
        n_expert_used=value("expert_used_count"),
        n_ctx_train=value("context_length"),
    )
    ends = {name: get(f"tokenizer.ggml.{name}_token_id") for name in _END_KEYS}
    ends = {name: i for name, i in ends.items() if isinstance(i, int)}
    report["tokenizer"] = _known(
        model=get("tokenizer.ggml.model"),
        pre=get("tokenizer.ggml.pre"),
        n_tokens=len(tokens) if tokens is not None else None,
        chat_template=isinstance(get("tokenizer.chat_template"), str),
        eog_ids=_eog(ends, tokens),
    )
    if tokens is None:
        report["problems"].append("tokenizer.ggml.tokens: missing, needed the vocabulary")
    else:
        _note_turn_end(tokens, ends.values(), report)
    if file.tensors() and file.tensor("token_embd.weight") is None:
        report["problems"].append("token_embd.weight: missing, needed the embedding that the drafter shares")
    _check_shape(report)


def inspect_target_directory(source: Path, config: Mapping[str, Any], report: dict[str, Any]) -> None:
    """The same for a Hugging Face directory; its weights are not looked at."""
    heads = config.get("num_attention_heads_per_layer") or config.get("num_attention_heads")
    report["config"] = {
        "n_layer": config.get("num_hidden_layers"),
        "n_embd": config.get("hidden_size"),
        "n_vocab": config.get("vocab_size"),
    } | _known(
        n_head=heads,
        n_head_kv=config.get("num_key_value_heads"),
        head_dim=config.get("head_dim"),
        sliding_window=config.get("sliding_window"),
        n_expert=config.get("num_experts"),
        n_expert_used=config.get("num_experts_per_tok"),
        n_ctx_train=config.get("max_position_embeddings"),
        quantization=(config.get("quantization_config") or {}).get("quant_method")
        if isinstance(config.get("quantization_config"), Mapping)
        else None,
    )
    ends = config.get("eos_token_id")
    ends = ends if isinstance(ends, list) else [ends]
    ids = [i for i in ends if isinstance(i, int) and not isinstance(i, bool)]
    path = source / "tokenizer.json"
    texts: dict[int, Any] = {}
    if path.is_file():
        try:
            texts = _added_tokens(read_json_file(path))
        except LagunaError as error:
            report["problems"].append(str(error))
    report["tokenizer"] = {"file": path.is_file(), "eog_ids": {str(i): texts.get(i) for i in ids}}
    _check_shape(report)


def _check_shape(report: dict[str, Any]) -> None:
    shape = report["config"]
    for name, field in {"n_layer": "block_count", "n_embd": "embedding_length", "n_vocab": "vocab_size"}.items():
        found = shape[name]
        if isinstance(found, bool) or not isinstance(found, int) or found < 1:
            report["problems"].append(f"{field}: found {found!r}, needed a whole number >= 1")
    report["drafters"] = {
        "needs": {
            "num_target_layers": shape["n_layer"],
            "hidden_size": shape["n_embd"],
            "vocab_size": shape["n_vocab"],
        },
        "published": [
            name for name, needs in RELEASES.items() if all(shape[key] == wanted for key, wanted in needs.items())
        ],
    }


def _note_turn_end(tokens: list[str], ends: Any, report: dict[str, Any]) -> None:
    if TURN_END in tokens and tokens.index(TURN_END) not in list(ends):
        report["notes"].append(
            f"{TURN_END} (id {tokens.index(TURN_END)}) is in the vocabulary but neither eos, eot nor eom: a turn may "
            "not end"
        )


def _eog(ends: Mapping[str, int], tokens: list[str] | None) -> dict[str, str | None]:
    """Token id (as text, for JSON) -> token."""
    return {str(i): tokens[i] if tokens is not None and 0 <= i < len(tokens) else None for i in ends.values()}


def _known(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _plain(value: Any) -> Any:
    """An array of equal numbers as one number, any other as a list."""
    if not isinstance(value, np.ndarray):
        return value
    numbers = value.tolist()
    return numbers[0] if numbers and all(n == numbers[0] for n in numbers) else numbers


def _added_tokens(tokenizer: Any) -> dict[int, Any]:
    """Id -> text of the tokens that tokenizer.json lists beside its vocabulary."""
    added = tokenizer.get("added_tokens") if isinstance(tokenizer, Mapping) else None
    entries = [t for t in added if isinstance(t, Mapping)] if isinstance(added, list) else []
    return {t["id"]: t.get("content") for t in entries if isinstance(t.get("id"), int)}
