"""convert_dflash: any readable drafter checkpoint -> GGUF dialect A, or a Hugging Face directory."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from laguna_gguf import _native
from laguna_gguf.convert.aside import check_outfile
from laguna_gguf.convert.hf import main_type, plan_hf, write_hf
from laguna_gguf.convert.hf_config import CONFIG_KEY, config_text, restored_config
from laguna_gguf.convert.outtypes import HF, OutType, encode_tensor, find_outtype, n_bytes, tensor_outtype
from laguna_gguf.convert.target import Target, read_target
from laguna_gguf.convert.tokenizer import TOKENIZER_FILE, gguf_tokenizer, hf_tokenizer
from laguna_gguf.convert.writer import PlannedTensor, write_gguf
from laguna_gguf.dflash.checkpoint import Checkpoint, read_checkpoint
from laguna_gguf.dflash.gguf_config import DIALECT_A
from laguna_gguf.dflash.names import is_norm
from laguna_gguf.errors import CheckpointError, ConfigError, TargetMismatchError
from laguna_gguf.hub import model_name
from laguna_gguf.paths import path_argument

_QUANTIZATION_VERSION = 2
_MASK_KEY = "tokenizer.ggml.mask_token_id"

ProgressBar = Callable[[int, int], None]
"""Called with bytes of tensor data written so far, and in all."""


@dataclass(frozen=True)
class _Job:
    """A conversion with everything read and checked, before anything is written."""

    checkpoint: Checkpoint
    outfile: Path
    tensors: list[PlannedTensor]
    tokenizer: dict[str, Any]
    tokenizer_source: str | None
    num_target_layers: int | None


def convert_dflash(
    source: str | PathLike[str],
    outfile: str | PathLike[str],
    *,
    outtype: str = "bf16",
    target: str | PathLike[str] | None = None,
    dry_run: bool = False,
) -> dict[str, Any]:
    """Convert a Laguna DFlash drafter (Hugging Face directory or GGUF of any dialect) to GGUF dialect A, or to a
    Hugging Face directory.

    outtype: type of the matrices (f32, f16, bf16, q8_0, q4_k, q5_k, q6_k, in any case); norms are f32 in every one.
        "hf": outfile is a new directory with config.json and model.safetensors, in bf16 or the source's own float type.
    target: GGUF file or Hugging Face directory of the target; hidden size, layers and vocabulary are checked and its
        tokenizer is copied. Needed for a Hugging Face source without a tokenizer of its own, and for "hf" when the
        source does not say how many layers the target has.
    dry_run: read and check everything, write nothing.

    Weights are converted a few rows at a time: memory for about one tensor of the source is needed.

    Returns a report: source, dialect, outfile, outtype, tensors (list of name, sources, type, shape in ggml order,
    bytes), bytes (of all tensors), defaults (fields the source left out -> value used), dropped (source tensors left
    out), quantised (dequantised tensor -> how the source stores it), fallbacks (tensor -> type, where it is not the
    asked one), tokenizer (where it came from, None in "hf"), file_bytes (None in a dry run), dry_run. Raises
    ConfigError, CheckpointError, TargetMismatchError; the output is complete or not there.
    """
    return convert(source, outfile, outtype=outtype, target=target, dry_run=dry_run)


def convert(
    source: str | PathLike[str],
    outfile: str | PathLike[str],
    *,
    outtype: str = "bf16",
    target: str | PathLike[str] | None = None,
    dry_run: bool = False,
    progress: ProgressBar | None = None,
) -> dict[str, Any]:
    """`convert_dflash` with a progress callback, for the command."""
    asked = find_outtype(outtype)
    out_path = Path(path_argument("outfile", outfile))
    check_outfile(out_path, directory=asked is None)
    job = _prepare(read_checkpoint(source), out_path, asked, target)
    checkpoint, tensors = job.checkpoint, job.tensors
    defaults = dict(checkpoint.defaults)
    if checkpoint.config.num_target_layers is None and job.num_target_layers is not None:
        defaults["num_target_layers"] = job.num_target_layers  # the target's
    main = main_type(checkpoint) if asked is None else asked
    report: dict[str, Any] = {
        "source": str(source),
        "dialect": checkpoint.dialect,
        "outfile": str(out_path),
        "outtype": HF if asked is None else asked.name,
        "tensors": [_entry(t) for t in tensors],
        "bytes": sum(t.n_bytes for t in tensors),
        "defaults": defaults,
        "dropped": list(checkpoint.dropped),
        "quantised": dict(checkpoint.quantised),
        "fallbacks": _fallbacks(tensors, main, norms=asked is None),
        "tokenizer": job.tokenizer_source,
        "file_bytes": None,
        "dry_run": dry_run,
    }
    if not dry_run:
        report["file_bytes"] = _write(job, asked, _counted(progress, report["bytes"]))
    return report


def _prepare(
    checkpoint: Checkpoint, out_path: Path, asked: OutType | None, target_path: str | PathLike[str] | None
) -> _Job:
    target = None if target_path is None else _checked_target(checkpoint, target_path)
    num_target_layers = checkpoint.config.num_target_layers
    if num_target_layers is None and target is not None:
        num_target_layers = target.n_layer
    if asked is None:
        if num_target_layers is None:
            raise ConfigError(
                f"num_target_layers: {checkpoint.source} does not say it, needed in config.json: give the target"
            )
        return _Job(checkpoint, out_path, plan_hf(checkpoint), {}, None, num_target_layers)
    length = checkpoint.context_length
    if length is not None and length >= 2**32:
        raise ConfigError(f"max_position_embeddings: found {length}, needed less than 2^32 for a GGUF file")
    tokenizer, source = _tokenizer(checkpoint, target)
    return _Job(checkpoint, out_path, _plan_gguf(checkpoint, asked), tokenizer, source, num_target_layers)


def _plan_gguf(checkpoint: Checkpoint, asked: OutType) -> list[PlannedTensor]:
    planned = []
    for name, tensor in checkpoint.tensors.items():
        outtype = tensor_outtype(name, tensor, asked)
        planned.append(
            PlannedTensor(
                name=f"{name}.weight",
                sources=checkpoint.origins[name],
                ggml_type=outtype.ggml_type,
                ne=tensor.ne,
                n_bytes=n_bytes(tensor.ne, outtype),
                encode=partial(encode_tensor, name, tensor, outtype),
            )
        )
    return planned


def _write(job: _Job, asked: OutType | None, progress: Callable[[int], None] | None) -> int:
    checkpoint = job.checkpoint
    if asked is None:
        assert job.num_target_layers is not None
        config = restored_config(checkpoint, job.num_target_layers, main_type(checkpoint).name)
        return write_hf(job.outfile, config, job.tensors, progress)
    metadata = _metadata(checkpoint, asked, job.num_target_layers) | job.tokenizer
    return write_gguf(job.outfile, DIALECT_A.architecture, metadata, job.tensors, progress)


def _counted(progress: ProgressBar | None, total: int) -> Callable[[int], None] | None:
    """Adds up the pieces for a progress bar."""
    if progress is None:
        return None
    done = 0

    def count(n: int) -> None:
        nonlocal done
        done += n
        progress(done, total)

    return count


def _checked_target(checkpoint: Checkpoint, target_path: str | PathLike[str]) -> Target:
    target = read_target(path_argument("target", target_path))
    try:
        checkpoint.config.validate_target(target.n_layer, target.n_embd, target.n_vocab)
    except TargetMismatchError as error:
        raise TargetMismatchError(f"{target.source}: {error}") from error
    return target


def _tokenizer(checkpoint: Checkpoint, target: Target | None) -> tuple[dict[str, Any], str]:
    """Tokenizer keys with the drafter's own mask token, and where they came from."""
    config = checkpoint.config
    if target is not None:
        keys, source = target.tokenizer, target.source
    elif checkpoint.gguf is not None:
        try:
            keys, source = gguf_tokenizer(checkpoint.gguf), checkpoint.source
        except CheckpointError as error:
            raise ConfigError(f"target: needed, since the source has no tokenizer ({error})") from error
    elif (checkpoint.source / TOKENIZER_FILE).is_file():
        keys, source = hf_tokenizer(checkpoint.source, config.vocab_size), checkpoint.source
    else:
        raise ConfigError(
            f"target: needed, since {checkpoint.source} has no {TOKENIZER_FILE}: give the target's GGUF file or "
            "directory"
        )
    return keys | {_MASK_KEY: config.mask_token_id}, str(source)


def _model_name(checkpoint: Checkpoint) -> str:
    named = checkpoint.gguf.get("general.name") if checkpoint.gguf is not None else None
    if isinstance(named, str):
        return named
    return model_name(checkpoint.source.absolute())


def _metadata(checkpoint: Checkpoint, outtype: OutType, num_target_layers: int | None) -> dict[str, Any]:
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
    if num_target_layers is not None:
        metadata["dflash.num_target_layers"] = num_target_layers
    config_json = config_text(checkpoint)
    if config_json is not None:
        metadata[CONFIG_KEY] = config_json
    return metadata


def _entry(tensor: PlannedTensor) -> dict[str, Any]:
    return {
        "name": tensor.name,
        "sources": tensor.sources,
        "type": _native.type_name(tensor.ggml_type),
        "shape": list(tensor.ne),
        "bytes": tensor.n_bytes,
    }


def _fallbacks(tensors: list[PlannedTensor], main: OutType, *, norms: bool) -> dict[str, str]:
    """Tensors that are not of the asked type; norms of a GGUF never are, so they count only in a directory."""
    return {
        t.name: _native.type_name(t.ggml_type)
        for t in tensors
        if t.ggml_type != main.ggml_type and (norms or not is_norm(t.name.removesuffix(".weight")))
    }
