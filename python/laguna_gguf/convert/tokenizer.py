"""Tokenizer keys for a drafter: copied from a GGUF file, or built from a Hugging Face directory."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np

from laguna_gguf import _native
from laguna_gguf.dflash.config import read_json
from laguna_gguf.errors import CheckpointError, ConfigError, TargetMismatchError

TOKENIZER_FILE = "tokenizer.json"
PRE_TOKENIZER = "laguna"
"""llama.cpp's name of the splitting rule that Laguna's vocabulary was built with."""
_MAX_JSON_BYTES = 64 << 20
"""Vocabulary and merges of 100,000 tokens take 10 MB and more."""
_MAX_PADDING = 1 << 17
"""Vocabularies are padded to a round number; a claim far beyond that must not become a list."""
_TURN_END = "</assistant>"

_READER_ERRORS = (ValueError, TypeError, KeyError, AttributeError, IndexError, OSError, RecursionError)
"""What gguf.SpecialVocab raises on tokenizer files that it does not check."""

_NORMAL = int(gguf.TokenType.NORMAL)
_CONTROL = int(gguf.TokenType.CONTROL)
_USER_DEFINED = int(gguf.TokenType.USER_DEFINED)
_UNUSED = int(gguf.TokenType.UNUSED)


def gguf_tokenizer(file: _native.GgufFile) -> dict[str, Any]:
    """All `tokenizer.*` keys of a GGUF file; CheckpointError when it has no token list."""
    keys = {key: file.get(key) for key in file.keys() if key.startswith("tokenizer.")}
    if not isinstance(keys.get("tokenizer.ggml.tokens"), list):
        raise CheckpointError(f"{file.paths[0]}: no tokenizer.ggml.tokens")
    return keys


def hf_tokenizer(directory: Path, n_vocab: int) -> dict[str, Any]:
    """GGUF tokenizer keys from `tokenizer.json`, `tokenizer_config.json` and `config.json` of a directory.

    Byte-level BPE only, as llama.cpp's converter writes it for Laguna: ids that no token has become unused `[PAD<id>]`.
    Raises ConfigError for another kind of tokenizer, TargetMismatchError for more than `n_vocab` tokens,
    CheckpointError for damaged files.
    """
    path = directory / TOKENIZER_FILE
    data = read_json_file(path)
    model = data.get("model")
    if not isinstance(model, dict) or model.get("type") != "BPE" or not _uses_bytes(data.get("pre_tokenizer")):
        raise ConfigError(f"{path}: needed a byte-level BPE tokenizer (model.type BPE, pre_tokenizer ByteLevel)")
    tokens, types = _token_list(model.get("vocab"), data.get("added_tokens") or [], n_vocab, path)
    try:
        special = gguf.SpecialVocab(directory, load_merges=True, n_vocab=n_vocab)
    except _READER_ERRORS as error:
        raise CheckpointError(f"{directory}: its tokenizer files cannot be read ({error!r})") from error
    if not all(isinstance(merge, str) for merge in special.merges):
        raise CheckpointError(f"{path}: malformed merges")
    keys: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": PRE_TOKENIZER,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(types, dtype=np.int32),
        "tokenizer.ggml.merges": special.merges,
    }
    keys |= {f"tokenizer.ggml.{_id_name(name)}": i for name, i in special.special_token_ids.items()}
    keys |= {f"tokenizer.ggml.add_{name}_token": bool(flag) for name, flag in special.add_special_token.items()}
    keys |= _end_ids(directory, keys, n_vocab)
    template = _chat_template(directory, special.chat_template)
    if template is not None:
        keys["tokenizer.chat_template"] = template
    return keys


def read_json_file(path: Path) -> dict[str, Any]:
    """A JSON object; CheckpointError when it is missing, no regular file, or not one."""
    if not path.is_file():  # opening a FIFO would wait
        raise CheckpointError(f"{path}: no such file")
    try:
        data = read_json(path, _MAX_JSON_BYTES)
    except ConfigError as error:
        raise CheckpointError(str(error)) from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path}: not a JSON object")
    return data


def _uses_bytes(pre_tokenizer: Any, depth: int = 4) -> bool:
    """Whether ByteLevel is among the pre-tokenizers; published files nest them once."""
    if not isinstance(pre_tokenizer, dict) or depth == 0:
        return False
    parts = pre_tokenizer.get("pretokenizers")
    parts = parts if isinstance(parts, list) else []
    return pre_tokenizer.get("type") == "ByteLevel" or any(_uses_bytes(part, depth - 1) for part in parts)


def _token_list(vocab: Any, added: Any, n_vocab: int, path: Path) -> tuple[list[str], list[int]]:
    entries: dict[int, tuple[str, int]] = {}

    def add(token: Any, text: str, kind: int) -> None:
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            raise CheckpointError(f"{path}: token id {token!r}, needed a whole number >= 0")
        if token >= n_vocab:
            raise TargetMismatchError(f"{path}: vocab_size: token id {token} in a vocabulary of {n_vocab}")
        entries[token] = (text, kind)

    if not isinstance(vocab, dict) or not isinstance(added, list):
        raise CheckpointError(f"{path}: no vocabulary")
    for text, token in vocab.items():
        add(token, text, _NORMAL)
    for token in added:
        if not isinstance(token, dict) or not isinstance(token.get("content"), str):
            raise CheckpointError(f"{path}: malformed added_tokens")
        text = token["content"]
        control = bool(token.get("special")) or text == _TURN_END or (text.startswith("<|") and text.endswith("|>"))
        add(token.get("id"), text, _CONTROL if control else _USER_DEFINED)
    if n_vocab - len(entries) > _MAX_PADDING:
        raise TargetMismatchError(
            f"{path}: vocab_size: {len(entries)} tokens for a vocabulary of {n_vocab}, at most {_MAX_PADDING} ids may "
            "be without one"
        )
    tokens = [entries.get(i, (f"[PAD{i}]", _UNUSED)) for i in range(n_vocab)]
    return [text for text, _ in tokens], [kind for _, kind in tokens]


def _id_name(special: str) -> str:
    """llama.cpp's key for a special token."""
    return {"unk": "unknown_token_id", "sep": "seperator_token_id", "pad": "padding_token_id"}.get(
        special, f"{special}_token_id"
    )


def _end_ids(directory: Path, keys: dict[str, Any], n_vocab: int) -> dict[str, int]:
    """Laguna ends a text with one token and a turn with another; config.json lists both as eos_token_id."""
    config = read_json_file(directory / "config.json") if (directory / "config.json").is_file() else {}
    ends = config.get("eos_token_id")
    ends = ends if isinstance(ends, list) else []
    ends = [i for i in ends if isinstance(i, int) and not isinstance(i, bool) and 0 <= i < n_vocab]
    eos = keys.get("tokenizer.ggml.eos_token_id", ends[0] if ends else None)
    others = [i for i in ends if i not in (eos, keys.get("tokenizer.ggml.bos_token_id"))]
    found = {} if eos is None else {"tokenizer.ggml.eos_token_id": eos}
    return found | ({"tokenizer.ggml.eot_token_id": others[0]} if others else {})


def _chat_template(directory: Path, from_config: Any) -> str | None:
    path = directory / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{path}: cannot be read ({error})") from error
    if isinstance(from_config, list):  # several named templates
        named = {t.get("name"): t.get("template") for t in from_config if isinstance(t, dict)}
        from_config = named.get("default")
    return from_config if isinstance(from_config, str) else None
