"""One generation with a session: tokens out, time measured, text passed on as it comes."""

import ctypes
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import llama_cpp

from laguna_gguf.commands.output import TokenWriter
from laguna_gguf.dflash.session import SpecSession
from laguna_gguf.errors import ConfigError


@dataclass(frozen=True)
class Generation:
    """What one run produced. Times are in milliseconds and leave out the printing."""

    prompt_n: int
    tokens: list[int]
    text: str
    finish_reason: str
    prompt_ms: float
    """Until the first token."""
    predicted_ms: float
    """From the first token to the last."""

    @property
    def tokens_per_second(self) -> float:
        """Tokens after the first, over the time they took."""
        return 1000 * (len(self.tokens) - 1) / self.predicted_ms if self.predicted_ms > 0 else 0.0


def generate(
    session: llama_cpp.Llama, prompt: Sequence[int], n_predict: int, sampling: dict[str, Any], writer: TokenWriter
) -> Generation:
    """Generate up to `n_predict` tokens (-1: until the context is full), an end-of-generation token excluded.

    `session` is a SpecSession or a plain Llama; `sampling` are keywords of `Llama.generate`. Raises ConfigError when
    the prompt is empty or does not fit the context.
    """
    n_ctx = session.n_ctx()
    if not prompt:
        raise ConfigError("the prompt is empty")
    if len(prompt) >= n_ctx:
        raise ConfigError(f"the prompt has {len(prompt)} tokens and the context {n_ctx}; it needs a larger -c")
    room = n_ctx - len(prompt)
    n_max = room if n_predict < 0 else min(n_predict, room)
    vocab = llama_cpp.llama_model_get_vocab(session.model)
    tokens: list[int] = []
    finish_reason = "length"
    first_s, rest_s = 0.0, 0.0
    if isinstance(session, SpecSession):
        session.next_max_tokens = n_max  # so that the last round drafts no more than can be used
    generator = session.generate(prompt, **sampling)
    try:
        while len(tokens) < n_max:
            start = time.perf_counter()
            token = next(generator)
            elapsed = time.perf_counter() - start
            if tokens:
                rest_s += elapsed
            else:
                first_s = elapsed
            if llama_cpp.llama_vocab_is_eog(vocab, token):
                finish_reason = "stop"
                break
            drafted = getattr(session, "last_token_drafted", False)
            writer.write(token_bytes(vocab, token), drafted)
            tokens.append(token)
    except StopIteration:
        pass
    finally:
        generator.close()
        writer.close()
    return Generation(len(prompt), tokens, writer.text, finish_reason, 1000 * first_s, 1000 * rest_s)


def token_bytes(vocab: Any, token: int) -> bytes:
    """The bytes a token stands for; empty for control tokens.

    Llama.detokenize reads at most 32 bytes a token, and code vocabularies have longer ones (runs of blanks).
    """
    size = 64
    while True:
        buffer = ctypes.create_string_buffer(size)
        n = llama_cpp.llama_token_to_piece(vocab, token, buffer, size, 0, False)
        if n >= 0:
            return buffer.raw[:n]
        size = -n
