"""Counting tokens as the target does."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from operator import index
from typing import Any

import llama_cpp

from laguna_gguf.errors import CheckpointError, ConfigError
from laguna_gguf.llama_text import tokenizable
from laguna_gguf.pflash.families import family_of_tokenizer
from laguna_gguf.pflash.llama import llama_log, utf8

CountTokens = Callable[[str], int]


def token_counter(target: Any) -> CountTokens:
    """text -> number of target tokens, from a GGUF path (only its vocabulary is loaded), a Llama, or a callable.

    CheckpointError for a file that cannot be read, ConfigError for anything else.
    """
    if isinstance(target, llama_cpp.Llama):
        return lambda text: len(target.tokenize(tokenizable(utf8(text)), add_bos=False, special=True))
    if isinstance(target, str | os.PathLike):
        return _Vocabulary(target).count
    if callable(target):
        return lambda text: _checked(target(text))
    raise ConfigError(f"target is {target!r}; needed a GGUF path, a llama_cpp.Llama or a callable text -> token count")


def target_family(target: Any, count: CountTokens) -> str | None:
    """Name of the family of chat templates whose control strings are single tokens of the target. None: of no family,
    or a callable, whose unit need not be the tokens of a vocabulary."""
    if not isinstance(target, llama_cpp.Llama | str | os.PathLike):
        return None
    return family_of_tokenizer(lambda text: range(count(text)))


class _Vocabulary:
    def __init__(self, path: str | os.PathLike[str]) -> None:
        if not os.path.isfile(path):
            raise CheckpointError(f"target not found: {path}; needed a GGUF file")
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        params.vocab_only = True
        with llama_log(False):
            model = llama_cpp.llama_model_load_from_file(os.fsencode(path), params)
        if not model:
            raise CheckpointError(f"llama.cpp cannot load the vocabulary of {path}")
        self._finalizer = weakref.finalize(self, llama_cpp.llama_model_free, model)
        self._vocab = llama_cpp.llama_model_get_vocab(model)

    def count(self, text: str) -> int:
        data = tokenizable(utf8(text))
        # without room for the tokens it answers with minus their number
        return -llama_cpp.llama_tokenize(self._vocab, data, len(data), (llama_cpp.llama_token * 1)(), 0, False, True)


def _checked(count: Any) -> int:
    try:
        number = index(count)
    except TypeError:
        number = -1
    if number < 0:
        raise ConfigError(f"the target's token counter returned {count!r}; needed a whole number >= 0")
    return number
