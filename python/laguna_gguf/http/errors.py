"""Errors as clients see them: llama-server's object, which the OpenAI clients understand."""

from __future__ import annotations

from typing import Any

from laguna_gguf.errors import RequestError

RETRY_AFTER = {"Retry-After": "5"}
"""With every 503: it passes."""

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
