"""Checks of what callers give a session, beside those of llama_arguments.py, and what stands in after close()."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable
from typing import Any

import llama_cpp
import numpy as np
from llama_cpp.llama_chat_format import Llava15ChatHandler, MTMDChatHandler
from numpy.typing import NDArray

from laguna_gguf.errors import ConfigError, DecodeError
from laguna_gguf.llama_arguments import CACHE_TYPES, check_llama_keywords

__all__ = [
    "CACHE_TYPES",
    "Closed",
    "check_chat_handler",
    "check_keywords_allowed",
    "check_keywords_known",
    "check_llama_keywords",
    "micro_batch",
    "token_ids",
]

_FORMER_KEYWORDS = ("f16_kv", "low_vram", "mul_mat_q", "n_gqa", "rms_norm_eps")
"""Keywords of earlier releases of Llama that it ignores now; LangChain and llama_cpp.server still pass some."""

_NOT_IN_A_SESSION = {
    "draft_model": "a SpecSession drafts already, from its second argument: SpecSession(model_path, draft_model_path) "
    "takes the place of Llama(model_path, draft_model=...) (docs/session.md, Coming from draft_model). Without a "
    "Laguna DFlash drafter, stay with llama_cpp.Llama",
    "embedding": "a context for embeddings cannot generate; use a llama_cpp.Llama beside the session",
    "vocab_only": "a session needs the model's weights; use llama_cpp.Llama for the vocabulary alone",
}


def check_keywords_known(keywords: Iterable[str], own: Iterable[str]) -> None:
    """Raise ConfigError for a keyword that is neither Llama's nor one of `own`: Llama itself swallows misspelt ones."""
    known = {*inspect.signature(llama_cpp.Llama).parameters, *own} - {"kwargs"}
    for name in keywords:
        if name in known or name in _FORMER_KEYWORDS:
            continue
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise ConfigError(f"{name} is no keyword of SpecSession or llama_cpp.Llama{hint}")


def check_keywords_allowed(keywords: dict[str, Any]) -> None:
    """Raise ConfigError for uses of Llama that a session refuses, with what to do instead."""
    for name, why in _NOT_IN_A_SESSION.items():
        if keywords.get(name):
            raise ConfigError(f"{name} cannot be used here: {why}")


def check_chat_handler(handler: Any) -> None:
    """Raise ConfigError for a multimodal handler: it writes to llama.cpp's context behind the session's back."""
    if isinstance(handler, (Llava15ChatHandler, MTMDChatHandler)):
        raise ConfigError(
            f"chat_handler is a {type(handler).__name__}; Laguna models read text only, and a multimodal handler would "
            "evaluate images behind the session's back. Use a handler that calls create_completion"
        )


def token_ids(tokens: Any, n_vocab: int) -> NDArray[np.intc]:
    """A sequence of ids as an array. Raises ConfigError for anything else, and for ids outside the vocabulary."""
    try:
        array = np.asarray(tokens if isinstance(tokens, np.ndarray) else list(tokens))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"tokens are {type(tokens).__name__}; needed a sequence of token ids") from error
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ConfigError(f"tokens are {array.dtype} {list(array.shape)}; needed a sequence of token ids")
    if array.size and not (array.min() >= 0 and array.max() < n_vocab):
        raise ConfigError(f"token ids must lie in 0..{n_vocab - 1}; found {array.min()}..{array.max()}")
    return array.astype(np.intc)


def micro_batch(keywords: dict[str, Any]) -> int:
    """The micro-batch size that Llama will use for these keywords, before the model is known."""
    sizes = [keywords.get("n_batch", 512), keywords.get("n_ubatch", 512)]
    n_ctx = keywords.get("n_ctx", 512)
    return min([*sizes, n_ctx] if n_ctx else sizes)


class Closed:
    """In place of what close() freed: any use is an error instead of a crash."""

    def __getattr__(self, name: str) -> Any:
        raise DecodeError("the session is closed")
