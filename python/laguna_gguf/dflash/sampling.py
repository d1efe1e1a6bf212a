"""The target's own sampler chain, with errors where llama.cpp would end the process or swallow an exception."""

from __future__ import annotations

import ctypes
import math
import re
from collections.abc import Callable, Iterable
from typing import Any

import llama_cpp
import numpy as np
from numpy.typing import NDArray

from laguna_gguf.errors import ConfigError, DecodeError

MAX_NESTING = 1000
"""Nested groups of a grammar; llama.cpp's parser recurses and overflows the stack somewhat beyond ten times that."""

_TOKEN_DATA = np.dtype([("id", np.intc), ("logit", np.single), ("p", np.single)])
_NO_GROUPS = re.compile(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|#[^\n]*', re.DOTALL)
"""Parts of a grammar in which parentheses do not group: literals, character classes, comments."""

_REPETITION = re.compile(r"\{\s*(\d{1,20})\s*,\s*(\d{1,20})\s*\}")

Processor = Callable[[NDArray[np.intc], NDArray[np.single]], NDArray[np.single]]


class Callbacks:
    """Logits processors as one that keeps the first exception: ctypes would print it and go on without them."""

    def __init__(self, processors: Iterable[Processor]) -> None:
        self._processors = processors
        self._error: BaseException | None = None

    def __call__(self, input_ids: NDArray[np.intc], logits: NDArray[np.single]) -> NDArray[np.single]:
        try:
            for processor in self._processors:
                logits[:] = processor(input_ids, logits)
        except BaseException as error:
            self._error = error
        return logits

    def raise_error(self) -> None:
        """Raise what a processor raised in the last call."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error


class SafeSampler:
    """A llama_cpp sampler chain whose `sample` checks the choice before the chain is told of it.

    A grammar that is told of a token it does not allow ends the process; that happens when nothing is left to choose.
    """

    def __init__(self, chain: Any, callbacks: Callbacks, n_vocab: int) -> None:
        self._chain = chain  # owns the samplers
        self._callbacks = callbacks
        self._candidates = np.empty(n_vocab, _TOKEN_DATA)
        self._data = self._candidates.ctypes.data_as(llama_cpp.llama_token_data_p)

    def sample(self, context: Any, row: int = -1) -> int:
        """The next token from the logits of a flagged row of the last decode.

        Raises what a logits processor raised, and DecodeError when every token is excluded.
        """
        candidates = self._candidates
        n = len(candidates)
        candidates["id"] = np.arange(n)
        candidates["logit"] = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(context.ctx, row), (n,))
        candidates["p"] = 0
        array = llama_cpp.llama_token_data_array(data=self._data, size=n, selected=-1, sorted=False)
        llama_cpp.llama_sampler_apply(self._chain.sampler, ctypes.byref(array))
        self._callbacks.raise_error()
        chosen = array.data[array.selected] if 0 <= array.selected < array.size else None
        if chosen is None or not chosen.logit > -math.inf:  # not <=: a NaN is no choice either
            raise DecodeError(
                "no token is left to sample: grammar, logit bias and logits processors exclude all of them (or a "
                "processor returned values that are not numbers)"
            )
        llama_cpp.llama_sampler_accept(self._chain.sampler, chosen.id)
        return int(chosen.id)


def check_grammar(model: Any, grammar: Any) -> None:
    """Raise ConfigError for a grammar that llama.cpp cannot parse; it would be used all the same, and crash."""
    if not isinstance(grammar, llama_cpp.LlamaGrammar):
        raise ConfigError(f"grammar is {type(grammar).__name__}; needed a llama_cpp.LlamaGrammar")
    text, root = grammar._grammar, grammar._root
    bare = _NO_GROUPS.sub("", text)
    for low, high in _REPETITION.findall(bare):
        if int(high) < int(low):  # llama.cpp counts down from 2**64
            raise ConfigError(f"the grammar repeats {{{low},{high}}}; needed the smaller number first")
    depth = deepest = 0
    for bracket in re.findall("[()]", bare):
        depth += 1 if bracket == "(" else -1
        deepest = max(deepest, depth)
    if deepest > MAX_NESTING:
        raise ConfigError(f"the grammar nests {deepest} groups; llama.cpp's parser is good for {MAX_NESTING}")
    vocabulary = llama_cpp.llama_model_get_vocab(model)
    sampler = llama_cpp.llama_sampler_init_grammar(vocabulary, text.encode(), root.encode())
    if not sampler:  # a null pointer
        raise ConfigError(
            f"llama.cpp cannot parse the grammar (root rule {root!r}); its log on stderr says where: {text[:200]!r}"
        )
    llama_cpp.llama_sampler_free(sampler)


class JoinedProcessors(llama_cpp.LogitsProcessorList):
    """Logits processors that Llama can add a logit bias to: it uses the result of `extend`, which a list has not."""

    def extend(self, more: Iterable[Processor]) -> JoinedProcessors:  # type: ignore[override]
        """A new list; the caller's stays as it is."""
        return JoinedProcessors([*self, *more])


def check_logit_bias(logit_bias: Any, n_vocab: int) -> None:
    """Raise ConfigError for a bias on tokens that do not exist; numpy would count negative ids from the end."""
    for key in logit_bias or ():
        try:
            token = int(key)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"logit_bias has the key {key!r}; needed a token id") from error
        if not 0 <= token < n_vocab:
            raise ConfigError(f"logit_bias has the token id {token}; needed 0..{n_vocab - 1}")
