"""A random Laguna pair of medium size with XS-2.1's proportions, for measurements of speed.

Half of XS's width, 12 of its 40 layers (full attention in every fourth, else a window of 512), heads of 128, a dense
first layer, then 8 experts a token as in XS, but of 64 instead of 256. The drafter has 3 of XS's 5 layers. Speed does
not depend on what the weights are, as long as different tokens wake different experts.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from bench_convert import config_json, tensor_shapes
from demo_pair.target_gguf import TargetConfig, toy_tokenizer, write_target_gguf
from demo_pair.target_gguf import tensor_shapes as target_shapes
from laguna_gguf import convert_dflash

MEDIUM = TargetConfig(
    n_vocab=16384,
    n_embd=1024,
    n_layer=12,
    n_head_full=24,
    n_head_swa=32,
    n_head_kv=4,
    head_dim=128,
    window=512,
    rope_dims_full=64,
    rope_dims_swa=128,
    n_ff=4096,
    n_expert=64,
    n_expert_used=8,
    n_ff_expert=256,
    n_ff_shared=256,
    n_ctx_train=131072,
)

SMOKE = replace(
    MEDIUM, n_vocab=2048, n_embd=128, n_layer=4, n_head_full=2, n_head_swa=3, n_head_kv=1, n_ff=256, n_expert=8,
    n_expert_used=2, n_ff_expert=32, n_ff_shared=32,
)  # fmt: skip

DRAFTER_LAYERS = 3


def write_pair(folder: Path, config: TargetConfig = MEDIUM) -> tuple[Path, Path]:
    """Paths of target and drafter as Q8_0 GGUF files (0.76 and 0.07 GB for MEDIUM), written unless they are there."""
    target, drafter = folder / "random-target-Q8_0.gguf", folder / "random-drafter-Q8_0.gguf"
    if drafter.exists():
        return target, drafter
    folder.mkdir(exist_ok=True)
    write_target_gguf(target, config, _target_tensors(config), toy_tokenizer(config.n_vocab), "q8_0")
    source = folder / "drafter"
    _write_drafter(source, config)
    convert_dflash(source, drafter, outtype="q8_0", target=target)
    return target, drafter


def _target_tensors(config: TargetConfig) -> dict[str, np.ndarray]:
    """float32 tensors; matrices of one shape share their values, but not the routers: layers choose for themselves."""
    rng = np.random.default_rng(0)
    shared: dict[tuple[int, ...], np.ndarray] = {}
    tensors = {}
    for name, shape in target_shapes(config).items():
        if name.endswith("norm.weight"):
            tensors[name] = rng.uniform(0.5, 1.5, shape).astype(np.float32)
        elif name.endswith(".bias"):
            tensors[name] = rng.uniform(-0.1, 0.1, shape).astype(np.float32)
        elif name.endswith("ffn_gate_inp.weight") or name in ("token_embd.weight", "output.weight"):
            tensors[name] = _matrix(rng, shape)
        else:
            if shape not in shared:
                shared[shape] = _matrix(rng, shape)
            tensors[name] = shared[shape]
    return tensors


def _matrix(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.standard_normal(shape, dtype=np.float32) / np.float32(np.sqrt(shape[-1]))


def _write_drafter(folder: Path, config: TargetConfig) -> None:
    folder.mkdir()
    last = config.n_layer - 1
    shapes = {
        "h": config.n_embd,
        "i": config.n_ff,
        "l": DRAFTER_LAYERS,
        "nq": config.n_head_swa,
        "nkv": config.n_head_kv,
        "d": config.head_dim,
        "v": config.n_vocab,
        "t": config.n_layer,
        "ids": [1, 1 + last // 2, last],
    }
    (folder / "config.json").write_text(json.dumps(config_json(shapes)), encoding="utf-8")
    rng = np.random.default_rng(1)
    tensors = {}
    for group in tensor_shapes(shapes):
        for name, shape in group.items():
            values = rng.uniform(0.5, 1.5, shape).astype(np.float32) if len(shape) == 1 else _matrix(rng, shape)
            tensors[f"{name}.weight"] = values.astype(ml_dtypes.bfloat16)
    save_file(tensors, folder / "model.safetensors")
