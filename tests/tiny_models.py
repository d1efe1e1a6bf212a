"""The smallest random targets that still have every mechanism of a Laguna model."""

from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from demo_pair.target_gguf import TargetConfig, random_target, toy_tokenizer, write_target_gguf

TINY_TARGET = TargetConfig(
    n_vocab=320,
    n_embd=64,
    n_layer=8,
    n_head_full=2,
    n_head_swa=4,
    n_head_kv=2,
    head_dim=16,
    window=32,
    rope_dims_full=8,
    rope_dims_swa=16,
    n_ff=96,
    n_expert=4,
    n_expert_used=2,
    n_ff_expert=32,
    n_ff_shared=48,
    n_ctx_train=4096,
)
"""Full and sliding layers with different heads, a dense lead, experts with a selection bias, gates."""

TINIER_TARGET = replace(TINY_TARGET, n_embd=32, n_ff=48, n_ff_expert=16, n_ff_shared=16)
"""Narrower, for tests that want many layers."""


def write_tiny_target(
    path: Path,
    config: TargetConfig = TINY_TARGET,
    *,
    seed: int = 1,
    dtype: str = "f32",
    replaced: dict[str, NDArray[np.float32]] | None = None,
) -> Path:
    """Write a random target, with some of its tensors replaced by GGUF name; returns `path`."""
    tensors = random_target(config, seed) | (replaced or {})
    write_target_gguf(path, config, tensors, toy_tokenizer(config.n_vocab), dtype)
    return path
