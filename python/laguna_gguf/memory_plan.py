"""What loading a target and a drafter will take, computed from the files' metadata before anything is allocated.

Weights and caches follow llama.cpp's own rules (llama-cpp-python 0.3.36); compute buffers are estimates, most of them
within a quarter of what llama.cpp then reserves for a Laguna graph.
"""

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from laguna_gguf import _native
from laguna_gguf.devices import Device, list_devices
from laguna_gguf.dflash.config import DrafterConfig
from laguna_gguf.dflash.names import internal_shapes
from laguna_gguf.errors import CheckpointError
from laguna_gguf.hub import resolve

GGML_TYPE_F32 = 0
GGML_TYPE_F16 = 1

_CACHE_PAD = 256  # llama.cpp pads n_ctx and the sliding cache to this many rows
_LAGUNA_SWA_PERIOD = 4  # llama.cpp's pattern for Laguna files that carry a window but no pattern
_CAPTURE_ROWS = 128  # prompt rows decoded at a time while features are captured, each with its logits


@dataclass(frozen=True)
class PlanItem:
    """One allocation: `part` of the run, what it consists of, on which device, how many bytes."""

    part: str
    detail: str
    device: str
    n_bytes: int


@dataclass(frozen=True)
class MemoryPlan:
    """All allocations of a run, beside the memory that the devices have free now."""

    items: tuple[PlanItem, ...]
    devices: tuple[Device, ...]
    n_ctx: int
    """Context rows after padding."""

    def needed(self) -> dict[str, int]:
        """Planned bytes by device name, in the order of the items."""
        total: dict[str, int] = {}
        for item in self.items:
            total[item.device] = total.get(item.device, 0) + item.n_bytes
        return total

    def shortfalls(self) -> dict[str, int]:
        """Bytes missing by device name, where the plan does not fit; devices that report no memory are left out."""
        free = {device.name: device.free for device in self.devices if device.total}
        return {name: n - free[name] for name, n in self.needed().items() if name in free and n > free[name]}


def trained_context(target: str | Path) -> int:
    """Context length (tokens) that a GGUF target was trained for. Raises CheckpointError when the file does not say."""
    return _Shape.read(_native.GgufFile(str(target))).n_ctx_train


def plan_memory(
    target: str | Path,
    drafter: str | Path | None = None,
    *,
    n_ctx: int = 0,
    n_batch: int = 2048,
    n_ubatch: int = 512,
    n_gpu_layers: int = 0,
    type_k: int = GGML_TYPE_F16,
    type_v: int = GGML_TYPE_F16,
    swa_full: bool = False,
    flash_attn: bool = False,
    devices: tuple[Device, ...] | None = None,
) -> MemoryPlan:
    """Plan the memory of a target GGUF (any shard of a split one) and a drafter (GGUF or HF directory).

    Arguments mean what they mean to llama_cpp.Llama (n_ctx 0: the file's context length; n_gpu_layers -1: all layers).
    `devices` defaults to those of the running ggml. Raises CheckpointError or ConfigError for unreadable files.
    """
    devices = list_devices() if devices is None else devices
    file = _native.GgufFile(str(target))
    shape = _Shape.read(file)
    rows = n_ctx or shape.n_ctx_train
    # llama_cpp.Llama holds both batch sizes down to the context, llama.cpp pads the context.
    n_ubatch = min(n_ubatch, n_batch, rows)
    n_ctx = _pad(rows)
    placement = _place(devices, shape.n_layer, n_gpu_layers)

    n_swa_rows = n_ctx if swa_full else _pad(min(n_ctx, shape.window + n_ubatch))
    items = _weight_items(file, placement)
    items += _cache_items(shape, placement, n_ctx, n_swa_rows, type_k, type_v)
    items.append(
        PlanItem(
            "compute",
            f"estimate, {n_ubatch} rows a micro-batch",
            placement.output,
            shape.compute_bytes(n_ctx, n_swa_rows, n_ubatch, flash_attn),
        )
    )
    if drafter is not None:
        # The drafter multiplies with the target's output matrix, so it lives where that is.
        items += _drafter_items(resolve(drafter), shape, placement.output, n_ubatch)
    return MemoryPlan(tuple(items), devices, n_ctx)


@dataclass(frozen=True)
class _Shape:
    """The sizes of a target that its memory depends on. Lists are by layer."""

    n_layer: int
    n_ctx_train: int
    n_embd: int
    n_vocab: int
    window: int
    is_sliding: list[bool]
    n_head: list[int]
    k_width: list[int]
    v_width: list[int]
    ffn_width: int

    @classmethod
    def read(cls, file: _native.GgufFile) -> "_Shape":
        arch = file.get("general.architecture")

        def number(key: str, default: int | None = None) -> int:
            value = file.get(f"{arch}.{key}", default)
            if isinstance(value, bool) or not isinstance(value, int):
                raise CheckpointError(f"{file.paths[0]}: {arch}.{key} is {value!r}; a target needs a number there")
            return value

        n_layer, n_embd = number("block_count"), number("embedding_length")

        def by_layer(key: str, default: int | None = None) -> list[int]:
            value = file.get(f"{arch}.{key}", default)
            if isinstance(value, np.ndarray) and len(value) >= n_layer:
                return [int(v) for v in value[:n_layer]]
            return [number(key, default)] * n_layer

        n_head = by_layer("attention.head_count")
        head_dim = n_embd // max(1, n_head[0]) if n_layer else 0
        n_kv = by_layer("attention.head_count_kv", n_head[0] if n_layer else 0)
        k_dim = number("attention.key_length", head_dim)
        v_dim = number("attention.value_length", head_dim)
        window = number("attention.sliding_window", 0)
        experts = number("expert_used_count", 0) * number("expert_feed_forward_length", 0)
        shared = number("expert_shared_feed_forward_length", 0)
        embedding = file.tensor("token_embd.weight")
        return cls(
            n_layer=n_layer,
            n_ctx_train=number("context_length"),
            n_embd=n_embd,
            n_vocab=embedding.ne[1] if embedding is not None and len(embedding.ne) > 1 else 0,
            window=window,
            is_sliding=_sliding_layers(file.get(f"{arch}.attention.sliding_window_pattern"), arch, window, n_layer),
            n_head=n_head,
            k_width=[n * k_dim for n in n_kv],
            v_width=[n * v_dim for n in n_kv],
            ffn_width=max(max(by_layer("feed_forward_length", 0), default=0), experts, shared),
        )

    def compute_bytes(self, n_ctx: int, n_swa_rows: int, n_ubatch: int, flash_attn: bool) -> int:
        """Estimate of llama.cpp's compute buffer. One layer is alive at a time, then the logits of a micro-batch."""
        cache_rows = [n_swa_rows if sliding else n_ctx for sliding in self.is_sliding]
        masks = sum(set(cache_rows)) * (2 if flash_attn else 4)
        scores = max((4 * n * rows for n, rows in zip(self.n_head, cache_rows, strict=True)), default=0)
        layer = max(0 if flash_attn else scores, 2 * 4 * self.ffn_width)
        return n_ubatch * (4 * 4 * self.n_embd + max(masks + layer, 4 * self.n_vocab))


def _sliding_layers(pattern: Any, arch: str, window: int, n_layer: int) -> list[bool]:
    if window <= 0:
        return [False] * n_layer
    if isinstance(pattern, np.ndarray) and len(pattern) >= n_layer:
        return [bool(v) for v in pattern[:n_layer]]
    if arch == "laguna":
        period = pattern if isinstance(pattern, int) else _LAGUNA_SWA_PERIOD
        return [period == 0 or layer % period != 0 for layer in range(n_layer)]
    return [False] * n_layer  # another architecture's default is unknown here: plan for the larger cache


@dataclass(frozen=True)
class _Placement:
    """Device names: `host`, of each layer, and of the output matrix."""

    host: str
    layers: list[str]
    output: str


def _place(devices: tuple[Device, ...], n_layer: int, n_gpu_layers: int) -> _Placement:
    """llama.cpp's default: offload the last layers, split over the GPUs in proportion to their free memory."""
    host = next((device.name for device in devices if device.kind == "cpu"), "CPU")
    gpus = [d for d in devices if d.kind == "gpu"] or [d for d in devices if d.kind == "igpu"][:1]
    n_total = n_layer + 1  # the output matrix counts as one more layer
    n_offloaded = n_total if n_gpu_layers < 0 else min(n_gpu_layers, n_total)
    if not gpus or n_offloaded == 0:
        return _Placement(host, [host] * n_layer, host)
    shares = np.cumsum([max(1, gpu.free) for gpu in gpus], dtype=np.float64)
    chosen = np.searchsorted(shares / shares[-1], np.arange(n_offloaded) / n_offloaded, side="right")
    names = [host] * (n_total - n_offloaded) + [gpus[min(int(i), len(gpus) - 1)].name for i in chosen]
    return _Placement(host, names[:n_layer], names[n_layer])


def _weight_items(file: _native.GgufFile, placement: _Placement) -> list[PlanItem]:
    by_device: dict[str, dict[int, int]] = {}

    def add(device: str, tensor: _native.GgufTensor) -> None:
        types = by_device.setdefault(device, {})
        types[tensor.ggml_type] = types.get(tensor.ggml_type, 0) + tensor.n_bytes

    tied = file.tensor("output.weight") is None
    for tensor in file.tensors():
        block = re.match(r"blk\.(\d+)\.", tensor.name)
        if block is not None:
            layer = int(block[1])
            add(placement.layers[layer] if layer < len(placement.layers) else placement.output, tensor)
        elif tensor.name.startswith("token_embd"):
            # The embedding is never offloaded; with tied weights a GPU that computes the logits gets its own copy.
            add(placement.host, tensor)
            if tied and placement.output != placement.host:
                add(placement.output, tensor)
        else:
            add(placement.output, tensor)
    return [
        PlanItem("target weights", f"mostly {_native.type_name(max(types, key=types.__getitem__))}", device, n)
        for device, types in by_device.items()
        if (n := sum(types.values()))
    ]


def _cache_items(
    shape: _Shape, placement: _Placement, n_ctx: int, n_swa_rows: int, type_k: int, type_v: int
) -> list[PlanItem]:
    k_name, v_name = _native.type_name(type_k), _native.type_name(type_v)
    type_text = k_name if k_name == v_name else f"{k_name}/{v_name}"
    items = []
    for sliding, label, rows in ((False, "full layers", n_ctx), (True, "sliding layers", n_swa_rows)):
        by_device: dict[str, list[int]] = {}
        for layer in range(shape.n_layer):
            if shape.is_sliding[layer] == sliding:
                row = _row_bytes(shape.k_width[layer], type_k) + _row_bytes(shape.v_width[layer], type_v)
                by_device.setdefault(placement.layers[layer], []).append(rows * row)
        for device, sizes in by_device.items():
            detail = f"{len(sizes)} {label} x {rows} rows, {type_text}"
            items.append(PlanItem("target KV cache", detail, device, sum(sizes)))
    return items


def _drafter_items(path: Path, shape: _Shape, device: str, n_ubatch: int) -> list[PlanItem]:
    if path.is_dir():
        fields = json.loads((path / "config.json").read_text("utf-8"))
        config = DrafterConfig.from_json(fields)
        # Quantised weights are unpacked on loading, mostly to f32: few of their values are exact in bf16.
        packed = fields.keys() & {"quantization_config", "quantization"} or (path / "hf_quant_config.json").exists()
        n_weights = sum(file.stat().st_size for file in path.glob("*.safetensors"))
        detail = "safetensors"
        if packed:
            n_weights = 4 * sum(math.prod(ne) for ne in internal_shapes(config).values())
            detail = "safetensors, unpacked to f32"
    else:
        config = DrafterConfig.from_gguf(path)
        tensors = _native.GgufFile(str(path)).tensors()
        n_weights = sum(tensor.n_bytes for tensor in tensors)
        largest = max(tensors, key=lambda tensor: tensor.n_bytes)
        detail = f"mostly {_native.type_name(largest.ggml_type)}"
    window_rows = config.sliding_window - 1
    # As csrc/dflash/context_cache.cpp: scratch for a block, and a ring a block longer than the window.
    n_slots = _pad(config.block_size, 16) + _pad(window_rows + config.block_size, 32)
    context = 4 * n_slots * 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    # Hidden rows of a window, the target's logits for the prompt rows decoded together, activations of one block.
    hidden = window_rows * len(config.target_layer_ids) * config.hidden_size
    logits = min(_CAPTURE_ROWS, n_ubatch) * shape.n_vocab
    block = config.block_size * (shape.n_vocab + 2 * config.intermediate_size)
    return [
        PlanItem("drafter weights", detail, device, n_weights),
        PlanItem("drafter context", f"{config.num_hidden_layers} layers x {n_slots} rows, f32", device, context),
        PlanItem("drafter compute", "estimate, capture included", device, 4 * (hidden + logits + block)),
    ]


def _row_bytes(width: int, ggml_type: int) -> int:
    n_elements, n_bytes = _native.type_size(ggml_type)
    return -(-width // n_elements) * n_bytes


def _pad(rows: int, multiple: int = _CACHE_PAD) -> int:
    return -(-rows // multiple) * multiple
