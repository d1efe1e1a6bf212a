"""What a client of any of the servers may use up."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class HttpLimits:
    """Sizes in bytes, times in seconds."""

    body_bytes: int = 16 << 20
    json_depth: int = 64
    """Nested objects and arrays in a body."""
    header_seconds: float = 15.0
    """For the request line and headers, from the connection or from their first byte on."""
    keep_alive_seconds: float = 75.0
    """Between two requests. Longer than clients keep connections, or one would be closed just as it is used again."""
    body_seconds: float = 60.0
    send_seconds: float = 60.0
    """For a client to take one piece of its answer."""
