"""The drafter as Python sees it: configuration, argument checks, and the native computation behind them."""

from __future__ import annotations

import operator
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from laguna_gguf import _native
from laguna_gguf.dflash.arguments import check_llama_keywords
from laguna_gguf.dflash.checkpoint import Checkpoint, read_checkpoint
from laguna_gguf.dflash.config import DrafterConfig
from laguna_gguf.dflash.target import HasModel, TargetModel, model_address, model_shape
from laguna_gguf.errors import ConfigError, RollbackError, TargetMismatchError
from laguna_gguf.paths import path_argument

if TYPE_CHECKING:
    from llama_cpp import Llama

MAX_POSITION = 2**31 - 1
"""llama.cpp counts positions in int32."""

WINDOWS = ("per_query", "anchored")
"""How far a block row sees back: W-1 keys before itself, or before the anchor for every row."""


@dataclass(frozen=True)
class DraftBlock:
    """What one drafting pass proposes.

    tokens: int32 [n], the argmax of each row (lowest id on ties).
    logits: float32 [n, n_vocab], or None when they were not asked for.
    """

    tokens: NDArray[np.int32]
    logits: NDArray[np.float32] | None


class Drafter:
    """A Laguna DFlash drafter with its context. Made by `load_drafter`.

    Computation: docs/dflash.md; not safe for calls from several threads at once.
    """

    def __init__(self, checkpoint: Checkpoint, *, n_threads: int | None = None, device: str = "") -> None:
        self._config = checkpoint.config
        check_llama_keywords({"n_threads": n_threads})
        n_threads = n_threads or max((os.cpu_count() or 2) // 2, 1)  # llama_cpp.Llama's default
        self._native = _native.Drafter(checkpoint.config.as_dict(), checkpoint.native_tensors(), n_threads, device)
        self._target: Any = None  # keeps the model whose tensors the native half reads alive

    @property
    def config(self) -> DrafterConfig:
        return self._config

    @property
    def position(self) -> int:
        """Next absolute position of the context."""
        return self._native.position

    @property
    def n_rows(self) -> int:
        """Context rows held without a gap before `.position`."""
        return self._native.n_rows

    @property
    def has_target(self) -> bool:
        return self._native.has_target

    def unbind_target(self) -> None:
        """Forget the target; drafting raises TargetMismatchError from here on."""
        self._native.unbind_target()
        self._target = None

    def bind_target(self, target: HasModel) -> None:
        """Use the embedding rows and the output head of a live `llama_cpp.Llama` (no copy is made).

        Raises TargetMismatchError when layers, width or vocabulary differ from the drafter's.
        """
        self._config.validate_target(*model_shape(target.model))
        self._native.bind_target(model_address(target.model))
        self._target = target

    def limit_vocabulary(self, ids: NDArray[np.int32], ggml_type: int, rows: NDArray[np.uint8]) -> None:
        """Draft only these ids int32 [n], ascending. rows: uint8, their rows of the output head in its ggml type.

        Logits of all others are -inf. No ids: the whole vocabulary again, as after bind_target.
        """
        self._native.limit_vocabulary(ids.tolist(), ggml_type, rows)

    def append_context(self, features: NDArray[np.float32], start_position: int | None = None) -> None:
        """Add target positions to the context.

        features: float32 [n_rows, n_captured_layers, n_embd], residual rows in position order.
        start_position: None continues at `.position`; an empty drafter takes any start >= 0; anything else raises
        RollbackError. Wrong shapes or types raise ConfigError.
        """
        rows = np.asarray(features)
        needed = (len(self._config.target_layer_ids), self._config.hidden_size)
        if rows.dtype != np.float32 or rows.ndim != 3 or rows.shape[1:] != needed:
            raise ConfigError(
                f"features are {rows.dtype} {list(rows.shape)}; needed float32 [n_rows, {needed[0]}, {needed[1]}]"
            )
        if not np.isfinite(rows).all():
            raise ConfigError("features hold values that are not finite; needed finite float32")
        start = self.position if start_position is None else _position(start_position)
        self._native.append(np.ascontiguousarray(rows), start)

    def append_captured(
        self, capture: _native.HiddenCapture, n_rows: int, start_position: int, *, deferred: bool = False
    ) -> None:
        """`append_context` with the first n_rows rows that a capture holds, without a copy through Python.

        deferred: they are computed with the next draft, or when 128 have come together.
        """
        self._native.append_captured(capture, 0, n_rows, start_position, deferred)

    def flush(self) -> None:
        """Compute the deferred rows now."""
        self._native.flush()

    def draft(self, anchor_token: int, n: int, *, window: str | None = None, return_logits: bool = False) -> DraftBlock:
        """Propose the n tokens after the anchor (the newest token, at `.position`). Changes no state.

        n: 1..block_size-1. window: None or "per_query" (key p is visible to row j iff P+j-W < p), "anchored" (P-W < p).
        Raises ConfigError on bad arguments, TargetMismatchError without a target.
        """
        if window is not None and window not in WINDOWS:
            raise ConfigError(f"window is {window!r}; needed one of {', '.join(WINDOWS)}")
        if not 0 <= _integer("anchor token", anchor_token) < self._config.vocab_size:
            raise ConfigError(f"anchor token is {anchor_token}; needed 0..{self._config.vocab_size - 1}")
        if not 1 <= _integer("n", n) < self._config.block_size:
            raise ConfigError(f"n is {n}; needed 1..{self._config.block_size - 1} (block_size - 1)")
        if self.has_target and not self._target.model:  # closed: its tensors are gone
            self.unbind_target()
        if not self.has_target:
            raise TargetMismatchError(
                "drafting needs a target's embeddings and output head: load_drafter(..., target=...)"
            )
        return DraftBlock(*self._native.draft(int(anchor_token), int(n), window == "anchored", return_logits))

    def rollback(self, position: int) -> None:
        """Drop context rows at positions >= `position`.

        Raises RollbackError, changing nothing, outside [first position fed, .position] or when fewer context rows would
        be left than a fresh drafter would hold.
        """
        self._native.rollback(_position(position))

    def reset(self) -> None:
        """Empty context, position 0."""
        self._native.reset()

    def memory(self) -> dict[str, int]:
        """Bytes by use: weights, context_cache, compute."""
        return self._native.memory()


def _integer(name: str, value: int) -> int:
    try:
        return operator.index(value)
    except TypeError as error:
        raise ConfigError(f"{name} is {value!r}; needed an integer") from error


def _position(value: int) -> int:
    """A position that the native half can take; RollbackError otherwise."""
    position = _integer("position", value)
    if not 0 <= position < MAX_POSITION:
        raise RollbackError(f"position is {position}; needed 0..{MAX_POSITION - 1}")
    return position


def load_drafter(
    path: str | os.PathLike[str], *, target: str | os.PathLike[str] | Llama | None = None, n_threads: int | None = None
) -> Drafter:
    """Load a drafter from a GGUF file or a Hugging Face directory.

    target: a GGUF path or a live `llama_cpp.Llama`; needed to draft, since the drafter has neither embeddings nor an
    output head. The drafter's weights lie on the device of the target's output head (CPU without a target).
    Raises CheckpointError, ConfigError, TargetMismatchError.
    """
    checkpoint = read_checkpoint(path)
    if target is None:
        return Drafter(checkpoint, n_threads=n_threads)
    is_model = hasattr(target, "model")
    model: HasModel = target if is_model else TargetModel(path_argument("target", target))  # type: ignore[assignment]
    checkpoint.config.validate_target(*model_shape(model.model))
    drafter = Drafter(checkpoint, n_threads=n_threads, device=_native.output_device(model_address(model.model)))
    drafter.bind_target(model)
    return drafter
