"""What the front and its model process say to each other at the beginning."""

from __future__ import annotations

from typing import Any

import msgspec

from laguna_gguf.daemon.protocol import Frame


class Load(Frame):
    """What the model process loads; the environment has the settings."""

    drafter: str
    scoring_head: str | None = None
    segment_probe: str | None = None
    llama: dict[str, Any] = msgspec.field(default_factory=dict)
    """Keywords of PFlash."""
    trace_path: str | None = None
    log_format: str = "text"
    verbose: bool = False


class Ready(Frame):
    """The drafter is loaded; hashes are SHA-256 in hexadecimal."""

    architecture: str
    drafter_sha256: str
    head_sha256: str | None = None
    probe_sha256: str | None = None


class Begun(Frame):
    """The process works on a request from now on; before, it can be given to another one."""

    id: int


class Count(Frame):
    """The process asks for the number of target tokens of a text."""

    text: str


class Counted(Frame):
    """The answer; without a count the request cannot go on."""

    count: int | None = None
