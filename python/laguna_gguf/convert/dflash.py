"""convert_dflash: any readable drafter checkpoint -> GGUF dialect A."""

from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from laguna_gguf import _native
from laguna_gguf.convert.outtypes import OutType, encode, find_outtype, n_bytes, tensor_outtype
from laguna_gguf.convert.target import read_target
from laguna_gguf.convert.tokenizer import TOKENIZER_FILE, gguf_tokenizer, hf_tokenizer
from laguna_gguf.convert.writer import PlannedTensor, check_outfile, write_gguf
from laguna_gguf.dflash.checkpoint import Checkpoint, read_checkpoint
from laguna_gguf.dflash.gguf_config import DIALECT_A
from laguna_gguf.dflash.names import is_norm
from laguna_gguf.errors import CheckpointError, ConfigError, TargetMismatchError

_QUANTIZATION_VERSION = 2
_MASK_KEY = "tokenizer.ggml.mask_token_id"


def convert_dflash(
    source: str | PathLike[str],
    outfile: str | PathLike[str],
    *,
    outtype: str = "bf16",
    target: str | PathLike[str] | None = None,
    dry_run: bool = False,
) -> dict[str, Any]:
    """Convert a Laguna DFlash drafter (Hugging Face directory or GGUF of any dialect) to GGUF dialect A.

    outtype: type of the matrices; norms are f32 in every outtype.
    target: GGUF file or Hugging Face directory of the target; hidden size, layers and vocabulary are checked and its
        tokenizer is copied. Needed for a Hugging Face source without a tokenizer of its own.
    dry_run: read and check everything, write nothing.

    Returns a report: source, dialect, outfile, outtype, tensors (list of name, sources, type, shape in ggml order,
    bytes), bytes (of all tensors), defaults (fields the source left out -> value used), dropped (source tensors left
    out), fallbacks (tensor -> type, where rows do not fit the asked one), tokenizer (where it came from), file_bytes
    (None in a dry run). Raises ConfigError, CheckpointError, TargetMismatchError; the file is complete or not written.
    """
    asked = find_outtype(outtype)
    out_path = Path(outfile)
    check_outfile(out_path)
    checkpoint = read_checkpoint(source)
    tokenizer, tokenizer_source = _tokenizer(checkpoint, target)
    plan = {name: tensor_outtype(name, t, asked) for name, t in checkpoint.tensors.items()}
    tensors = [
        PlannedTensor(
            name=name,
            ggml_type=plan[name].ggml_type,
            ne=tensor.ne,
            n_bytes=n_bytes(tensor, plan[name]),
            encode=partial(encode, name, tensor, plan[name]),
        )
        for name, tensor in checkpoint.tensors.items()
    ]
    report: dict[str, Any] = {
        "source": str(source),
        "dialect": checkpoint.dialect,
        "outfile": str(out_path),
        "outtype": outtype,
        "tensors": [_entry(t, checkpoint) for t in tensors],
        "bytes": sum(t.n_bytes for t in tensors),
        "defaults": dict(checkpoint.defaults),
        "dropped": [],
        "fallbacks": {f"{name}.weight": t.name for name, t in plan.items() if t is not asked and not is_norm(name)},
        "tokenizer": tokenizer_source,
        "file_bytes": None,
        "dry_run": dry_run,
    }
    if not dry_run:
        metadata = _metadata(checkpoint, asked) | tokenizer
        report["file_bytes"] = write_gguf(out_path, DIALECT_A.architecture, metadata, tensors)
    return report


def _tokenizer(checkpoint: Checkpoint, target_path: str | PathLike[str] | None) -> tuple[dict[str, Any], str]:
    """Tokenizer keys with the drafter's own mask token, and where they came from."""
    config = checkpoint.config
    if target_path is not None:
        target = read_target(target_path)
        try:
            config.validate_target(target.n_layer, target.n_embd, target.n_vocab)
        except TargetMismatchError as error:
            raise TargetMismatchError(f"{target.source}: {error}") from error
        keys, source = target.tokenizer, target.source
    elif checkpoint.gguf is not None:
        try:
            keys, source = gguf_tokenizer(checkpoint.gguf), checkpoint.source
        except CheckpointError as error:
            raise ConfigError(f"target: needed, since the source has no tokenizer ({error})") from error
    elif (checkpoint.source / TOKENIZER_FILE).is_file():
        keys, source = hf_tokenizer(checkpoint.source, config.vocab_size), checkpoint.source
    else:
        raise ConfigError(f"target: needed, since {checkpoint.source} has no {TOKENIZER_FILE}: give the target's GGUF "
                          "file or directory")
    return keys | {_MASK_KEY: config.mask_token_id}, str(source)


def _model_name(checkpoint: Checkpoint) -> str:
    named = checkpoint.gguf.get("general.name") if checkpoint.gguf is not None else None
    if isinstance(named, str):
        return named
    source = checkpoint.source.absolute()
    return source.name if source.is_dir() else source.stem


def _metadata(checkpoint: Checkpoint, outtype: OutType) -> dict[str, Any]:
    config = checkpoint.config
    metadata: dict[str, Any] = {
        "general.type": "model",
        "general.name": _model_name(checkpoint),
        "general.file_type": outtype.file_type,
        "general.quantization_version": _QUANTIZATION_VERSION,
        "dflash.decoder_arch": "laguna",
        "dflash.block_count": config.num_hidden_layers,
        "dflash.embedding_length": config.hidden_size,
        "dflash.feed_forward_length": config.intermediate_size,
        "dflash.attention.head_count": config.num_attention_heads,
        "dflash.attention.head_count_kv": config.num_key_value_heads,
        "dflash.attention.key_length": config.head_dim,
        "dflash.attention.value_length": config.head_dim,
        "dflash.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "dflash.rope.freq_base": config.rope_theta,
        "dflash.vocab_size": config.vocab_size,
        "dflash.block_size": config.block_size,
        "dflash.target_layers": np.array(config.target_layer_ids, np.int32) + np.int32(DIALECT_A.id_offset),
        "dflash.attention.sliding_window": config.sliding_window,
        "dflash.attention.sliding_window_pattern": np.ones(config.num_hidden_layers, np.bool_),
        "dflash.attention.causal": config.causal,
    }
    if checkpoint.context_length is not None:
        metadata["dflash.context_length"] = checkpoint.context_length
    if config.num_target_layers is not None:
        metadata["dflash.num_target_layers"] = config.num_target_layers
    return metadata


def _entry(tensor: PlannedTensor, checkpoint: Checkpoint) -> dict[str, Any]:
    return {
        "name": f"{tensor.name}.weight",
        "sources": checkpoint.origins[tensor.name],
        "type": _native.type_name(tensor.ggml_type),
        "shape": list(tensor.ne),
        "bytes": tensor.n_bytes,
    }

