"""The llama.cpp side: what a target is, decoding with hidden capture, and rolling back without silent loss."""

from __future__ import annotations

import ctypes
import logging
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any, Protocol

import llama_cpp
import numpy as np
from numpy.typing import NDArray

from laguna_gguf import _native
from laguna_gguf.errors import CheckpointError, DecodeError, RollbackError, TargetMismatchError

ARCHITECTURE = "laguna"
DRAFTER_ARCHITECTURES = ("dflash", "dflash-draft", "eagle3")


class HasModel(Protocol):
    """A `llama_cpp.Llama`, or anything else that holds a live llama_model."""

    @property
    def model(self) -> Any: ...


def check_target_file(path: str | os.PathLike[str]) -> None:
    """Refuse what is not a Laguna target before llama.cpp loads it.

    Raises CheckpointError for a missing or damaged file, TargetMismatchError for a drafter or another architecture.
    """
    if not os.path.isfile(path):  # unlike Path.is_file, False for any name that cannot exist
        raise CheckpointError(f"target model not found: {path}; needed a GGUF file")
    file = _native.GgufFile(str(path))
    architecture = file.get("general.architecture")
    if architecture in DRAFTER_ARCHITECTURES:
        raise TargetMismatchError(
            f"{path} is a drafter (architecture {architecture!r}), not a target: it has no embeddings and cannot run "
            "alone. Give it as the draft model and a Laguna model as the target"
        )
    if architecture != ARCHITECTURE:
        raise TargetMismatchError(f"{path} has architecture {architecture!r}; needed {ARCHITECTURE!r}")
    tokens = file.get("tokenizer.ggml.tokens", [])
    if len(set(tokens)) != len(tokens) or any("\0" in token for token in tokens):
        raise CheckpointError(f"{path}: tokenizer.ggml.tokens has repeated tokens or null bytes; the file is damaged")


@contextmanager
def quiet_llama_cpp() -> Iterator[None]:
    """llama_cpp's log handler shows errors only, as with Llama(verbose=False)."""
    logger = logging.getLogger("llama-cpp-python")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def model_address(model: Any) -> int:
    """Address of the llama_model behind a llama_cpp pointer."""
    address = ctypes.cast(model, ctypes.c_void_p).value
    if not address:
        raise TargetMismatchError("the target model is closed")
    return address


def model_shape(model: Any) -> tuple[int, int, int]:
    """(layers, width, vocabulary) of a loaded model."""
    model_address(model)
    vocabulary = llama_cpp.llama_model_get_vocab(model)
    return (
        llama_cpp.llama_model_n_layer(model),
        llama_cpp.llama_model_n_embd(model),
        llama_cpp.llama_vocab_n_tokens(vocabulary),
    )


class TargetModel:
    """A target's weights without a context, mapped from its file: enough to draft against."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        check_target_file(path)
        llama_cpp.llama_backend_init()
        with quiet_llama_cpp():
            model = llama_cpp.llama_model_load_from_file(os.fsencode(path), llama_cpp.llama_model_default_params())
        if model is None:
            raise CheckpointError(f"llama.cpp cannot load {path}")
        self.model = model
        self._finalizer = weakref.finalize(self, llama_cpp.llama_model_free, model)


class TargetContext:
    """Decoding on sequence 0 of a llama_context, with the capture of hidden rows."""

    def __init__(self, llama: llama_cpp.Llama, capture: _native.HiddenCapture) -> None:
        self._context = llama.ctx
        self._memory = llama_cpp.llama_get_memory(llama.ctx)
        self._capture = capture
        self.n_vocab = llama.n_vocab()
        self.n_batch = llama.n_batch
        self.n_ubatch = int(llama.context_params.n_ubatch)
        self.n_swa = llama_cpp.llama_model_n_swa(llama.model)
        self.n_layer = llama_cpp.llama_model_n_layer(llama.model)
        self.position = 0
        """Positions 0..position-1 are in the KV cache."""
        self.n_logits = 0
        """Trailing rows of the last decode that have logits."""
        self.decode_ms = 0.0
        """Time in llama_decode so far, the capture callback taken out."""
        self._batch = llama_cpp.llama_batch_init(self.n_batch, 0, 1)
        self._finalizer = weakref.finalize(self, llama_cpp.llama_batch_free, self._batch)
        self._tokens = np.ctypeslib.as_array(self._batch.token, (self.n_batch,))
        self._positions = np.ctypeslib.as_array(self._batch.pos, (self.n_batch,))
        self._flags = np.ctypeslib.as_array(self._batch.logits, (self.n_batch,))
        for i in range(self.n_batch):
            self._batch.n_seq_id[i] = 1
            self._batch.seq_id[i][0] = 0

    def decode(
        self, tokens: NDArray[np.intc], *, all_logits: bool = False, last_logits: bool = True, stop: bool = False
    ) -> None:
        """Run at most n_batch tokens at `.position`; captured rows of this decode replace earlier ones.

        all_logits flags every row, last_logits only the last one. stop ends the graph after the last captured layer:
        the KV cache is filled, logits are not computed. Raises DecodeError; then nothing of these tokens is kept.
        """
        n = len(tokens)
        self._batch.n_tokens = n
        self._tokens[:n] = tokens
        self._positions[:n] = np.arange(self.position, self.position + n)
        self._flags[:n] = all_logits
        if last_logits:
            self._flags[n - 1] = 1
        capture = self._capture
        capture.begin()
        capture.stop_after_last = stop
        llama_cpp.llama_memory_seq_rm(self._memory, 0, self.position, -1)  # what an interrupt may have left
        started, callback_ms = perf_counter(), capture.ms
        code = None
        try:
            code = llama_cpp.llama_decode(self._context, self._batch)
        finally:
            if code != 0:  # an interrupt may come between the call and its result: take the rows back then, too
                llama_cpp.llama_memory_seq_rm(self._memory, 0, self.position, -1)
        self.decode_ms += (perf_counter() - started) * 1e3 - (capture.ms - callback_ms)
        if code != 0:
            why = {1: "the context has no free cells", 2: "aborted"}.get(code, "see llama.cpp's log")
            raise DecodeError(f"llama_decode returned {code} for {n} tokens at position {self.position}: {why}")
        self.position += n
        self.n_logits = 0 if stop else n if all_logits else int(last_logits)

    def logits(self, row: int) -> NDArray[np.float32]:
        """Logits [n_vocab] of a flagged row of the last decode, a view that the next decode overwrites."""
        return np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(self._context, row), (self.n_vocab,))

    def all_logits(self, n_rows: int) -> NDArray[np.float32]:
        """Logits [n_rows, n_vocab] of a decode whose rows were all flagged, a view that the next decode overwrites."""
        return np.ctypeslib.as_array(llama_cpp.llama_get_logits(self._context), (n_rows, self.n_vocab))

    def rollback(self, position: int) -> bool:
        """Forget positions >= `position`. False when a sliding-window layer has lost keys that a next token would see.

        llama.cpp reports success in that case too (the keys were overwritten earlier), but the lowest position that it
        still holds tells. After False the sequence is only good for clear().
        """
        if position == self.position:
            return True
        if position > self.position:
            raise RollbackError(f"cannot roll back to position {position}: only {self.position} are evaluated")
        if position == 0:
            self.clear()
            return True
        self.position = position  # first: an interrupt must not leave it beyond what is there
        if not llama_cpp.llama_memory_seq_rm(self._memory, 0, position, -1):
            return False
        if self.n_swa <= 0:
            return True
        lowest = llama_cpp.llama_memory_seq_pos_min(self._memory, 0)
        return 0 <= lowest <= max(0, position - self.n_swa + 1)  # -1: the sliding layers hold nothing at all

    def restored(self, position: int) -> bool:
        """The KV cache was replaced by a saved one: keep positions below `position`, the only ones that count.

        False when the cache does not hold them all; the sequence is then only good for clear().
        """
        self.position = llama_cpp.llama_memory_seq_pos_max(self._memory, 0) + 1
        return self.position >= position and self.rollback(position)

    def clear(self) -> None:
        """Forget everything."""
        self.position = 0
        llama_cpp.llama_memory_clear(self._memory, True)
