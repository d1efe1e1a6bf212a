"""A drafter in llama.cpp: its model and vocabulary, and contexts of several sequences that decode with a callback.

llama_cpp's low-level functions, because `llama_cpp.Llama` has one sequence, one context and arrays for logits, none of
which fits here.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import llama_cpp
import numpy as np
from numpy.typing import NDArray

from laguna_gguf import _native
from laguna_gguf.errors import CheckpointError, ConfigError, DecodeError, OutOfMemoryError
from laguna_gguf.llama_text import tokenizable
from laguna_gguf.pflash.llama_options import LlamaOptions

_PARTIAL = 1  # LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY: recurrent state without the attention cache
_CONTEXT_STEP = 2048


class EvalCallback(Protocol):
    """A native eval callback."""

    @property
    def callback_address(self) -> int: ...
    @property
    def user_data_address(self) -> int: ...


class LlamaModel:
    """A loaded drafter: weights and vocabulary."""

    def __init__(self, path: str | os.PathLike[str], options: LlamaOptions) -> None:
        """CheckpointError when llama.cpp refuses the file."""
        self.path = path
        self.options = options
        llama_cpp.llama_backend_init()
        with llama_log(options.verbose):
            self._model = llama_cpp.llama_model_load_from_file(os.fsencode(path), options.model_params())
        if not self._model:
            raise CheckpointError(f"llama.cpp cannot load {path}; verbose=True shows its reasons")
        self._finalizer = weakref.finalize(self, llama_cpp.llama_model_free, self._model)
        self._lock = threading.Lock()  # llama_cpp lets other threads run during a call, also one that closes
        self._vocab = llama_cpp.llama_model_get_vocab(self._model)
        self._has_tokenizer = llama_cpp.llama_vocab_type(self._vocab) != llama_cpp.LLAMA_VOCAB_TYPE_NONE
        self._pieces: dict[int, bytes] = {}
        self.n_vocab: int = llama_cpp.llama_vocab_n_tokens(self._vocab)
        self.is_recurrent = bool(
            llama_cpp.llama_model_is_hybrid(self._model) or llama_cpp.llama_model_is_recurrent(self._model)
        )

    @property
    def handle(self) -> Any:
        """The llama_model pointer."""
        if not self._finalizer.alive:
            raise DecodeError("the drafter is closed")
        return self._model

    @property
    def device(self) -> str:
        """Registry name of the device that holds the output matrix."""
        return _native.output_device(ctypes.cast(self.handle, ctypes.c_void_p).value or 0)

    def close(self) -> None:
        with self._lock:
            self._finalizer()

    def check_vocabulary(self) -> None:
        """CheckpointError for a drafter without a tokenizer; llama.cpp would end the process."""
        self.handle  # noqa: B018  (raises when closed)
        if not self._has_tokenizer:
            raise CheckpointError(f"{self.path} has no tokenizer; only token ids can be scored with it")

    def tokenize(self, text: str | bytes) -> NDArray[np.int32]:
        """Token ids int32 [n]; control tokens are recognised, nothing is added. CheckpointError without a tokenizer."""
        if not isinstance(text, str | bytes):
            raise ConfigError(f"the text is {type(text).__name__}; needed str or bytes")
        data = tokenizable(utf8(text) if isinstance(text, str) else text)
        if len(data) >= 2**31:
            raise ConfigError(f"the text has {len(data)} bytes; at most 2^31 - 1 can be tokenized")
        tokens = (llama_cpp.llama_token * (len(data) + 1))()
        with self._lock:
            self.check_vocabulary()
            n = llama_cpp.llama_tokenize(self._vocab, data, len(data), tokens, len(tokens), False, True)
            if n < 0:  # more tokens than bytes: a vocabulary that adds something
                tokens = (llama_cpp.llama_token * -n)()
                n = llama_cpp.llama_tokenize(self._vocab, data, len(data), tokens, len(tokens), False, True)
        if n < 0:
            raise DecodeError("llama.cpp cannot tokenize the text")
        return np.ctypeslib.as_array(tokens)[:n].astype(np.int32)

    def pieces(self, ids: NDArray[np.int32]) -> list[bytes]:
        """UTF-8 bytes of each token, control tokens written out; a token may begin or end inside a character."""
        buffer = ctypes.create_string_buffer(256)
        known = self._pieces
        with self._lock:
            self.check_vocabulary()
            for token in set(ids.tolist()) - known.keys():
                n = llama_cpp.llama_token_to_piece(self._vocab, token, buffer, len(buffer), 0, True)
                if n < 0:
                    buffer = ctypes.create_string_buffer(-n)
                    n = llama_cpp.llama_token_to_piece(self._vocab, token, buffer, len(buffer), 0, True)
                known[token] = buffer.raw[:n]
        return [known[token] for token in ids.tolist()]

    def detokenize_bytes(self, ids: NDArray[np.int32]) -> bytes:
        """The pieces joined; nothing is cleaned up, so that the text of a prompt is exactly what was tokenized."""
        return b"".join(self.pieces(ids))

    def offsets(self, ids: NDArray[np.int32]) -> NDArray[np.int32]:
        """Byte at which each token begins, and the length of all, int32 [n + 1]."""
        return np.cumsum([0, *map(len, self.pieces(ids))], dtype=np.int32)

    def check_ids(self, ids: Any) -> NDArray[np.int32]:
        """Token ids as int32 [n], n >= 1; ConfigError otherwise."""
        self.handle  # noqa: B018
        if isinstance(ids, str | bytes | bytearray):
            raise ConfigError(f"ids are {type(ids).__name__}; needed a sequence of token ids")
        try:
            array = np.asarray(ids if isinstance(ids, np.ndarray) else list(ids))
        except (TypeError, ValueError, OverflowError) as error:
            raise ConfigError(f"ids are {type(ids).__name__}; needed a sequence of token ids") from error
        if array.size == 0:
            raise ConfigError("the prompt is empty; needed at least one token")
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise ConfigError(f"ids are {array.dtype} {list(array.shape)}; needed integers [n]")
        if not (array.min() >= 0 and array.max() < self.n_vocab):
            raise ConfigError(f"token ids must lie in 0..{self.n_vocab - 1}; found {array.min()}..{array.max()}")
        return np.ascontiguousarray(array, dtype=np.int32)


def _free_context(context: Any, model: LlamaModel) -> None:
    """`model` is an argument so that it lives until its contexts are gone, whatever a collection finds first."""
    llama_cpp.llama_free(context)


def utf8(text: str) -> bytes:
    """The text's bytes; ConfigError for lone surrogates that stand for no byte."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise ConfigError(f"the text has a lone surrogate at character {error.start}; needed valid Unicode") from error


class LlamaContext:
    """Sequences of tokens in llama.cpp's memory, decoded one micro-batch at a time with an eval callback.

    Memory is taken as it is needed, for longer prompts (without a configured n_ctx) and for more sequences, by making a
    new context; sequences are carried over. Never reads logits.
    """

    def __init__(self, model: LlamaModel, callback: EvalCallback, n_sequences: int, limit: int) -> None:
        """n_sequences: at most so many. limit: the longest prompt, in tokens, where n_ctx is not set."""
        self._model, self._callback, self.n_sequences = model, callback, n_sequences
        options = model.options
        self.limit = options.n_ctx or limit
        self.rows = min(options.rows, self.limit)
        self.positions = [0] * n_sequences
        """Tokens evaluated, by sequence."""
        self.n_ready = 0
        """Sequences there is memory for: none, the first, or all."""
        self._n_ctx = 0
        self._context: Any = None
        self._free: Any = weakref.finalize(self, lambda: None)
        self._batch = llama_cpp.llama_batch_init(self.rows, 0, 1)
        self._free_batch = weakref.finalize(self, llama_cpp.llama_batch_free, self._batch)
        self._tokens = np.ctypeslib.as_array(self._batch.token, (self.rows,))
        self._batch_positions = np.ctypeslib.as_array(self._batch.pos, (self.rows,))
        np.ctypeslib.as_array(self._batch.logits, (self.rows,))[:] = 0
        if options.n_ctx:
            self.reserve(options.n_ctx)

    @property
    def _memory(self) -> Any:
        return llama_cpp.llama_get_memory(self._context)

    def close(self) -> None:
        self._free()
        self._free_batch()
        self._context = None

    def check_length(self, n_tokens: int) -> None:
        """ConfigError for a prompt beyond `limit`, DecodeError after close()."""
        if not self._free_batch.alive:
            raise DecodeError("the drafter is closed")
        if n_tokens > self.limit:
            raise ConfigError(f"{n_tokens} tokens exceed the drafter's context of {self.limit}")

    def reserve(self, n_tokens: int, sequence: int = 0) -> None:
        """Make room for n_tokens in the first sequence, or in all of them when another one is wanted.

        ConfigError beyond `limit`; OutOfMemoryError leaves all as it was.
        """
        self.check_length(n_tokens)
        # not one after the other: llama.cpp carries a sequence over only where there are as many as before
        n_ready = max(self.n_ready, 1 if sequence == 0 else self.n_sequences)
        if n_tokens <= self._n_ctx and n_ready == self.n_ready:
            return
        n_ctx = self._n_ctx or _CONTEXT_STEP
        while n_ctx < n_tokens:
            n_ctx *= 2
        n_ctx = min(n_ctx, self.limit)
        context = self._new_context(n_ctx, n_ready)
        finalizer = weakref.finalize(self, _free_context, context, self._model)
        kept = [self._copied(context, sequence) for sequence in range(self.n_sequences)]
        self._free()
        self._context, self._free, self._n_ctx, self.n_ready = context, finalizer, n_ctx, n_ready
        self.positions = [position if whole else 0 for position, whole in zip(self.positions, kept, strict=True)]
        for sequence, whole in enumerate(kept):
            if not whole:
                self.clear(sequence)

    def _new_context(self, n_ctx: int, n_sequences: int) -> Any:
        params = self._model.options.context_params()
        params.n_ctx = n_ctx * n_sequences
        params.n_seq_max = params.n_outputs_max = n_sequences
        params.kv_unified = False
        address = self._callback.callback_address
        params.cb_eval = ctypes.cast(address, llama_cpp.llama_cpp.ggml_backend_sched_eval_callback)
        params.cb_eval_user_data = self._callback.user_data_address
        with llama_log(self._model.options.verbose):
            context = llama_cpp.llama_init_from_model(self._model.handle, params)
        if not context:
            raise OutOfMemoryError(
                f"llama.cpp cannot make a context of {n_sequences} sequences of {n_ctx} tokens (no memory, or "
                "settings that do not go together); a smaller n_ctx or fewer sessions need less"
            )
        return context

    def _copied(self, context: Any, sequence: int) -> bool:
        """Carry a sequence over to a new context."""
        if not self.positions[sequence]:
            return True
        size = llama_cpp.llama_state_seq_get_size(self._context, sequence)
        state = (ctypes.c_uint8 * size)()
        return (
            size > 0
            and llama_cpp.llama_state_seq_get_data(self._context, state, size, sequence) == size
            and llama_cpp.llama_state_seq_set_data(context, state, size, sequence) > 0
        )

    def decode(self, sequence: int, tokens: NDArray[np.int32]) -> None:
        """Evaluate at most `rows` tokens at the sequence's position. On any failure the sequence is emptied."""
        n, start = len(tokens), self.positions[sequence]
        self._batch.n_tokens = n
        self._tokens[:n] = tokens
        self._batch_positions[:n] = np.arange(start, start + n)
        for i in range(n):
            self._batch.n_seq_id[i] = 1
            self._batch.seq_id[i][0] = sequence
        code = None
        try:
            code = llama_cpp.llama_decode(self._context, self._batch)
        finally:
            if code != 0:
                self.clear(sequence)
        if code != 0:
            why = {1: "the context has no free cells", 2: "aborted"}.get(code, "see llama.cpp's log")
            raise DecodeError(f"llama_decode returned {code} for {n} tokens at position {start}: {why}")
        self.positions[sequence] = start + n

    def clear(self, sequence: int) -> None:
        """Forget a sequence."""
        self.positions[sequence] = 0
        if self._context is not None and sequence < self.n_ready:  # others would be an assertion in llama.cpp
            llama_cpp.llama_memory_seq_rm(self._memory, sequence, -1, -1)

    def save(self, sequence: int) -> bytes | None:
        """What it takes to come back to the present position: the recurrent state, None for models without one."""
        if not self._model.is_recurrent or self.positions[sequence] == 0:
            return None
        size = llama_cpp.llama_state_seq_get_size_ext(self._context, sequence, _PARTIAL)
        state = (ctypes.c_uint8 * size)()
        written = llama_cpp.llama_state_seq_get_data_ext(self._context, state, size, sequence, _PARTIAL)
        if written != size or size == 0:
            raise DecodeError(f"llama.cpp saved {written} of {size} bytes of a recurrent state")
        return bytes(state)

    def restore(self, sequence: int, position: int, state: bytes | None) -> None:
        """Take a sequence back to `position`, where `state` was saved. DecodeError empties it."""
        if position == 0:
            self.clear(sequence)
            return
        done = True
        if state is not None:
            buffer = (ctypes.c_uint8 * len(state)).from_buffer_copy(state)
            done = llama_cpp.llama_state_seq_set_data_ext(self._context, buffer, len(state), sequence, _PARTIAL) > 0
        done = done and llama_cpp.llama_memory_seq_rm(self._memory, sequence, position, -1)
        if not done or llama_cpp.llama_memory_seq_pos_max(self._memory, sequence) != position - 1:
            self.clear(sequence)
            raise DecodeError(f"llama.cpp could not take a sequence back to token {position}")
        self.positions[sequence] = position


@contextmanager
def llama_log(verbose: bool) -> Iterator[None]:
    """Everything that llama.cpp says, or nothing, while it loads; errors only afterwards, as with Llama(verbose=False).

    llama_cpp's handler goes by the level of this logger, but takes llama.cpp's warnings for errors: a file with blocks
    that are not used would fill the terminal.
    """
    logger = logging.getLogger("llama-cpp-python")
    logger.setLevel(logging.DEBUG if verbose else logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(logging.DEBUG if verbose else logging.ERROR)
