"""What a client is told about an exception of the session."""

from __future__ import annotations

import re

from laguna_gguf.errors import BudgetError, ConfigError, QueryError, RequestError, SelectionError
from laguna_gguf.http.errors import of_status

_TOO_LONG = re.compile(r"(\d+)\)? (?:tokens )?exceed (?:the )?context window of (\d+)")
"""What Llama and SpecSession say about prompts that do not fit."""


def of_exception(error: Exception) -> RequestError:
    """What a client is told about an exception of the session."""
    if isinstance(error, RequestError):
        return error
    too_long = _TOO_LONG.search(str(error))
    if isinstance(error, ValueError) and too_long:
        n_prompt, n_ctx = map(int, too_long.groups())
        return RequestError(
            f"the prompt has {n_prompt} tokens and the context {n_ctx}; shorten it, or give the server a larger -c",
            400,
            "exceed_context_size_error",
            n_prompt_tokens=n_prompt,
            n_ctx=n_ctx,
        )
    if isinstance(error, ConfigError | QueryError | SelectionError | BudgetError):
        return RequestError(str(error))
    # Other messages may hold paths and addresses of this machine; the log has them.
    return of_status(500, f"{type(error).__name__} while generating; the server's log says more")
