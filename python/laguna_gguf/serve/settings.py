"""Settings of the server and the limits that clients cannot lift."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from laguna_gguf.http.limits import HttpLimits


@dataclass(frozen=True)
class Limits(HttpLimits):
    """What a client may use up. Sizes in bytes, times in seconds."""

    queue: int = 32
    """Requests that wait for the model while it works on another."""
    stops: int = 32
    """Stop strings of a request; every one is looked for after every token."""
    tools: int = 256
    top_logprobs: int = 20
    grammar_bytes: int = 64 << 10


@dataclass(frozen=True)
class Settings:
    """What the server was started with."""

    alias: str
    """The model's name in answers and in /v1/models."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Keywords of create_completion for what a request leaves open."""
    seed: int | None = None
    """For requests without a seed; None: a new one each time."""
    api_keys: tuple[str, ...] = ()
    """Any of these opens the server; none: it is open."""
    cors_origins: tuple[str, ...] = ()
    """Origins whose pages may call the server; "*" is every one."""
    limits: Limits = field(default_factory=Limits)
