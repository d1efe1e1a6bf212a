#!/usr/bin/env python3
"""Time and peak memory of a conversion at full Laguna XS-2.1 shapes, against a plain copy of the source.

Makes a random bf16 checkpoint in a temporary folder, converts it in a process of its own and samples that process's
RssAnon (memory that is not a file's: mapped weights do not count). The promise is a peak of at most 1.5 times the
largest tensor plus 300 MB; more is exit status 1. Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from laguna_gguf.convert import HF, OUTTYPES

_LARGE = {"nkv": 8, "d": 128, "v": 100352}
SHAPES: dict[str, dict[str, Any]] = {
    "xs": _LARGE | {"h": 2048, "i": 8192, "l": 5, "nq": 64, "t": 40, "ids": [1, 13, 25, 33, 39]},
    "s": _LARGE | {"h": 3072, "i": 12288, "l": 6, "nq": 72, "t": 48, "ids": [1, 10, 19, 29, 38, 47]},
    "smoke": {"h": 256, "i": 512, "l": 2, "nq": 8, "nkv": 2, "d": 32, "v": 2048, "t": 8, "ids": [1, 5]},
}
"""hidden, intermediate, layers, query and KV heads, head_dim, vocabulary, target layers, captured layers."""

ALLOWED_FACTOR, ALLOWED_BYTES = 1.5, 300_000_000
_SAMPLE_SECONDS = 0.002

_CHILD = """
import json, sys, time
from laguna_gguf import convert_dflash
begun = time.perf_counter()
source, outfile, outtype, target = sys.argv[1:]
report = convert_dflash(source, outfile, outtype=outtype, target=target)
print(json.dumps({"seconds": time.perf_counter() - begun, "bytes": report["file_bytes"]}))
"""


def config_json(s: dict[str, Any]) -> dict[str, Any]:
    """config.json of a drafter of these shapes."""
    return {
        "architectures": ["DFlashLagunaForCausalLM"],
        "model_type": "laguna",
        "hidden_size": s["h"],
        "intermediate_size": s["i"],
        "num_hidden_layers": s["l"],
        "num_attention_heads": s["nq"],
        "num_key_value_heads": s["nkv"],
        "head_dim": s["d"],
        "rms_norm_eps": 1e-6,
        "vocab_size": s["v"],
        "max_position_embeddings": 262144,
        "rope_theta": 500000.0,
        "sliding_window": 512,
        "layer_types": ["sliding_attention"] * s["l"],
        "gating": "per-head",
        "num_experts": 0,
        "dflash_config": {
            "block_size": 16,
            "mask_token_id": 12,
            "num_target_layers": s["t"],
            "target_layer_ids": s["ids"],
            "causal": True,
        },
    }


def tensor_shapes(s: dict[str, Any]) -> list[dict[str, tuple[int, ...]]]:
    """Names and shapes, one dict a shard: the combine tensors, then each layer."""
    h, i, d = s["h"], s["i"], s["d"]
    combine: dict[str, tuple[int, ...]] = {"fc": (h, len(s["ids"]) * h), "hidden_norm": (h,), "norm": (h,)}
    combine |= {f"aux_hidden_norms.{a}": (h,) for a in range(len(s["ids"]))}
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm": (h,),
        "post_attention_layernorm": (h,),
        "self_attn.qkv_proj": ((s["nq"] + 2 * s["nkv"]) * d, h),
        "self_attn.o_proj": (h, s["nq"] * d),
        "self_attn.g_proj": (s["nq"], h),
        "self_attn.q_norm": (d,),
        "self_attn.k_norm": (d,),
        "mlp.gate_proj": (i, h),
        "mlp.up_proj": (i, h),
        "mlp.down_proj": (h, i),
    }
    return [combine] + [{f"layers.{n}.{name}": shape for name, shape in layer.items()} for n in range(s["l"])]


def write_checkpoint(folder: Path, s: dict[str, Any]) -> int:
    """A random bf16 checkpoint, one shard at a time; returns the bytes of its largest tensor."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config_json(s)), encoding="utf-8")
    rng = np.random.default_rng(0)
    # Sign and mantissa are random, exponents in a narrow range: finite, and not worth compressing.
    block = (rng.integers(0, 1 << 16, 1 << 22, dtype=np.uint16) & 0x80FF) | 0x3C00
    weight_map: dict[str, str] = {}
    largest = 0
    shards = tensor_shapes(s)
    for number, shapes in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = {}
        for key, shape in shapes.items():
            values = np.resize(block, int(np.prod(shape))).reshape(shape).view(ml_dtypes.bfloat16)
            tensors[f"{key}.weight"] = values
            largest = max(largest, values.nbytes)
        save_file(tensors, folder / name)
        weight_map |= dict.fromkeys(tensors, name)
    index = json.dumps({"weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(index, encoding="utf-8")
    return largest


def write_target(path: Path, s: dict[str, Any]) -> None:
    """Metadata of a target with a vocabulary and merges of real size."""
    writer = gguf.GGUFWriter(path, "laguna")
    writer.add_uint32("laguna.block_count", s["t"])
    writer.add_uint32("laguna.embedding_length", s["h"])
    writer.add_string("tokenizer.ggml.model", "gpt2")
    writer.add_array("tokenizer.ggml.tokens", [f"token{i}" for i in range(s["v"])])
    writer.add_array("tokenizer.ggml.token_type", [1] * s["v"])
    writer.add_array("tokenizer.ggml.merges", [f"tok en{i}" for i in range(s["v"])])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def rss_anon(pid: int) -> int:
    """Bytes, 0 once the process is gone."""
    try:
        found = re.search(r"RssAnon:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    except OSError:
        return 0
    return int(found.group(1)) * 1024 if found else 0


def convert(source: Path, outfile: Path, outtype: str, target: Path) -> dict[str, Any]:
    """Seconds, bytes written and peak RssAnon of one conversion in a process of its own."""
    arguments = [sys.executable, "-c", _CHILD, str(source), str(outfile), outtype, str(target)]
    child = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
    peak = 0
    while child.poll() is None:
        peak = max(peak, rss_anon(child.pid))
        time.sleep(_SAMPLE_SECONDS)
    assert child.stdout is not None
    output = child.stdout.read()
    if child.returncode != 0:
        raise SystemExit(f"conversion to {outtype} failed with status {child.returncode}")
    return {"outtype": outtype, "peak_rss_anon": peak, **json.loads(output)}


def copy_seconds(source: Path, folder: Path) -> tuple[float, int]:
    """Time to copy all files of a checkpoint to disk, as a conversion does (with fsync), and their bytes."""
    total = 0
    begun = time.perf_counter()
    folder.mkdir()
    for path in sorted(source.iterdir()):
        shutil.copyfile(path, folder / path.name)
        with (folder / path.name).open("rb") as file:
            os.fsync(file.fileno())
        total += path.stat().st_size
    seconds = time.perf_counter() - begun
    shutil.rmtree(folder)
    return seconds, total


def measure(folder: Path, shapes: str, outtypes: list[str]) -> dict[str, Any]:
    """All figures of one run."""
    s = SHAPES[shapes]
    source, target = folder / "checkpoint", folder / "target.gguf"
    largest = write_checkpoint(source, s)
    write_target(target, s)
    copies = []
    rows = []
    for outtype in outtypes:
        seconds, source_bytes = copy_seconds(source, folder / "copy")  # before each, so that both see the same machine
        copies.append(seconds)
        outfile = folder / ("out" if outtype == HF else "out.gguf")
        row = convert(source, outfile, outtype, target)
        shutil.rmtree(outfile) if outtype == HF else outfile.unlink()
        rows.append(row | {"copy_seconds": seconds, "times_a_copy": row["seconds"] / seconds})
    allowed = ALLOWED_FACTOR * largest + ALLOWED_BYTES
    return {
        "shapes": shapes,
        "source_bytes": source_bytes,
        "largest_tensor": largest,
        "allowed_rss_anon": allowed,
        "within": all(row["peak_rss_anon"] <= allowed for row in rows),
        "conversions": rows,
    }


def main() -> int:
    """Returns the exit status: 1 when a conversion took more memory than promised."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", choices=list(SHAPES), default="xs")
    parser.add_argument("--outtype", nargs="+", choices=[*OUTTYPES, HF], default=["q8_0"])
    parser.add_argument("--folder", type=Path, help="where the temporary folder is made (3 GB for xs)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        report = measure(Path(folder), arguments.shapes, arguments.outtype)
    if arguments.json:
        print(json.dumps(report))
    else:
        mb = 1e6
        print(
            f"{report['shapes']}: {report['source_bytes'] / mb:.0f} MB, largest tensor "
            f"{report['largest_tensor'] / mb:.1f} MB, allowed RssAnon {report['allowed_rss_anon'] / mb:.0f} MB"
        )
        for row in report["conversions"]:
            print(
                f"bf16 -> {row['outtype']}: {row['seconds']:.1f} s ({row['times_a_copy']:.1f} x a copy's "
                f"{row['copy_seconds']:.1f} s), {row['bytes'] / mb:.0f} MB, peak RssAnon "
                f"{row['peak_rss_anon'] / mb:.0f} MB"
            )
    return 0 if report["within"] else 1


if __name__ == "__main__":
    sys.exit(main())
