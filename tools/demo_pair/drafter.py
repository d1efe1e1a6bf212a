"""The DFlash drafter in torch, with the parameter names of the published Hugging Face checkpoints."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .target import apply_rope, rms_norm, rope_table
from .target_gguf import MASK_ID


@dataclass(frozen=True)
class DrafterConfig:
    """Hyper-parameters of a drafter; `captures` are 0-based layers of the target whose outputs it reads."""

    n_vocab: int = 2048
    n_embd: int = 256
    n_layer: int = 3
    n_head: int = 4
    n_head_kv: int = 2
    head_dim: int = 64
    n_ff: int = 768
    window: int = 128
    block_size: int = 16
    mask_id: int = MASK_ID
    captures: tuple[int, ...] = (1, 4, 7)
    n_target_layers: int = 8
    rope_theta: float = 500000.0
    rms_eps: float = 1e-6
    n_ctx_train: int = 2048

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for checkpoints."""
        return asdict(self)

    def hf_config(self) -> dict[str, Any]:
        """The `config.json` of the checkpoint."""
        return {
            "architectures": ["DFlashLagunaForCausalLM"],
            "model_type": "laguna",
            "hidden_size": self.n_embd,
            "intermediate_size": self.n_ff,
            "num_hidden_layers": self.n_layer,
            "num_attention_heads": self.n_head,
            "num_key_value_heads": self.n_head_kv,
            "head_dim": self.head_dim,
            "rms_norm_eps": self.rms_eps,
            "vocab_size": self.n_vocab,
            "draft_vocab_size": self.n_vocab,
            "max_position_embeddings": self.n_ctx_train,
            "rope_theta": self.rope_theta,
            "sliding_window": self.window,
            "layer_types": ["sliding_attention"] * self.n_layer,
            "gating": "per-head",
            "num_experts": 0,
            "attention_bias": False,
            "torch_dtype": "bfloat16",
            "eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in self.captures],
            "dflash_config": {
                "block_size": self.block_size,
                "mask_token_id": self.mask_id,
                "num_target_layers": self.n_target_layers,
                "target_layer_ids": list(self.captures),
                "causal": True,
            },
        }


def tensor_shapes(c: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Checkpoint name to shape, for every tensor."""
    h, d, n = c.n_embd, c.head_dim, len(c.captures)
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (h, n * h), "hidden_norm.weight": (h,), "norm.weight": (h,)}
    shapes |= {f"aux_hidden_norms.{i}.weight": (h,) for i in range(n)}
    for layer in range(c.n_layer):
        block = {
            "input_layernorm.weight": (h,),
            "post_attention_layernorm.weight": (h,),
            "self_attn.qkv_proj.weight": ((c.n_head + 2 * c.n_head_kv) * d, h),
            "self_attn.o_proj.weight": (h, c.n_head * d),
            "self_attn.g_proj.weight": (c.n_head, h),
            "self_attn.q_norm.weight": (d,),
            "self_attn.k_norm.weight": (d,),
            "mlp.gate_proj.weight": (c.n_ff, h),
            "mlp.up_proj.weight": (c.n_ff, h),
            "mlp.down_proj.weight": (h, c.n_ff),
        }
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in block.items()}
    return shapes


class DrafterModel(nn.Module):
    """A drafter; embedding, output norm and head are passed in from the target and stay frozen."""

    def __init__(self, config: DrafterConfig, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.weights: dict[str, nn.Parameter] = {}
        generator = torch.Generator().manual_seed(seed)
        for name, shape in tensor_shapes(config).items():
            if len(shape) == 1:
                value = torch.rand(shape, generator=generator) * 0.6 + 0.7
            elif "o_proj" in name or "down_proj" in name:
                value = torch.zeros(shape)
            else:
                value = torch.randn(shape, generator=generator) * shape[-1] ** -0.5
            self.weights[name] = nn.Parameter(value)
            self.register_parameter(name.replace(".", "__"), self.weights[name])
        cos, sin = rope_table(config.n_ctx_train, config.head_dim, config.rope_theta)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def context(self, features: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of every layer, each [N, Hkv, S, D], from captured residuals [N, S, A, n_embd] at 0..S-1."""
        c, w = self.config, self.weights
        rows, length = features.shape[:2]
        aux = torch.stack([w[f"aux_hidden_norms.{i}.weight"] for i in range(len(c.captures))])
        u = rms_norm(features, aux, c.rms_eps)
        combined = rms_norm(F.linear(u.flatten(2), w["fc.weight"]), w["hidden_norm.weight"], c.rms_eps)
        result = []
        for layer in range(c.n_layer):
            name = f"layers.{layer}."
            e = rms_norm(combined, w[name + "input_layernorm.weight"], c.rms_eps)
            kv = F.linear(e, w[name + "self_attn.qkv_proj.weight"][c.n_head * c.head_dim :])
            k, v = kv.reshape(rows, length, 2, c.n_head_kv, c.head_dim).unbind(2)
            k = rms_norm(k, w[name + "self_attn.k_norm.weight"], c.rms_eps)
            k = apply_rope(k, self.cos[:length], self.sin[:length]).to(v.dtype)
            result.append((k.transpose(1, 2), v.transpose(1, 2)))
        return result

    def draft(self, x: Tensor, anchors: Tensor, context: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Final hidden rows 1.. of blocks: [N, K, R - 1, n_embd].

        x: embedded block rows [N, K, R, n_embd] (anchor, then masks); anchors: positions [N, K] of the anchors;
        context row s of a sequence is visible to a block iff s < anchor, and to row j iff anchor + j - window < s.
        """
        c, w = self.config, self.weights
        n, blocks, rows, _ = x.shape
        d, kv, group = c.head_dim, c.n_head_kv, c.n_head // c.n_head_kv
        length = context[0][0].shape[2]
        positions = anchors[:, :, None] + torch.arange(rows)
        cos, sin = self.cos[positions], self.sin[positions]
        source = torch.arange(length)
        seen = (source < anchors[:, :, None, None]) & (source > positions[..., None] - c.window)
        seen = seen[:, None, None]
        causal = torch.ones(rows, rows, dtype=torch.bool).tril()
        for layer in range(c.n_layer):
            name = f"layers.{layer}."
            m = rms_norm(x, w[name + "input_layernorm.weight"], c.rms_eps)
            fused = torch.cat([w[name + "self_attn.qkv_proj.weight"], w[name + "self_attn.g_proj.weight"]])
            q, k, v, gate = F.linear(m, fused).split([c.n_head * d, kv * d, kv * d, c.n_head], -1)
            dtype = v.dtype
            q = rms_norm(q.reshape(n, blocks, rows, c.n_head, d), w[name + "self_attn.q_norm.weight"], c.rms_eps)
            k = rms_norm(k.reshape(n, blocks, rows, kv, d), w[name + "self_attn.k_norm.weight"], c.rms_eps)
            q, k = apply_rope(q, cos, sin).to(dtype), apply_rope(k, cos, sin).to(dtype)
            v = v.reshape(n, blocks, rows, kv, d)
            q = q.view(n, blocks, rows, kv, group, d).permute(0, 3, 4, 1, 2, 5)  # [N, kv, group, K, R, D]
            k, v = k.permute(0, 3, 1, 2, 4), v.permute(0, 3, 1, 2, 4)  # [N, kv, K, R, D]
            far_k, far_v = context[layer]
            far = q.reshape(n, kv, group * blocks * rows, d) @ far_k.transpose(2, 3)
            far = far.float().view(n, kv, group, blocks, rows, length).masked_fill(~seen, -torch.inf)
            near = q @ k.unsqueeze(2).transpose(-1, -2)
            near = near.float().masked_fill(~causal, -torch.inf)
            weights = (torch.cat([far, near], -1) * d**-0.5).softmax(-1).to(dtype)
            out = weights[..., :length].reshape(n, kv, group * blocks * rows, length) @ far_v
            out = out.view(n, kv, group, blocks, rows, d) + weights[..., length:] @ v.unsqueeze(2)
            out = out.permute(0, 3, 4, 1, 2, 5).reshape(n, blocks, rows, c.n_head, d)
            out = out * F.softplus(gate.float()).unsqueeze(-1)
            x = x + F.linear(out.flatten(3), w[name + "self_attn.o_proj.weight"])
            m = rms_norm(x, w[name + "post_attention_layernorm.weight"], c.rms_eps)
            up = torch.cat([w[name + "mlp.gate_proj.weight"], w[name + "mlp.up_proj.weight"]])
            gate, up = F.linear(m, up).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, w[name + "mlp.down_proj.weight"])
        return rms_norm(x[:, :, 1:], w["norm.weight"], c.rms_eps)

    def block_input(self, anchor_tokens: Tensor, embedding: Tensor, rows: int) -> Tensor:
        """Embedded rows [N, K, rows, n_embd] for anchor ids [N, K]: the anchor, then masks."""
        masks = torch.full((*anchor_tokens.shape, rows - 1), self.config.mask_id)
        return F.embedding(torch.cat([anchor_tokens.unsqueeze(-1), masks], -1), embedding)

    def loss(
        self,
        features: Tensor,
        tokens: Tensor,
        labels: Tensor,
        valid: Tensor,
        anchors: Tensor,
        frozen: tuple[Tensor, Tensor, Tensor],
        soft: float,
        acceptance: Tensor,
        rows: int,
    ) -> tuple[Tensor, Tensor]:
        """Training loss, and the share of right first guesses and expected accepted rows as [2].

        features [N, S, A, n_embd]; tokens, labels [N, S]: the text and the target's greedy choice at each place;
        valid [N]: number of usable tokens; anchors [N, K]; frozen: the target's embedding, output norm and head;
        soft: weight of the target's distribution against its choice; acceptance: scalar 0..1, share of the row
        weights that follow the expected accepted prefix instead of exp(-(j-1)/6); rows: length of the blocks. A
        block is causal, so that short blocks train the first rows of long ones.
        """
        c = self.config
        embedding, out_norm, head = frozen
        n, blocks = anchors.shape
        y = self.draft(self.block_input(tokens.gather(1, anchors), embedding, rows), anchors, self.context(features))
        logits = F.linear(y, head).float()
        places = anchors[:, :, None] + torch.arange(1, rows)
        usable = places < valid[:, None, None]
        places = places.clamp_max(tokens.shape[1] - 1)
        flat = places.flatten(1)
        with torch.no_grad():
            teacher = F.linear(rms_norm(features[:, :, -1], out_norm, c.rms_eps), head).float().softmax(-1)
            teacher = teacher.to(torch.bfloat16)
            index = (flat - 1)[:, :, None].expand(-1, -1, c.n_vocab)
            probs = teacher.gather(1, index).view(n, blocks, -1, c.n_vocab)
        wanted = labels.gather(1, flat).view(n, blocks, -1)
        log_z = logits.logsumexp(-1)
        hard = logits.gather(-1, wanted.unsqueeze(-1)).squeeze(-1)
        cost = log_z - (1 - soft) * hard - soft * (probs * logits).sum(-1)
        with torch.no_grad():
            fade = torch.exp(-torch.arange(rows - 1) / 6.0).expand_as(cost)
            chance = ((hard - log_z) * 0.5).cumsum(-1).exp() * usable
            reach = chance.flip(-1).cumsum(-1).flip(-1)
            reach = reach / reach.mean().clamp_min(1e-6) * fade.mean()
            weight = ((1 - acceptance) * fade + acceptance * reach) * usable
            hit = ((logits.argmax(-1) == wanted) & usable).float()
            seen = usable[..., 0].sum().clamp_min(1)
            stats = torch.stack([hit[..., 0].sum() / seen, hit.cumprod(-1).sum() / seen])
        return (cost * weight).sum() / weight.sum().clamp_min(1e-6), stats
