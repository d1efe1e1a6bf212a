"""Progress of long runs."""

from __future__ import annotations

import sys
import time


def say(text: str) -> None:
    """A line with the time on stderr."""
    print(time.strftime("%H:%M:%S"), text, file=sys.stderr, flush=True)
