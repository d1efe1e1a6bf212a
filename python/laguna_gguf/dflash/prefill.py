"""A session's prompts before they are evaluated, where a compressor shortens them.

The compressor is an object that the user gives; nothing here knows how it works.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import llama_cpp

from laguna_gguf.errors import ConfigError

SESSION = "spec_session"
"""Name under which a session's prompts are scored unless it is given another."""


class ShortPrompt(Protocol):
    """What is left of a prompt."""

    @property
    def text(self) -> str: ...
    @property
    def is_whole(self) -> bool:
        """Whether nothing was left out because the prompt is not to be compressed."""

    @property
    def timings(self) -> Mapping[str, Any]: ...


class PromptCompressor(Protocol):
    """Shortens prompts as a policy says. An error means that the prompt must not be used."""

    def compress(self, prompt: str, *, target_n_ctx: int, max_tokens: int, **options: Any) -> ShortPrompt: ...
    def accepted(self, acceptance: float) -> None:
        """Share of the drafts that were accepted after the last prompt."""


class Compression(Protocol):
    """Makes compressors, such as `laguna_gguf.PFlash`."""

    def prefill(
        self, *, compression: str, threshold: int, keep_ratio: float, curve: Any, target: Any
    ) -> PromptCompressor: ...


def make_compressor(
    pflash: Compression | None, *, compression: str, threshold: int, keep_ratio: float, curve: Any, model_path: str
) -> PromptCompressor | None:
    """None where nothing is to be compressed. ConfigError for options that do not fit."""
    if pflash is None:
        if compression != "off":
            raise ConfigError(f"prefill_compression is {compression!r} without a pflash; give a PFlash as well, or off")
        return None
    if not callable(getattr(pflash, "prefill", None)):
        raise ConfigError(f"pflash is {pflash!r}; needed a laguna_gguf.PFlash")
    compressor = pflash.prefill(
        compression=compression, threshold=threshold, keep_ratio=keep_ratio, curve=curve, target=model_path
    )
    return None if compression == "off" else compressor


def shorten(
    session: llama_cpp.Llama,
    compressor: PromptCompressor,
    prompt: str | list[int],
    *,
    options: Mapping[str, Any],
    max_tokens: int | None,
) -> tuple[str | list[int], ShortPrompt]:
    """The prompt to evaluate, and what the compressor said. Tokens come from a chat handler, which made them of text;
    a BOS token in front stays there."""
    n_ctx = session.n_ctx()
    limited = max_tokens is not None and max_tokens > 0
    options = {"session": SESSION, **options}
    output = min(max_tokens or 0, n_ctx // 2) if limited else n_ctx // 8
    if isinstance(prompt, str):
        short = compressor.compress(prompt, **options, target_n_ctx=n_ctx, max_tokens=output)
        return (prompt if short.is_whole else short.text), short
    front = prompt[:1] if prompt[:1] == [session.token_bos()] else []
    text = session.detokenize(prompt[len(front) :], special=True).decode("utf-8", "surrogateescape")
    short = compressor.compress(text, **options, target_n_ctx=n_ctx, max_tokens=output + len(front))
    if short.is_whole:
        return prompt, short
    tokens = session.tokenize(short.text.encode("utf-8", "replace"), add_bos=False, special=True)
    return front + tokens, short
