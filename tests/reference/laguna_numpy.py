"""The Laguna target in float64 numpy, read straight from a GGUF file.

It follows llama.cpp's `src/models/laguna.cpp`: full and sliding-window layers with their own ropes, per-head RMS norms
of q and k, a softplus output gate (one scalar a head), leading dense layers, then sigmoid-routed experts whose
selection bias does not enter the weights, plus one shared expert. YaRN and per-element gates are refused.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader
from numpy.typing import NDArray

from .dflash_numpy import Array, rms, silu, softmax, softplus


def partial_rope(x: Array, position: int, theta: float, n_rot: int) -> Array:
    """Rotate the first n_rot dims of every head of x [n_heads, D] in pairs (d, d + n_rot/2); the rest stays."""
    half = n_rot // 2
    angle = position * theta ** (-2.0 * np.arange(half) / n_rot)
    out = x.copy()
    out[..., :half] = x[..., :half] * np.cos(angle) - x[..., half:n_rot] * np.sin(angle)
    out[..., half:n_rot] = x[..., half:n_rot] * np.cos(angle) + x[..., :half] * np.sin(angle)
    return out


@dataclass(frozen=True)
class LayerShape:
    """What differs between layers."""

    sliding: bool
    n_q: int
    n_kv: int
    theta: float
    n_rot: int
    dense: bool


class ReferenceTarget:
    """Forward of a Laguna GGUF. `tensors`: by GGUF name, in numpy order [n_out, n_in] or [n_expert, n_out, n_in]."""

    def __init__(self, path: str | Path) -> None:
        reader = GGUFReader(str(path))
        self.tensors: dict[str, Array] = {}
        for t in reader.tensors:
            if t.tensor_type.name not in ("F32", "F16"):
                raise ValueError(f"{t.name}: {t.tensor_type.name} is not read here")
            self.tensors[t.name] = np.asarray(t.data, np.float64)
        fields: dict[str, Any] = {name: field.contents() for name, field in reader.fields.items()}
        if fields["general.architecture"] != "laguna" or "laguna.rope.scaling.type" in fields:
            raise ValueError("not a Laguna file, or one with scaled rope")

        def get(key: str, default: Any = None) -> Any:
            return fields.get(f"laguna.{key}", default) if default is not None else fields[f"laguna.{key}"]

        self.n_layers = int(get("block_count"))
        self.eps = float(get("attention.layer_norm_rms_epsilon"))
        self.head_dim = int(get("attention.key_length"))
        self.window = int(get("attention.sliding_window"))
        self.n_expert_used = int(get("expert_used_count"))
        self.weights_norm = bool(get("expert_weights_norm"))
        self.weights_scale = float(get("expert_weights_scale"))
        if int(get("expert_gating_func")) != 2:
            raise ValueError("the router is not a sigmoid")
        pattern = get("attention.sliding_window_pattern")
        n_q, n_kv = get("attention.head_count"), get("attention.head_count_kv")
        n_dense = int(get("leading_dense_block_count"))
        self.layers = []
        for il in range(self.n_layers):
            sliding = bool(pattern[il]) if isinstance(pattern, list) else il % int(pattern) != 0
            suffix = "_swa" if sliding else ""
            self.layers.append(
                LayerShape(
                    sliding=sliding,
                    n_q=int(n_q[il] if isinstance(n_q, list) else n_q),
                    n_kv=int(n_kv[il] if isinstance(n_kv, list) else n_kv),
                    theta=float(get(f"rope.freq_base{suffix}")),
                    n_rot=int(get(f"rope.dimension_count{suffix}")),
                    dense=il < n_dense,
                )
            )

    @property
    def embedding(self) -> Array:
        """Token embedding rows [n_vocab, n_embd]."""
        return self.tensors["token_embd.weight"]

    @property
    def lm_head(self) -> Array:
        """Output rows [n_vocab, n_embd]; the embedding rows where the file ties them."""
        return self.tensors.get("output.weight", self.embedding)

    def forward(self, tokens: NDArray[np.int32] | list[int]) -> tuple[Array, Array]:
        """Residual rows after each layer [n_tokens, n_layers, n_embd] and logits [n_tokens, n_vocab]."""
        x = self.embedding[np.asarray(tokens)]
        residuals = np.empty((len(x), self.n_layers, x.shape[1]))
        for il, layer in enumerate(self.layers):
            x = x + self._attention(il, layer, self._norm(x, il, "attn_norm"))
            m = self._norm(x, il, "ffn_norm")
            x = x + (self._swiglu(m, il, "") if layer.dense else self._experts(m, il))
            residuals[:, il] = x
        return residuals, rms(x, self.tensors["output_norm.weight"], self.eps) @ self.lm_head.T

    def _weight(self, il: int, name: str) -> Array:
        return self.tensors[f"blk.{il}.{name}.weight"]

    def _norm(self, x: Array, il: int, name: str) -> Array:
        return rms(x, self._weight(il, name), self.eps)

    def _attention(self, il: int, layer: LayerShape, m: Array) -> Array:
        n_tokens, d = len(m), self.head_dim
        q = (m @ self._weight(il, "attn_q").T).reshape(n_tokens, layer.n_q, d)
        k = (m @ self._weight(il, "attn_k").T).reshape(n_tokens, layer.n_kv, d)
        v = (m @ self._weight(il, "attn_v").T).reshape(n_tokens, layer.n_kv, d)
        q, k = self._norm(q, il, "attn_q_norm"), self._norm(k, il, "attn_k_norm")
        q = np.stack([partial_rope(q[p], p, layer.theta, layer.n_rot) for p in range(n_tokens)])
        k = np.stack([partial_rope(k[p], p, layer.theta, layer.n_rot) for p in range(n_tokens)])
        out = np.empty_like(q)
        for p in range(n_tokens):
            first = max(0, p - self.window + 1) if layer.sliding else 0
            for head in range(layer.n_q):
                kv_head = head // (layer.n_q // layer.n_kv)
                weights = softmax(k[first : p + 1, kv_head] @ q[p, head] / np.sqrt(d))
                out[p, head] = weights @ v[first : p + 1, kv_head]
        gate_weight = self._weight(il, "attn_gate")
        if len(gate_weight) != layer.n_q:
            raise ValueError("only a gate of one scalar a head is implemented")
        out = out * softplus(m @ gate_weight.T)[:, :, None]
        return out.reshape(n_tokens, -1) @ self._weight(il, "attn_output").T

    def _swiglu(self, m: Array, il: int, suffix: str) -> Array:
        gate, up, down = (self._weight(il, f"ffn_{part}{suffix}") for part in ("gate", "up", "down"))
        return (silu(m @ gate.T) * (m @ up.T)) @ down.T

    def _experts(self, m: Array, il: int) -> Array:
        gate, up, down = (self._weight(il, f"ffn_{part}_exps") for part in ("gate", "up", "down"))
        scores = 1.0 / (1.0 + np.exp(-(m @ self._weight(il, "ffn_gate_inp").T)))
        selection = scores + self.tensors[f"blk.{il}.exp_probs_b.bias"]
        out = self._swiglu(m, il, "_shexp")
        for p in range(len(m)):
            chosen = np.argsort(-selection[p], kind="stable")[: self.n_expert_used]
            weights = scores[p, chosen]
            if self.weights_norm:
                weights = weights / max(weights.sum(), 6.103515625e-5)
            for expert, weight in zip(chosen, weights * self.weights_scale, strict=True):
                hidden = silu(gate[expert] @ m[p]) * (up[expert] @ m[p])
                out[p] = out[p] + weight * (down[expert] @ hidden)
        return out
