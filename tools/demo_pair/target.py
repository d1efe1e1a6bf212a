"""The Laguna target in torch: the same function as llama.cpp's graph (src/models/laguna.cpp)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .target_gguf import TargetConfig, tensor_shapes

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """w * x / sqrt(mean(x^2) + eps) over the last axis, computed in float32."""
    wide = x.float()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight


def rope_table(n_positions: int, dims: int, base: float) -> tuple[Tensor, Tensor]:
    """cos and sin, each [n_positions, dims / 2]."""
    frequency = base ** (-torch.arange(0, dims, 2, dtype=torch.float64) / dims)
    angle = torch.arange(n_positions, dtype=torch.float64)[:, None] * frequency
    return angle.cos().float(), angle.sin().float()


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (i, i + dims/2) of the first `dims` places of x [..., T, heads, D]; cos, sin [..., T, dims/2]."""
    half = cos.shape[-1]
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)


def dense_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Grouped attention; q [B, T, Hq, D], k and v [B, S, Hkv, D], mask [T, S] of booleans. Returns [B, T, Hq, D]."""
    batch, n_query, heads, dim = q.shape
    group = heads // k.shape[2]
    q = q.view(batch, n_query, -1, group, dim).permute(0, 2, 3, 1, 4).reshape(batch, -1, group * n_query, dim)
    scores = (q @ k.permute(0, 2, 3, 1)).float() * dim**-0.5
    if mask is not None:
        scores = scores.view(batch, -1, group, n_query, k.shape[1]).masked_fill(~mask, -torch.inf)
        scores = scores.view(batch, -1, group * n_query, k.shape[1])
    out = scores.softmax(-1).to(v.dtype) @ v.transpose(1, 2)
    return out.view(batch, -1, group, n_query, dim).permute(0, 3, 1, 2, 4).reshape(batch, n_query, heads, dim)


def window_mask(n_query: int, n_key: int, window: int | None) -> Tensor:
    """[n_query, n_key]: the last n_query positions of n_key see themselves and what lies less than `window` back."""
    query = torch.arange(n_key - n_query, n_key)[:, None]
    key = torch.arange(n_key)[None]
    mask = key <= query
    return mask if window is None else mask & (key > query - window)


def block_attention(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """Sliding-window attention over blocks of `window` rows, each with the block before it; T % window == 0."""
    batch, length, heads, dim = q.shape
    blocks, kv_heads = length // window, k.shape[2]
    group = heads // kv_heads
    q = q.view(batch, blocks, window, kv_heads, group, dim).permute(0, 1, 3, 4, 2, 5)
    q = q.reshape(batch * blocks * kv_heads, group * window, dim)

    def with_previous(x: Tensor) -> Tensor:
        x = x.view(batch, blocks, window, kv_heads, dim)
        previous = F.pad(x[:, :-1], (0, 0, 0, 0, 0, 0, 1, 0))
        return torch.cat([previous, x], 2).permute(0, 1, 3, 2, 4).reshape(batch * blocks * kv_heads, 2 * window, dim)

    row, column = torch.arange(window)[:, None], torch.arange(2 * window)[None]
    near = (column > row) & (column <= row + window)
    first = near & (column >= window)
    mask = torch.cat([first[None], near[None].expand(blocks - 1, -1, -1)]) if blocks > 1 else first[None]
    scores = (q @ with_previous(k).transpose(1, 2)).float() * dim**-0.5
    scores = scores.view(batch, blocks, kv_heads, group, window, 2 * window)
    scores = scores.masked_fill(~mask[None, :, None, None], -torch.inf).softmax(-1).to(v.dtype)
    out = scores.view(batch * blocks * kv_heads, group * window, 2 * window) @ with_previous(v)
    out = out.view(batch, blocks, kv_heads, group, window, dim).permute(0, 1, 4, 2, 3, 5)
    return out.reshape(batch, length, heads, dim)


class TargetModel(nn.Module):
    """A Laguna target whose parameters carry their GGUF names in `weights`."""

    def __init__(self, config: TargetConfig, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.weights: dict[str, nn.Parameter] = {}
        generator = torch.Generator().manual_seed(seed)
        for name, shape in tensor_shapes(config).items():
            parameter = nn.Parameter(_initial(name, shape, generator), requires_grad=not name.endswith(".bias"))
            self.weights[name] = parameter
            self.register_parameter(name.replace(".", "__"), parameter)
        for kind, dims, base in (
            ("full", config.rope_dims_full, config.rope_base_full),
            ("swa", config.rope_dims_swa, config.rope_base_swa),
        ):
            cos, sin = rope_table(config.n_ctx_train, dims, base)
            self.register_buffer(f"{kind}_cos", cos, persistent=False)
            self.register_buffer(f"{kind}_sin", sin, persistent=False)

    def to_numpy(self) -> dict[str, np.ndarray]:
        """Float32 tensors under their GGUF names."""
        return {name: parameter.detach().numpy().copy() for name, parameter in self.weights.items()}

    def embed(self, tokens: Tensor) -> Tensor:
        """Rows of the embedding, [..., n_embd]."""
        return F.embedding(tokens, self.weights["token_embd.weight"])

    def logits(self, x: Tensor) -> Tensor:
        """Output logits [..., n_vocab] of last-layer residuals [..., n_embd]."""
        head = self.weights["token_embd.weight" if self.config.tied else "output.weight"]
        return F.linear(rms_norm(x, self.weights["output_norm.weight"], self.config.rms_eps), head)

    def block(self, layer: int, x: Tensor, position: int, attend: Attend) -> tuple[Tensor, Tensor | None]:
        """One layer on rows x [B, T, n_embd] at `position`...; also returns how often each expert was chosen."""
        c = self.config
        batch, length, _ = x.shape
        heads, kv, dim = c.n_head(layer), c.n_head_kv, c.head_dim
        w = self._layer(layer)
        m = rms_norm(x, w("attn_norm.weight"), c.rms_eps)
        fused = torch.cat([w(f"attn_{part}.weight") for part in ("q", "k", "v", "gate")])
        q, k, v, gate = F.linear(m, fused).split([heads * dim, kv * dim, kv * dim, heads], -1)
        kind = "full" if c.is_full(layer) else "swa"
        cos = getattr(self, f"{kind}_cos")[position : position + length]
        sin = getattr(self, f"{kind}_sin")[position : position + length]
        dtype = v.dtype
        q = rms_norm(q.reshape(batch, length, heads, dim), w("attn_q_norm.weight"), c.rms_eps)
        k = rms_norm(k.reshape(batch, length, kv, dim), w("attn_k_norm.weight"), c.rms_eps)
        q, k = apply_rope(q, cos, sin).to(dtype), apply_rope(k, cos, sin).to(dtype)
        out = attend(q, k, v.reshape(batch, length, kv, dim))
        out = out * F.softplus(gate.float()).unsqueeze(-1)
        x = x + F.linear(out.reshape(batch, length, heads * dim), w("attn_output.weight"))
        m = rms_norm(x, w("ffn_norm.weight"), c.rms_eps)
        if c.is_dense(layer):
            gate, up = F.linear(m, torch.cat([w("ffn_gate.weight"), w("ffn_up.weight")])).chunk(2, -1)
            return x + F.linear(F.silu(gate) * up, w("ffn_down.weight")), None
        out, counts = self._experts(layer, m)
        return x + out, counts

    def _experts(self, layer: int, m: Tensor) -> tuple[Tensor, Tensor]:
        """Routed and shared experts as one wide SwiGLU whose columns are scaled by the routing weights."""
        c, w = self.config, self._layer(layer)
        with torch.autocast("cpu", enabled=False):
            probs = F.linear(m.float(), w("ffn_gate_inp.weight")).sigmoid()
            chosen = (probs + w("exp_probs_b.bias")).topk(c.n_expert_used, -1).indices
            routing = probs.gather(-1, chosen)
            routing = routing / routing.sum(-1, keepdim=True).clamp_min(6.103515625e-5) * c.expert_scale
            onehot = F.one_hot(chosen, c.n_expert).to(routing.dtype)
            dense = (onehot * routing.unsqueeze(-1)).sum(-2)
        counts = onehot.detach().sum((0, 1, 2))
        wide = c.n_expert * c.n_ff_expert
        gate = torch.cat([w("ffn_gate_exps.weight").view(wide, -1), w("ffn_gate_shexp.weight")])
        up = torch.cat([w("ffn_up_exps.weight").view(wide, -1), w("ffn_up_shexp.weight")])
        down = torch.cat([w("ffn_down_exps.weight").permute(1, 0, 2).reshape(-1, wide), w("ffn_down_shexp.weight")], 1)
        columns = dense.unsqueeze(-1).expand(*dense.shape, c.n_ff_expert).flatten(-2)
        columns = torch.cat([columns, columns.new_ones(*dense.shape[:-1], c.n_ff_shared)], -1)
        hidden = F.silu(F.linear(m, gate)) * F.linear(m, up)
        return F.linear(hidden * columns.to(hidden.dtype), down), counts

    def _layer(self, layer: int) -> Callable[[str], Tensor]:
        return lambda name: self.weights[f"blk.{layer}.{name}"]

    def loss(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Mean cross-entropy in nats of rows [B, T + 1], T a multiple of the window, and expert counts [L, E]."""
        c = self.config
        x = self.embed(rows[:, :-1])
        full = window_mask(x.shape[1], x.shape[1], None)
        counts = []
        for layer in range(c.n_layer):
            if c.is_full(layer):
                x, count = self.block(layer, x, 0, lambda q, k, v: dense_attention(q, k, v, full))
            else:
                x, count = self.block(layer, x, 0, lambda q, k, v: block_attention(q, k, v, c.window))
            counts.append(torch.zeros(c.n_expert) if count is None else count)
        logits = self.logits(x).float()
        return F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()), torch.stack(counts)

    def forward(self, tokens: Tensor, captures: tuple[int, ...] = ()) -> tuple[Tensor, Tensor]:
        """Logits [B, T, V] and the outputs of the captured layers [B, T, A, n_embd]."""
        return self.extend(tokens, KeyValueCache(self.config, tokens.shape[0], tokens.shape[1]), captures)

    def extend(self, tokens: Tensor, cache: KeyValueCache, captures: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Evaluate tokens [B, T] after what `cache` holds: logits [B, T, V] and residuals [B, T, A, n_embd]."""
        x = self.embed(tokens)
        kept: dict[int, Tensor] = {}
        for layer in range(self.config.n_layer):
            x, _ = self.block(layer, x, cache.length, cache.attend(layer))
            kept[layer] = x
        cache.length += tokens.shape[1]
        features = torch.stack([kept[layer] for layer in captures], 2) if captures else x[:, :, None]
        return self.logits(x), features


class KeyValueCache:
    """Keys and values of a batch whose sequences all have the same length."""

    def __init__(self, config: TargetConfig, batch: int, capacity: int) -> None:
        self.config, self.length = config, 0
        shape = (config.n_layer, batch, config.n_head_kv, capacity, config.head_dim)
        self.keys, self.values = torch.zeros(shape), torch.zeros(shape)

    def attend(self, layer: int) -> Attend:
        """The attention of a layer: stores the new keys and values, then attends to all that is visible."""
        window = None if self.config.is_full(layer) else self.config.window
        start = self.length

        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            end = start + k.shape[1]
            self.keys[layer, :, :, start:end] = k.transpose(1, 2)
            self.values[layer, :, :, start:end] = v.transpose(1, 2)
            low = 0 if window is None else max(0, start - window + 1)
            mask = None if k.shape[1] == 1 else window_mask(k.shape[1], end, window)[:, low:]
            keys, values = self.keys[layer, :, :, low:end], self.values[layer, :, :, low:end]
            return dense_attention(q, keys.transpose(1, 2), values.transpose(1, 2), mask)

        return run


def _initial(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Initial weights: norms in [0.7, 1.3], zero for what writes to the residual stream, else scaled normal."""
    if name.endswith("norm.weight"):
        return torch.rand(shape, generator=generator) * 0.6 + 0.7
    if name.endswith((".bias", "attn_output.weight")) or "ffn_down" in name:
        return torch.zeros(shape)
    scale = {"token_embd.weight": 0.1, "output.weight": 0.02}.get(name, shape[-1] ** -0.5)
    return torch.randn(shape, generator=generator) * scale
