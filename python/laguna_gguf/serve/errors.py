"""Errors as clients see them: llama-server's object, which the OpenAI clients understand."""

from __future__ import annotations

import re
from typing import Any

from laguna_gguf.errors import ConfigError, RequestError

RETRY_AFTER = {"Retry-After": "5"}
"""With every 503: it passes."""

_TOO_LONG = re.compile(r"(\d+)\)? (?:tokens )?exceed (?:the )?context window of (\d+)")
"""What Llama and SpecSession say about prompts that do not fit."""

_STATUS_KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 503: "unavailable_error"}


def body(error: RequestError) -> dict[str, Any]:
    """The JSON object of an error."""
    return {"error": {"code": error.status, "message": str(error), "type": error.kind, **error.details}}


def headers(error: RequestError) -> dict[str, str]:
    """Headers that belong to an error's answer."""
    return RETRY_AFTER if error.status == 503 else {}


def of_status(status: int, message: str) -> RequestError:
    """The error of a bare HTTP status."""
    kind = _STATUS_KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
    return RequestError(message, status, kind)


def unavailable(message: str) -> RequestError:
    """503: loading, busy or ending."""
    return of_status(503, message)


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
    if isinstance(error, ConfigError):
        return RequestError(str(error))
    # Other messages may hold paths and addresses of this machine; the log has them.
    return of_status(500, f"{type(error).__name__} while generating; the server's log says more")
