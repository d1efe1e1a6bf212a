"""Paths as callers give them."""

import os
from typing import Any

from laguna_gguf.errors import ConfigError


def path_argument(name: str, value: Any) -> str:
    """A path as text. Raises ConfigError for anything that is no path."""
    try:
        return os.fsdecode(value)
    except TypeError as error:
        raise ConfigError(f"{name} is {value!r}; needed a path") from error
