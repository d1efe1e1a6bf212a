"""The scorers of prompt compression in float64 numpy, from their formulas. Nothing is shared with the package.

Files are read with the gguf package (f32 and f16 tensors).
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader
from numpy.typing import NDArray

Array = NDArray[np.float64]


class ReferenceFile:
    """Tensors (numpy order, float64) and metadata of a GGUF file."""

    def __init__(self, path: str | Path) -> None:
        reader = GGUFReader(str(path))
        self.tensors: dict[str, Array] = {}
        for tensor in reader.tensors:
            if tensor.tensor_type.name not in ("F32", "F16"):
                raise ValueError(f"{tensor.name}: {tensor.tensor_type.name} is not read here")
            self.tensors[tensor.name] = np.asarray(tensor.data, np.float64)
        self.fields: dict[str, Any] = {name: field.contents() for name, field in reader.fields.items()}


def rms(x: Array, eps: float) -> Array:
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps)


class ReferenceScorer:
    """Mass of query windows by the attention of one block without RoPE."""

    def __init__(self, drafter: str | Path, head: str | Path | None = None) -> None:
        file = ReferenceFile(drafter)
        self.arch = file.fields["general.architecture"]
        block = {"qwen35": 15, "qwen3": 13}[self.arch]

        def field(key: str) -> Any:
            return file.fields[f"{self.arch}.{key}"]

        self.n_head, self.n_head_kv = int(field("attention.head_count")), int(field("attention.head_count_kv"))
        self.dim = int(field("attention.key_length"))
        self.eps = float(field("attention.layer_norm_rms_epsilon"))

        def tensor(name: str) -> Array:
            return file.tensors[f"blk.{block}.{name}.weight"]

        self.attn_norm, self.q_norm, self.k_norm = tensor("attn_norm"), tensor("attn_q_norm"), tensor("attn_k_norm")
        q = tensor("attn_q")
        if self.arch == "qwen35":  # every head has its query rows, then as many gate rows
            rows = [np.arange(self.dim) + head * 2 * self.dim for head in range(self.n_head)]
            q = q[np.concatenate(rows)]
        self.wq, self.wk = q, tensor("attn_k")
        if head is not None:
            trained = ReferenceFile(head).tensors
            self.wq, self.wk = trained["scoringhead.attn_q.weight"], trained["scoringhead.attn_k.weight"]

    def keys(self, taps: Array) -> Array:
        """[n, n_head_kv, dim]"""
        xh = self.attn_norm * rms(taps.astype(np.float64), self.eps)
        return self.k_norm * rms((xh @ self.wk.T).reshape(-1, self.n_head_kv, self.dim), self.eps)

    def queries(self, taps: Array) -> Array:
        """[n, n_head, dim]"""
        xh = self.attn_norm * rms(taps.astype(np.float64), self.eps)
        return self.q_norm * rms((xh @ self.wq.T).reshape(-1, self.n_head, self.dim), self.eps)

    def window_mass(self, taps: Array, window: tuple[int, int], allowed: NDArray[np.bool_]) -> Array:
        keys = np.repeat(self.keys(taps), self.n_head // self.n_head_kv, axis=1)
        queries = self.queries(taps[window[0] : window[1]])
        scores = np.einsum("ihd,jhd->ihj", queries, keys) / math.sqrt(self.dim)
        scores[:, :, ~allowed] = -np.inf
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        return (weights / weights.sum(axis=-1, keepdims=True)).mean(axis=(0, 1))

    def mass(
        self,
        taps: Array,
        query: tuple[int, int],
        windows: Sequence[tuple[int, int, float]] = (),
        suffix_candidates: bool = False,
    ) -> Array:
        """[n], the weighted mean over the query (weight 1) and the windows."""
        n = len(taps)
        position = np.arange(n)
        keys = (position < query[0]) | ((position >= query[1]) & suffix_candidates)
        total, weight_sum = np.zeros(n), 0.0
        for begin, end, weight in ((*query, 1.0), *windows):
            own = (position >= begin) & (position < end)
            total += weight * self.window_mass(taps, (begin, end), keys & ~own)
            weight_sum += weight
        return total / weight_sum


def probe_scores(path: str | Path, taps: Array) -> tuple[Array, Array | None]:
    """(unit, sub-unit) scores [n] of a segment probe, the convolution as a plain loop."""
    file = ReferenceFile(path)
    t = {name.removeprefix("segmentprobe."): tensor for name, tensor in file.tensors.items()}
    x = taps.astype(np.float64)
    centred = x - x.mean(axis=1, keepdims=True)
    y = centred / np.sqrt((centred**2).mean(axis=1, keepdims=True) + float(file.fields["segmentprobe.norm_eps"]))
    hidden = (y * t["norm.weight"] + t["norm.bias"]) @ t["fc1.weight"].T + t["fc1.bias"]
    if file.fields.get("segmentprobe.gelu", "tanh") == "erf":
        gelu = hidden * 0.5 * (1 + np.vectorize(math.erf)(hidden / math.sqrt(2)))
    else:
        gelu = 0.5 * hidden * (1 + np.tanh(math.sqrt(2 / math.pi) * (hidden + 0.044715 * hidden**3)))

    def output(prefix: str) -> Array:
        raw = gelu @ t[f"{prefix}fc2.weight"] + t[f"{prefix}fc2.bias"][0]
        taps_w, n = t[f"{prefix}conv.weight"], len(raw)
        out = np.zeros(n)
        for i in range(n):
            total = raw[i] + t[f"{prefix}conv.bias"][0]
            for k, weight in enumerate(taps_w):
                j = i + k - len(taps_w) // 2
                total += weight * raw[j] if 0 <= j < n else 0.0
            out[i] = 1 / (1 + math.exp(-total))
        return out

    return output(""), output("subunit.") if "subunit.fc2.weight" in t else None


def running_max(queries: Sequence[Array], keys: Sequence[Array], query_begin: int) -> Array:
    """All-layer importance [n] from queries [rows, n_head, dim] and keys [n, n_head_kv, dim] by layer."""
    n = len(keys[0])
    best = np.zeros((len(queries[0]), n))
    for q, k in zip(queries, keys, strict=True):
        wide = np.repeat(k, q.shape[1] // k.shape[1], axis=1)
        scores = np.einsum("ihd,jhd->ihj", q, wide) / math.sqrt(q.shape[-1])
        for row in range(len(q)):
            seen = scores[row, :, : query_begin + row + 1]
            weights = np.exp(seen - seen.max(axis=-1, keepdims=True))
            weights /= weights.sum(axis=-1, keepdims=True)
            best[row, : query_begin + row + 1] = np.maximum(best[row, : query_begin + row + 1], weights.max(axis=0))
    mean = best.mean(axis=0)
    return np.array([mean[max(0, i - 6) : i + 7].mean() for i in range(n)])
