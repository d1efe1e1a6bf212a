#!/usr/bin/env python3
"""Time of one drafted block at full Laguna XS-2.1 shapes against its floor, interleaved in one run.

Weights are random (speed does not depend on their values). The target is thin in its layers but has the real width and
vocabulary, since drafting uses its embedding rows and output head. The floor is a plain ggml graph of the same weight
products: no norms, no attention, no activation. --draft-vocab N measures a drafter over the first N tokens as well.
Prints medians; --json for machines.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from time import perf_counter

import gguf
import llama_cpp
import numpy as np

from bench.ggml_products import MatrixProducts
from demo_pair.target_gguf import (
    SPECIAL_TOKENS,
    TargetConfig,
    byte_alphabet,
    make_tokenizer,
    random_target,
    write_target_gguf,
)
from laguna_gguf import DrafterConfig, _native
from laguna_gguf.dflash.checkpoint import Checkpoint, TensorData
from laguna_gguf.dflash.draft_vocab import output_rows
from laguna_gguf.dflash.drafter import Drafter
from laguna_gguf.dflash.target import TargetModel

Q8_0 = int(gguf.GGMLQuantizationType.Q8_0)
F32 = int(gguf.GGMLQuantizationType.F32)


def drafter_config(shapes: str) -> DrafterConfig:
    """XS-2.1's published shapes, or small ones for a smoke run."""
    wide = shapes == "xs"
    n_layer = 5 if wide else 2
    ids = [1, 13, 25, 33, 39][:n_layer]
    return DrafterConfig.from_json(
        {
            "architectures": ["DFlashLagunaForCausalLM"],
            "model_type": "laguna",
            "hidden_size": 2048 if wide else 256,
            "intermediate_size": 8192 if wide else 512,
            "num_hidden_layers": n_layer,
            "num_attention_heads": 64 if wide else 8,
            "num_key_value_heads": 8 if wide else 2,
            "head_dim": 128 if wide else 32,
            "rms_norm_eps": 1e-6,
            "vocab_size": 100352 if wide else 2048,
            "draft_vocab_size": 100352 if wide else 2048,
            "max_position_embeddings": 262144,
            "rope_theta": 500000.0,
            "sliding_window": 512,
            "layer_types": ["sliding_attention"] * n_layer,
            "gating": "per-head",
            "num_experts": 0,
            "attention_bias": False,
            "eagle_aux_hidden_state_layer_ids": [i + 1 for i in ids],
            "dflash_config": {
                "block_size": 16,
                "mask_token_id": 12,
                "num_target_layers": 40,
                "target_layer_ids": ids,
                "causal": True,
            },
        }
    )


def random_tensors(config: DrafterConfig) -> dict[str, TensorData]:
    """Random drafter tensors: matrices Q8_0, norms f32. Matrices of one shape share their values."""
    rng = np.random.default_rng(0)
    h, ff, d = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_attention_heads * d, config.num_key_value_heads * d
    a = len(config.target_layer_ids)
    made: dict[tuple[int, int], TensorData] = {}

    def matrix(n_in: int, n_out: int) -> TensorData:
        if (n_in, n_out) not in made:
            values = rng.standard_normal((n_out, n_in), dtype=np.float32) / np.float32(np.sqrt(n_in))
            made[n_in, n_out] = TensorData(Q8_0, (n_in, n_out), _native.quantize(values, Q8_0).reshape(-1))
        return made[n_in, n_out]

    def norm(*ne: int) -> TensorData:
        return TensorData(F32, ne, rng.uniform(0.5, 1.5, ne[::-1]).astype(np.float32).view(np.uint8).reshape(-1))

    tensors = {"fc": matrix(a * h, h), "enc.aux_norm": norm(h, a), "enc.output_norm": norm(h), "output_norm": norm(h)}
    for i in range(config.num_hidden_layers):
        tensors |= {
            f"blk.{i}.{name}": tensor
            for name, tensor in {
                "attn_norm": norm(h),
                "attn_q": matrix(h, q),
                "attn_k": matrix(h, kv),
                "attn_v": matrix(h, kv),
                "attn_output": matrix(q, h),
                "attn_q_norm": norm(d),
                "attn_k_norm": norm(d),
                "attn_gate": matrix(h, config.num_attention_heads),
                "ffn_norm": norm(h),
                "ffn_gate": matrix(h, ff),
                "ffn_up": matrix(h, ff),
                "ffn_down": matrix(ff, h),
            }.items()
        }
    return tensors


def write_thin_target(path: Path, config: DrafterConfig) -> None:
    """A target with the drafter's width, layers and vocabulary and as little else as llama.cpp allows; Q8_0."""
    thin = TargetConfig(
        n_vocab=config.vocab_size,
        n_embd=config.hidden_size,
        n_layer=40,
        n_head_full=1,
        n_head_swa=1,
        n_head_kv=1,
        head_dim=64,
        rope_dims_full=64,
        rope_dims_swa=64,
        window=512,
        n_ff=64,
        n_expert=2,
        n_expert_used=1,
        n_ff_expert=32,
        n_ff_shared=32,
    )
    base = [*SPECIAL_TOKENS, *byte_alphabet(), "et"]
    tokens = base + [f"token{i}" for i in range(config.vocab_size - len(base))]
    write_target_gguf(path, thin, random_target(thin, 0), make_tokenizer(tokens, ["e t"]), "q8_0")


def products(
    config: DrafterConfig, tensors: dict[str, TensorData], n: int
) -> tuple[list[tuple[int, tuple[int, int], np.ndarray]], list[int]]:
    """Weights and row counts of the products of a block of n drafts: fused where the drafter fuses, head on n rows."""
    weights, rows = [], []

    def add(names: list[str], n_rows: int) -> None:
        parts = [tensors[name] for name in names]
        n_out = sum(part.ne[1] for part in parts)
        weights.append((Q8_0, (parts[0].ne[0], n_out), np.concatenate([part.data for part in parts])))
        rows.append(n_rows)

    for i in range(config.num_hidden_layers):
        for names in (
            ["attn_q", "attn_k", "attn_v"],
            ["attn_gate"],
            ["attn_output"],
            ["ffn_gate", "ffn_up"],
            ["ffn_down"],
        ):
            add([f"blk.{i}.{name}" for name in names], n + 1)
    n_bytes = config.vocab_size * config.hidden_size // 32 * 34
    head = np.resize(tensors["blk.0.attn_q"].data, n_bytes)  # repeats values: whole rows of the same width
    weights.append((Q8_0, (config.hidden_size, config.vocab_size), head))
    rows.append(n)
    return weights, rows


def measure(
    config: DrafterConfig, n_threads: int, n_context: int, repeats: int, blocks: list[int], draft_vocab: int | None
) -> list[dict]:
    """Rows of results, one a block length."""
    tensors = random_tensors(config)
    results = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "thin-target-Q8_0.gguf"
        write_thin_target(path, config)
        target = TargetModel(path)
        shape = (n_context, len(config.target_layer_ids), config.hidden_size)
        features = np.random.default_rng(1).standard_normal(shape, dtype=np.float32)
        drafters = {"draft_ms": Drafter(Checkpoint(config, tensors, "random", Path()), n_threads=n_threads)}
        if draft_vocab:
            drafters["limited_ms"] = Drafter(Checkpoint(config, tensors, "random", Path()), n_threads=n_threads)
        for drafter in drafters.values():
            drafter.bind_target(target)
            drafter.append_context(features)
        if draft_vocab:
            ids = np.arange(draft_vocab, dtype=np.int32)
            drafters["limited_ms"].limit_vocabulary(ids, *output_rows(path, ids))
        for n in blocks:
            floor = MatrixProducts(*products(config, tensors, n), n_threads=n_threads)
            times: dict[str, list[float]] = {name: [] for name in [*drafters, "floor_ms"]}
            for i in range(repeats + 1):
                lap = {}
                for name, drafter in drafters.items():
                    began = perf_counter()
                    drafter.draft(100, n)
                    lap[name] = (perf_counter() - began) * 1e3
                lap["floor_ms"] = floor.run()
                for name, ms in lap.items():
                    if i:  # the first lap builds graphs and touches memory
                        times[name].append(ms)
            row = {"n": n, "context": n_context, "threads": n_threads}
            row |= {name: round(statistics.median(values), 3) for name, values in times.items()}
            row["ratio"] = ratio(times["draft_ms"], times["floor_ms"])
            if draft_vocab:
                row |= {"draft_vocab": draft_vocab, "limited_ratio": ratio(times["limited_ms"], times["draft_ms"])}
            results.append(row)
            del floor
    return results


def measure_positions(
    config: DrafterConfig, n_threads: int, positions: list[int], repeats: int, blocks: list[int]
) -> list[dict]:
    """Rows of results, one a block length and position: a draft sees one window of rows wherever it is."""
    tensors = random_tensors(config)
    window_rows = config.sliding_window - 1
    shape = (window_rows, len(config.target_layer_ids), config.hidden_size)
    features = np.random.default_rng(1).standard_normal(shape, dtype=np.float32)
    times: dict[tuple[int, int], list[float]] = {(n, p): [] for n in blocks for p in positions}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "thin-target-Q8_0.gguf"
        write_thin_target(path, config)
        target = TargetModel(path)
        drafter = Drafter(Checkpoint(config, tensors, dialect="random", source=Path()), n_threads=n_threads)
        drafter.bind_target(target)
        for i in range(repeats + 1):
            for p in positions[i % len(positions) :] + positions[: i % len(positions)]:
                drafter.reset()
                drafter.append_context(features, start_position=p - window_rows)
                for n in blocks:
                    drafter.draft(100, n)
                    began = perf_counter()
                    drafter.draft(100, n)
                    if i:  # the first round builds graphs and touches memory
                        times[n, p].append((perf_counter() - began) * 1e3)
    rows = []
    for n in blocks:
        first = times[n, positions[0]]
        for p in positions:
            by_first = ratio(times[n, p], first)
            row = {"n": n, "position": p, "threads": n_threads, "draft_ms": round(statistics.median(times[n, p]), 3)}
            rows.append(row | {"by_first": by_first})
    return rows


def ratio(values: list[float], others: list[float]) -> float:
    """Median of the quotients lap by lap."""
    return round(statistics.median(a / b for a, b in zip(values, others, strict=True)), 3)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", choices=("xs", "smoke"), default="xs")
    parser.add_argument("-t", "--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--context", type=int, default=511, help="context rows before the block")
    parser.add_argument("-r", "--repeats", type=int, default=15)
    parser.add_argument("--blocks", type=int, nargs="+", default=[7, 15])
    parser.add_argument("--positions", type=int, nargs="+", help="instead: the time of a draft at these positions")
    parser.add_argument("--draft-vocab", type=int, metavar="N", help="also draft over N tokens only")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    llama_cpp.llama_backend_init()
    config = drafter_config(args.shapes)
    if args.positions:
        if min(args.positions) < config.sliding_window:
            parser.error(f"--positions begin at {config.sliding_window}, where the window is full")
        rows = measure_positions(config, args.threads, args.positions, args.repeats, args.blocks)
        if args.json:
            print(json.dumps({"shapes": args.shapes, "rows": rows}))
        else:
            print(f"{'n':>3} {'position':>9} {'draft ms':>9} {'by first':>9}")
            for row in rows:
                print(f"{row['n']:3} {row['position']:9} {row['draft_ms']:9.2f} {row['by_first']:9.3f}")
        return 0
    rows = measure(config, args.threads, args.context, args.repeats, args.blocks, args.draft_vocab)
    if args.json:
        print(json.dumps({"shapes": args.shapes, "rows": rows}))
    else:
        print(f"{'n':>3} {'context':>8} {'draft ms':>9} {'floor ms':>9} {'ratio':>6}")
        for row in rows:
            print(f"{row['n']:3} {row['context']:8} {row['draft_ms']:9.2f} {row['floor_ms']:9.2f} {row['ratio']:6.2f}")
            if args.draft_vocab:
                print(f"over {args.draft_vocab:7} {row['limited_ms']:9.2f} {'':9} {row['limited_ratio']:6.2f} of that")
    return 0


if __name__ == "__main__":
    sys.exit(main())
