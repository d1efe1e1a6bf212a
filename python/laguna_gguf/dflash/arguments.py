"""What a session needs beside Llama's keywords: its micro-batch before loading, and what stands in after close()."""

from __future__ import annotations

from typing import Any

from laguna_gguf.errors import DecodeError
from laguna_gguf.llama_arguments import CACHE_TYPES, check_llama_keywords

__all__ = ["CACHE_TYPES", "Closed", "check_llama_keywords", "micro_batch"]


def micro_batch(keywords: dict[str, Any]) -> int:
    """The micro-batch size that Llama will use for these keywords, before the model is known."""
    sizes = [keywords.get("n_batch", 512), keywords.get("n_ubatch", 512)]
    n_ctx = keywords.get("n_ctx", 512)
    return min([*sizes, n_ctx] if n_ctx else sizes)


class Closed:
    """In place of what close() freed: any use is an error instead of a crash."""

    def __getattr__(self, name: str) -> Any:
        raise DecodeError("the session is closed")
