"""Scoring heads: trained query and key rows that replace those of the drafter's block 15."""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from laguna_gguf.errors import TargetMismatchError
from laguna_gguf.inspection.scoring import BASE_MODEL, FEATURE_TAP, HEAD
from laguna_gguf.pflash.drafter_file import DrafterFile, ScoringWeights
from laguna_gguf.pflash.hashing import file_sha256
from laguna_gguf.pflash.scoring_file import read_f32, read_scoring_file, write_scoring_file

SCHEMA = "qwen3_5_0_8b_nope_qk_mass_v1"


def load_head(path: str | os.PathLike[str], drafter: DrafterFile) -> ScoringWeights:
    """The drafter's scoring weights with the projections of a head file.

    CheckpointError: not a sound head file. TargetMismatchError: it does not belong to this drafter file.
    """
    file, config = read_scoring_file(path, HEAD, drafter)
    needed = (drafter.n_head * drafter.head_dim, drafter.n_head_kv * drafter.head_dim)
    if (config["query_rows"], config["key_rows"]) != needed:
        raise TargetMismatchError(
            f"{path} has {config['query_rows']} query and {config['key_rows']} key rows; the drafter needs "
            f"{needed[0]} and {needed[1]}"
        )
    return replace(
        drafter.scoring_weights(),
        attn_q=read_f32(file, "scoringhead.attn_q.weight"),
        attn_k=read_f32(file, "scoringhead.attn_k.weight"),
    )


def write_head(
    outfile: str | os.PathLike[str],
    attn_q: NDArray[np.float32],
    attn_k: NDArray[np.float32],
    drafter_path: str | os.PathLike[str],
) -> None:
    """Write a head for one drafter file: attn_q float32 [n_head * head_dim, n_embd] (query rows only), attn_k
    [n_head_kv * head_dim, n_embd]. TargetMismatchError for other shapes."""
    drafter = DrafterFile(drafter_path)
    q_shape = (drafter.n_head * drafter.head_dim, drafter.n_embd)
    k_shape = (drafter.n_head_kv * drafter.head_dim, drafter.n_embd)
    if attn_q.shape != q_shape or attn_k.shape != k_shape:
        raise TargetMismatchError(
            f"head rows have shapes {attn_q.shape} and {attn_k.shape}; the drafter needs {q_shape} and {k_shape}"
        )
    metadata = {
        "scoringhead.schema": SCHEMA,
        "scoringhead.base_model": BASE_MODEL,
        "scoringhead.runtime_gguf_sha256": file_sha256(drafter_path),
        "scoringhead.feature_tap": FEATURE_TAP,
    }
    tensors = {"scoringhead.attn_q.weight": attn_q, "scoringhead.attn_k.weight": attn_k}
    write_scoring_file(outfile, HEAD, metadata, tensors)


def export_head(drafter_path: str | os.PathLike[str], outfile: str | os.PathLike[str]) -> None:
    """Write the drafter's own block-15 rows as a head: a start for training; it scores as the drafter does without."""
    weights = DrafterFile(drafter_path).scoring_weights()
    write_head(outfile, weights.attn_q, weights.attn_k, drafter_path)
