"""A llama_cpp.Llama with hidden capture, decoding through llama.cpp's own batch calls.

It installs the callback by itself, so that the tests of capture do not depend on the package's session.
"""

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from numpy.typing import NDArray

from laguna_gguf._native import HiddenCapture
from tiny_models import TINY_TARGET

LAYERS = (1, 4, 7)
"""Layers that `tiny_drafter` captures."""


class CapturedLlama(llama_cpp.Llama):
    """A Llama whose context is created with the capture's callback in it."""

    def __init__(self, path: Path, capture: HiddenCapture | None, **kwargs: Any) -> None:
        self._capture = capture
        options = {"n_ctx": 512, "n_batch": 512, "n_threads": 1, "n_threads_batch": 1, "verbose": False}
        super().__init__(str(path), type_k=0, type_v=0, flash_attn=False, **(options | kwargs))

    @property
    def context_params(self) -> llama_cpp.llama_context_params:
        return self._context_params

    @context_params.setter
    def context_params(self, params: llama_cpp.llama_context_params) -> None:
        if self._capture is not None:
            params.cb_eval = type(params.cb_eval)(self._capture.callback_address)
            params.cb_eval_user_data = self._capture.user_data_address
        self._context_params = params

    def decode(self, tokens: Sequence[int], start: int, flagged: Sequence[bool]) -> NDArray[np.float32]:
        """One llama_decode of tokens at positions start...; returns the logits of the flagged rows."""
        batch = llama_cpp.llama_batch_init(len(tokens), 0, 1)
        try:
            batch.n_tokens = len(tokens)
            for i, token in enumerate(tokens):
                batch.token[i] = token
                batch.pos[i] = start + i
                batch.n_seq_id[i] = 1
                batch.seq_id[i][0] = 0
                batch.logits[i] = flagged[i]
            assert llama_cpp.llama_decode(self.ctx, batch) == 0
            rows = [
                np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(self.ctx, i), (self.n_vocab(),)).copy()
                for i in range(len(tokens))
                if flagged[i]
            ]
        finally:
            llama_cpp.llama_batch_free(batch)
        return np.stack(rows) if rows else np.zeros((0, self.n_vocab()), np.float32)

    def decode_all(self, tokens: Sequence[int], start: int = 0) -> NDArray[np.float32]:
        """One llama_decode with every row flagged."""
        return self.decode(tokens, start, [True] * len(tokens))

    def kv_bytes(self) -> bytes:
        """The KV cache of the sequence, as llama.cpp serialises it."""
        size = llama_cpp.llama_state_seq_get_size(self.ctx, 0)
        buffer = (ctypes.c_uint8 * size)()
        assert llama_cpp.llama_state_seq_get_data(self.ctx, buffer, size, 0) == size
        return bytes(buffer)


def new_capture(layers: Sequence[int] = LAYERS, n_embd: int = TINY_TARGET.n_embd) -> HiddenCapture:
    """An enabled capture."""
    capture = HiddenCapture(list(layers), n_embd)
    capture.enabled = True
    return capture


def prompt(n_tokens: int, seed: int = 0) -> list[int]:
    """Random token ids."""
    return np.random.default_rng(seed).integers(0, TINY_TARGET.n_vocab, n_tokens).tolist()
