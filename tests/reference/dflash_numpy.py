"""The Laguna DFlash drafter in float64 numpy, written from its formulas.

Nothing is optimised: every context row is kept under its absolute position for ever, there is no ring, and the sliding
window is a rule that each query applies to each key. That makes it a judge of the native drafter's rotating cache.
"""

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]
Window = Literal["per_query", "anchored"]


def rms(x: Array, weight: Array, eps: float) -> Array:
    """weight * x / sqrt(mean(x^2) + eps) over the last axis."""
    return weight * x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)


def rope(x: Array, position: int, theta: float) -> Array:
    """Rotate the pairs (d, d + D/2) of every head of x [n_heads, D] by position * theta^(-2d/D)."""
    half = x.shape[-1] // 2
    angle = position * theta ** (-np.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], axis=-1)


def softplus(z: Array) -> Array:
    """log(1 + exp(z)), stable for large |z|."""
    return np.maximum(z, 0.0) + np.log1p(np.exp(-np.abs(z)))


def silu(z: Array) -> Array:
    """z * sigmoid(z), without overflow for large negative z."""
    return z * np.exp(-softplus(-z))


def softmax(scores: Array) -> Array:
    """Softmax over the last axis."""
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


class ReferenceDrafter:
    """Context rows by absolute position, and the block forward on top of them.

    `config` is a parsed config.json, `tensors` its weights by Hugging Face name (fused qkv), `embedding` and `lm_head`
    are the target's, [n_vocab, hidden].
    """

    def __init__(
        self, config: Mapping[str, Any], tensors: Mapping[str, ArrayLike], embedding: ArrayLike, lm_head: ArrayLike
    ) -> None:
        self.n_layers: int = config["num_hidden_layers"]
        self.n_q: int = config["num_attention_heads"]
        self.n_kv: int = config["num_key_value_heads"]
        self.head_dim: int = config["head_dim"]
        self.eps: float = config["rms_norm_eps"]
        self.theta: float = config["rope_theta"]
        self.window: int = config["sliding_window"]
        self.mask_token: int = config["dflash_config"]["mask_token_id"]
        self.n_captured = len(config["dflash_config"]["target_layer_ids"])
        self.tensors = {name.removesuffix(".weight"): np.asarray(t, np.float64) for name, t in tensors.items()}
        self.embedding = np.asarray(embedding, np.float64)
        self.lm_head = np.asarray(lm_head, np.float64)
        self.reset()

    def reset(self) -> None:
        """Forget every context row; the next position is 0."""
        self.position = 0
        self.first_position = 0
        self.keys: list[dict[int, Array]] = [{} for _ in range(self.n_layers)]
        self.values: list[dict[int, Array]] = [{} for _ in range(self.n_layers)]

    # The two steps that are easiest to leave out are methods of their own: a test can leave them out on purpose.

    def captured_slice(self, i: int, h: Array) -> Array:
        """u_i = rms(h_i; aux_i)."""
        return rms(h, self.tensors[f"aux_hidden_norms.{i}"], self.eps)

    def context_input(self, layer: int, c: Array) -> Array:
        """e = rms(c; input_layernorm_l): what layer l projects to its context keys and values."""
        return rms(c, self.tensors[f"layers.{layer}.input_layernorm"], self.eps)

    def append(self, features: ArrayLike, start: int | None = None) -> None:
        """Context update with features [n_rows, n_captured, hidden] at positions start, start + 1, ..."""
        rows = np.asarray(features, np.float64)
        if self.position == self.first_position:
            self.first_position = self.position = self.position if start is None else start
        elif start is not None and start != self.position:
            raise ValueError(f"hole: start {start}, position {self.position}")
        first_kept = max(0, len(rows) - (self.window - 1))
        for r in range(first_kept, len(rows)):
            self._append_row(rows[r], self.position + r)
        self.position += len(rows)

    def _append_row(self, h: Array, position: int) -> None:
        u = np.concatenate([self.captured_slice(i, h[i]) for i in range(self.n_captured)])
        c = rms(self.tensors["fc"] @ u, self.tensors["hidden_norm"], self.eps)
        for layer in range(self.n_layers):
            _, k, v = self._qkv(layer, self.context_input(layer, c))
            k = rms(k, self.tensors[f"layers.{layer}.self_attn.k_norm"], self.eps)
            self.keys[layer][position] = rope(k, position, self.theta)
            self.values[layer][position] = v

    def rollback(self, position: int) -> None:
        """Drop the rows at `position` and after it."""
        if not self.first_position <= position <= self.position:
            raise ValueError(f"rollback to {position}, rows {self.first_position}..{self.position}")
        for rows in (*self.keys, *self.values):
            for p in [p for p in rows if p >= position]:
                del rows[p]
        self.position = position

    def _qkv(self, layer: int, m: Array) -> tuple[Array, Array, Array]:
        qkv = self.tensors[f"layers.{layer}.self_attn.qkv_proj"] @ m
        n_q, n_kv = self.n_q * self.head_dim, self.n_kv * self.head_dim
        return (
            qkv[:n_q].reshape(self.n_q, self.head_dim),
            qkv[n_q : n_q + n_kv].reshape(self.n_kv, self.head_dim),
            qkv[n_q + n_kv :].reshape(self.n_kv, self.head_dim),
        )

    def visible(self, key_position: int, row: int, window: Window) -> bool:
        """Whether block row `row` (at position P + row) sees the key at an absolute position."""
        query = self.position + row
        lowest = (query if window == "per_query" else self.position) - self.window
        return lowest < key_position <= query

    def block_logits(self, tokens: list[int], window: Window = "per_query") -> Array:
        """Logits [len(tokens), n_vocab] of a block of tokens at positions P, P + 1, ..."""
        n_rows = len(tokens)
        x = self.embedding[tokens]
        for layer in range(self.n_layers):
            p = f"layers.{layer}."
            m = rms(x, self.tensors[p + "input_layernorm"], self.eps)
            keys, values = dict(self.keys[layer]), dict(self.values[layer])
            queries = []
            for j in range(n_rows):
                q, k, v = self._qkv(layer, m[j])
                q = rms(q, self.tensors[p + "self_attn.q_norm"], self.eps)
                k = rms(k, self.tensors[p + "self_attn.k_norm"], self.eps)
                queries.append(rope(q, self.position + j, self.theta))
                keys[self.position + j] = rope(k, self.position + j, self.theta)
                values[self.position + j] = v
            attended = np.stack([self._attend(queries[j], keys, values, j, window) for j in range(n_rows)])
            gate = softplus(m @ self.tensors[p + "self_attn.g_proj"].T)
            attended = attended * gate[:, :, None]
            x = x + attended.reshape(n_rows, -1) @ self.tensors[p + "self_attn.o_proj"].T
            m2 = rms(x, self.tensors[p + "post_attention_layernorm"], self.eps)
            up = silu(m2 @ self.tensors[p + "mlp.gate_proj"].T) * (m2 @ self.tensors[p + "mlp.up_proj"].T)
            x = x + up @ self.tensors[p + "mlp.down_proj"].T
        return rms(x, self.tensors["norm"], self.eps) @ self.lm_head.T

    def _attend(self, q: Array, keys: dict[int, Array], values: dict[int, Array], row: int, window: Window) -> Array:
        positions = [p for p in sorted(keys) if self.visible(p, row, window)]
        k = np.stack([keys[p] for p in positions])  # [n_keys, n_kv, head_dim]
        v = np.stack([values[p] for p in positions])
        out = np.empty_like(q)
        for head in range(self.n_q):
            kv_head = head // (self.n_q // self.n_kv)
            weights = softmax(k[:, kv_head] @ q[head] / np.sqrt(self.head_dim))
            out[head] = weights @ v[:, kv_head]
        return out

    def draft(self, anchor: int, n: int, window: Window = "per_query") -> tuple[NDArray[np.int32], Array]:
        """Tokens int32 [n] (lowest id on ties) and logits [n, n_vocab] of rows 1..n of [anchor, mask * n]."""
        logits = self.block_logits([anchor] + [self.mask_token] * n, window)[1:]
        return logits.argmax(axis=1).astype(np.int32), logits


def spread(got: ArrayLike, reference: Array) -> float:
    """max |got - reference| in units of the reference's standard deviation."""
    return float(np.abs(np.asarray(got, np.float64) - reference).max() / reference.std())
