"""The all-layer scorer: the highest attention of the query rows to each token over heads and layers.

The older scorer of both drafter families. With Qwen3.5 it reads queries and keys after RoPE, with Qwen3-0.6B those
before it. It runs every block up to the last attention, keeps no sessions and takes one window, the query.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from laguna_gguf import _native
from laguna_gguf.errors import ScorerError
from laguna_gguf.pflash.drafter_file import DrafterFile
from laguna_gguf.pflash.exclusive import Exclusive
from laguna_gguf.pflash.llama import LlamaContext, LlamaModel
from laguna_gguf.pflash.scorer import Progress, Scores, check_request

MAX_QWEN3_TOKENS = 32768
"""Qwen3-0.6B was trained for this much, and its keys take 57 kB a token."""


class RunningMaxScorer:
    """Importance of tokens; not for several threads at once: calls wait for one another."""

    def __init__(self, file: DrafterFile, model: LlamaModel) -> None:
        """model: the loaded drafter, shared with the trunk. Memory for a context is taken at the first call."""
        layers = [layer for layer, full in enumerate(file.full_attention) if full]
        self._capture = _native.AttentionCapture(
            layers, file.n_head, file.n_head_kv, file.head_dim, file.arch == "qwen35"
        )
        self._capture.enabled = True
        self._model = model
        limit = min(file.context_length, MAX_QWEN3_TOKENS) if file.arch == "qwen3" else file.context_length
        self._context = LlamaContext(model, self._capture, 1, limit)
        if file.arch == "qwen3":
            self._context.limit = min(self._context.limit, MAX_QWEN3_TOKENS)
        self._lock = Exclusive()

    def close(self) -> None:
        """Free the context, when a call of another thread is done."""
        with self._lock:
            self._context.close()

    def score(self, ids: NDArray[np.int32], *, query: Sequence[int], progress: Progress | None = None) -> Scores:
        """`mass` [n] is the importance: per query row and token the maximum, mean over rows, average over 13 tokens.

        QueryError for a query that cannot ask, ConfigError for a prompt that is too long, ScorerError when values are
        not finite a second time.
        """
        request = check_request(ids, query, (), False)
        with self._lock:
            self._context.reserve(len(ids))
            began = perf_counter()
            try:
                importance = self._run(request.ids, request.windows[0][:2], progress)
            except ScorerError:
                importance = self._run(request.ids, request.windows[0][:2], progress)
            finally:
                self._context.clear(0)
                self._capture.begin(0, 0)  # the keys of all layers are large
            forward_ms = (perf_counter() - began) * 1e3
        return Scores(importance.astype(np.float64), None, None, 0, len(ids), forward_ms, is_importance=True)

    def _run(self, ids: NDArray[np.int32], query: tuple[int, int], progress: Progress | None) -> NDArray[np.float32]:
        context = self._context
        context.clear(0)
        self._capture.begin(*query)
        for piece in np.array_split(ids, -(-len(ids) // context.rows)):
            self._capture.next_batch()
            context.decode(0, piece)
            if progress is not None:
                progress(context.positions[0], len(ids))
        return _native.running_max(self._capture, self._model.options.threads, self._model.device)
