"""What a drafter's GGUF says of itself, and the weights the scorer takes from it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from laguna_gguf import _native
from laguna_gguf.errors import CheckpointError

SCORING_BLOCK = {"qwen35": 15, "qwen3": 13}
"""Architecture -> the block whose query and key projections score. It is fed with the output of the block before it."""

_KINDS = {"qwen35": "Qwen3.5", "qwen3": "Qwen3"}


class DrafterFile:
    """Metadata of a drafter, checked to be one that can score; the file stays mapped."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """CheckpointError: no such file, damaged, of another architecture, too few blocks, or no full attention in
        the scoring block."""
        self.path = Path(path)
        if not self.path.is_file():
            raise CheckpointError(f"drafter not found: {path}; needed a GGUF file")
        self._file = _native.GgufFile(str(path))
        arch = self._file.get("general.architecture")
        if arch not in SCORING_BLOCK:
            raise CheckpointError(
                f"{path} has architecture {arch!r}; a drafter for prompt compression has "
                f"{' or '.join(repr(known) for known in SCORING_BLOCK)} (Qwen3.5 or Qwen3-0.6B)"
            )
        self.arch: str = arch
        self.block = SCORING_BLOCK[arch]
        self.n_layer = self._count("block_count") - self._count("nextn_predict_layers", 0)
        if self.n_layer <= self.block:
            raise CheckpointError(
                f"{path} has {self.n_layer} blocks; a {_KINDS[arch]} drafter needs at least {self.block + 1} blocks"
            )
        self.full_attention = self._full_attention()
        if not self.full_attention[self.block]:
            raise CheckpointError(
                f"{path}: block {self.block} is not a full-attention block, so there is nothing to score with"
            )
        self.n_embd = self._count("embedding_length")
        self.n_head = self._count("attention.head_count")
        self.n_head_kv = self._count("attention.head_count_kv", self.n_head)
        self.head_dim = self._count("attention.key_length", self.n_embd // self.n_head)
        self.context_length = self._count("context_length")
        eps = self._file.get(f"{arch}.attention.layer_norm_rms_epsilon")
        if not isinstance(eps, float) or not 0.0 < eps < 1.0:
            raise self._wrong(f"{arch}.attention.layer_norm_rms_epsilon", eps, "a number in (0, 1)")
        self.norm_eps = eps
        self._check_graph()

    def _check_graph(self) -> None:
        """What llama.cpp takes without a word and then hangs in or ends the process over."""
        n_rot = self._count("rope.dimension_count", self.head_dim)
        least = self.head_dim if self.arch == "qwen3" else 2
        if n_rot % 2 or not least <= n_rot <= self.head_dim:
            raise self._wrong(f"{self.arch}.rope.dimension_count", n_rot, f"an even number in {least}..{self.head_dim}")
        value_length = self._count("attention.value_length", self.head_dim)
        if value_length != self.head_dim:
            raise self._wrong(f"{self.arch}.attention.value_length", value_length, f"{self.head_dim}, as key_length")
        if self.is_recurrent:
            inner = self._count("ssm.state_size") * self._count("ssm.time_step_rank")
            if self._count("ssm.inner_size") != inner:
                raise self._wrong(f"{self.arch}.ssm.inner_size", self._count("ssm.inner_size"), f"{inner}, the heads'")
        for layer, full in enumerate(self.full_attention):
            for name in () if full else ("attn_qkv.weight", "attn_gate.weight"):
                if self._file.tensor(f"blk.{layer}.{name}") is None:
                    raise CheckpointError(f"{self.path}: tensor blk.{layer}.{name} is missing; the file is incomplete")

    @property
    def is_recurrent(self) -> bool:
        """Whether some blocks keep a state that cannot be taken back token by token."""
        return not all(self.full_attention)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes a token takes in llama.cpp's own cache, in f16."""
        return sum(self.full_attention) * 2 * 2 * self.n_head_kv * self.head_dim

    def scoring_weights(self) -> ScoringWeights:
        """Norms and projections of the scoring block. CheckpointError: missing, misshapen or not finite."""
        gates = 2 if self.arch == "qwen35" else 1
        prefix = f"blk.{self.block}."
        for name in ("attn_q.bias", "attn_k.bias"):
            if self._file.tensor(prefix + name) is not None:
                raise CheckpointError(f"{self.path}: tensor {prefix}{name}: the scorer knows projections without bias")
        q = self._matrix(prefix + "attn_q.weight", self.n_head * self.head_dim * gates)
        # rows of a head: its query, then (Qwen3.5) the gate of its output
        q = q.reshape(self.n_head, gates, self.head_dim, self.n_embd)[:, 0].reshape(-1, self.n_embd)
        return ScoringWeights(
            attn_norm=self._vector(prefix + "attn_norm.weight", self.n_embd),
            attn_q=np.ascontiguousarray(q),
            attn_k=self._matrix(prefix + "attn_k.weight", self.n_head_kv * self.head_dim),
            attn_q_norm=self._vector(prefix + "attn_q_norm.weight", self.head_dim),
            attn_k_norm=self._vector(prefix + "attn_k_norm.weight", self.head_dim),
        )

    def _matrix(self, name: str, n_rows: int) -> NDArray[np.float32]:
        return self._tensor(name, (self.n_embd, n_rows))

    def _vector(self, name: str, n: int) -> NDArray[np.float32]:
        return self._tensor(name, (n,)).reshape(-1)

    def _tensor(self, name: str, ne: tuple[int, ...]) -> NDArray[np.float32]:
        """float32 values [n_rows, n_per_row] of any ggml type."""
        tensor = self._file.tensor(name)
        if tensor is None:
            raise CheckpointError(f"{self.path}: tensor {name} is missing; the scorer needs it")
        if tensor.ne != ne:
            raise CheckpointError(f"{self.path}: tensor {name} has shape {list(tensor.ne)}; needed {list(ne)}")
        values = _native.dequantize(tensor.data(), tensor.ggml_type, ne[0])
        if not np.isfinite(values).all():
            raise CheckpointError(f"{self.path}: tensor {name} holds values that are not finite; the file is damaged")
        return values

    def _full_attention(self) -> tuple[bool, ...]:
        if self.arch == "qwen3":
            return (True,) * self.n_layer
        recurrent = self._file.get(f"{self.arch}.attention.recurrent_layers")
        if recurrent is not None:
            if not isinstance(recurrent, np.ndarray) or len(recurrent) < self.n_layer:
                raise self._wrong(
                    f"{self.arch}.attention.recurrent_layers", recurrent, f"{self.n_layer} values, one a block"
                )
            return tuple(not flag for flag in recurrent[: self.n_layer].tolist())
        interval = self._count("full_attention_interval", 4)
        return tuple((layer + 1) % interval == 0 for layer in range(self.n_layer))

    def _count(self, key: str, default: int | None = None) -> int:
        found = self._file.get(f"{self.arch}.{key}", default)
        if isinstance(found, np.ndarray) and found.ndim == 1 and len(found) > self.block:  # one value a block
            found = found[self.block].item()
        lowest = 0 if key == "nextn_predict_layers" else 1
        if isinstance(found, bool) or not isinstance(found, int) or not lowest <= found < 2**31:
            raise self._wrong(f"{self.arch}.{key}", found, f"a whole number >= {lowest}")
        return found

    def _wrong(self, key: str, found: Any, needed: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {key} is {found!r}; needed {needed}")


@dataclass(frozen=True)
class ScoringWeights:
    """What the scorer computes with, all float32; matrices [n_out, n_embd]."""

    attn_norm: NDArray[np.float32]
    attn_q: NDArray[np.float32]
    """[n_head * head_dim, n_embd]: query rows only."""
    attn_k: NDArray[np.float32]
    """[n_head_kv * head_dim, n_embd]"""
    attn_q_norm: NDArray[np.float32]
    attn_k_norm: NDArray[np.float32]
