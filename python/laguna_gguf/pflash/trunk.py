"""The drafter's trunk: blocks 0..14 in llama.cpp, stopped behind the tap (block 12 for Qwen3-0.6B)."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from laguna_gguf import _native
from laguna_gguf.errors import CaptureError, ScorerError
from laguna_gguf.pflash.drafter_file import DrafterFile
from laguna_gguf.pflash.llama import LlamaContext, LlamaModel
from laguna_gguf.pflash.llama_options import LlamaOptions

Consume = Callable[[_native.HiddenCapture, int, int], None]
"""Called after each micro-batch with the capture that holds its tap rows, its first position and its length."""


class NonFiniteError(ScorerError):
    """The trunk produced a value that is not finite."""


class Trunk:
    """Runs tokens through the blocks before the scoring block and hands out the tap, one micro-batch at a time."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        n_sequences: int = 1,
        model: LlamaModel | None = None,
        **llama_kwargs: Any,
    ) -> None:
        """path: a drafter GGUF. n_sequences: prompts whose state is kept side by side, the first for `taps`.

        llama_kwargs as `llama_cpp.Llama`: n_gpu_layers, n_threads, n_ubatch, n_ctx, type_k, ... ; without n_ctx prompts
        up to the file's context_length are taken. `model`: already loaded, then llama_kwargs must be empty. Raises
        CheckpointError for a file that cannot be such a trunk, ConfigError for a setting.
        """
        self.file = DrafterFile(path)
        self.model = model or LlamaModel(path, LlamaOptions.from_keywords(llama_kwargs))
        self._capture = _native.HiddenCapture([self.file.block - 1], self.file.n_embd)
        self._capture.enabled = True
        self._capture.stop_after_last = self._capture.one_graph = True
        self.context = LlamaContext(self.model, self._capture, n_sequences, self.file.context_length)

    @property
    def limit(self) -> int:
        """Longest prompt in tokens."""
        return self.context.limit

    def close(self) -> None:
        self.context.close()
        self.model.close()

    def run(self, sequence: int, tokens: NDArray[np.int32], consume: Consume) -> None:
        """Evaluate tokens at the sequence's position.

        In pieces of nearly equal size: kernels for few rows round differently, so none is left with a few. Any error
        empties the sequence; NonFiniteError when a tap row holds a value that is not finite.
        """
        if len(tokens) == 0:
            return
        context, capture = self.context, self._capture
        done = False
        try:
            for piece in np.array_split(tokens, -(-len(tokens) // context.rows)):
                start, bad = context.positions[sequence], capture.n_nonfinite
                capture.begin()
                context.decode(sequence, piece)
                if capture.n_rows() != len(piece):
                    raise CaptureError(
                        f"block {self.file.block - 1} gave {capture.n_rows()} rows for {len(piece)} tokens; llama.cpp "
                        "did not build the graph that this package knows"
                    )
                if capture.n_nonfinite != bad:
                    raise NonFiniteError(
                        f"the drafter's block {self.file.block - 1} gave values that are not finite for tokens "
                        f"{start}..{start + len(piece)}"
                    )
                consume(capture, start, len(piece))
            done = True
        finally:
            if not done:
                context.clear(sequence)

    def taps(self, ids: Any) -> NDArray[np.float32]:
        """All tap rows of a text, float32 [n, n_embd]: what heads and probes are trained on.

        Uses (and empties) sequence 0. ConfigError for ids outside the vocabulary or more than fit; NonFiniteError.
        """
        tokens = self.model.check_ids(ids)
        self.context.reserve(len(tokens))
        taps = np.empty((len(tokens), self.file.n_embd), dtype=np.float32)

        def keep(capture: _native.HiddenCapture, start: int, n: int) -> None:
            taps[start : start + n] = capture.rows()[:, 0]

        self.context.clear(0)
        self.run(0, tokens, keep)
        self.context.clear(0)
        return taps
