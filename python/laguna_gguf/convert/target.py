"""What a conversion needs to know of the target: its shape and its tokenizer."""

from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from laguna_gguf.convert.tokenizer import TOKENIZER_FILE, gguf_tokenizer, hf_tokenizer, read_json_file
from laguna_gguf.dflash.config import MAX_VOCAB_SIZE
from laguna_gguf.dflash.gguf_config import open_gguf
from laguna_gguf.errors import CheckpointError, TargetMismatchError
from laguna_gguf.hub import resolve


@dataclass(frozen=True)
class Target:
    """Shape and tokenizer keys of a target model."""

    source: Path
    n_layer: int
    n_embd: int
    n_vocab: int
    tokenizer: dict[str, Any]


def read_target(path: str | PathLike[str]) -> Target:
    """Read a target's shape and tokenizer from a GGUF file or a Hugging Face directory (or `hf://` of one); weights are
    not read.

    CheckpointError for missing or damaged files, TargetMismatchError when the shape cannot be found.
    """
    source = resolve(path)
    try:
        return _read_directory(source) if source.is_dir() else _read_file(source)
    except OSError as error:
        raise CheckpointError(f"{source}: cannot be read ({error})") from error


def _read_file(source: Path) -> Target:
    file = open_gguf(source)
    arch = file.get("general.architecture")
    if str(arch).startswith("dflash"):
        raise TargetMismatchError(f"{source}: a drafter, needed the target model that it drafts for")
    tokenizer = gguf_tokenizer(file)
    return Target(
        source=source,
        n_layer=_count(file.get(f"{arch}.block_count"), "num_hidden_layers", f"{arch}.block_count", source),
        n_embd=_count(file.get(f"{arch}.embedding_length"), "hidden_size", f"{arch}.embedding_length", source),
        n_vocab=len(tokenizer["tokenizer.ggml.tokens"]),
        tokenizer=tokenizer,
    )


def _read_directory(source: Path) -> Target:
    config = read_json_file(source / "config.json")
    if "dflash_config" in config:
        raise TargetMismatchError(f"{source}: a drafter (dflash_config), needed the target model that it drafts for")
    if not (source / TOKENIZER_FILE).is_file():
        raise CheckpointError(f"{source}: no {TOKENIZER_FILE}")
    n_vocab = _count(config.get("vocab_size"), "vocab_size", "vocab_size", source)
    if n_vocab > MAX_VOCAB_SIZE:
        raise TargetMismatchError(f"{source}: vocab_size: found {n_vocab}, at most {MAX_VOCAB_SIZE} are accepted")
    return Target(
        source=source,
        n_layer=_count(config.get("num_hidden_layers"), "num_hidden_layers", "num_hidden_layers", source),
        n_embd=_count(config.get("hidden_size"), "hidden_size", "hidden_size", source),
        n_vocab=n_vocab,
        tokenizer=hf_tokenizer(source, n_vocab),
    )


def _count(value: Any, field: str, key: str, source: Path) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise TargetMismatchError(f"{source}: {field}: {key} is {value!r}, needed a whole number >= 1")
    return value
