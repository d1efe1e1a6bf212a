"""Logs on stderr: lines of text, or a JSON object a line."""

from __future__ import annotations

import json
import logging
import sys
from datetime import datetime, timezone

PROGRAM = "pflash_daemon"


class JsonLines(logging.Formatter):
    """A record as one JSON object; what is passed as extra={"fields": {...}} becomes keys of it."""

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False, default=str)


def configure(log_format: str, *, verbose: bool) -> None:
    """Set the root logger up. INFO and above; with `verbose` also DEBUG of this package."""
    handler = logging.StreamHandler(sys.stderr)
    if log_format == "json":
        handler.setFormatter(JsonLines())
    else:
        handler.setFormatter(logging.Formatter(f"{PROGRAM}: %(levelname)s: %(message)s"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("laguna_gguf").setLevel(logging.DEBUG if verbose else logging.INFO)
