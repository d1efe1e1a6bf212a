"""Logs on stderr: lines of text, or a JSON object a line."""

from __future__ import annotations

import json
import logging
import sys
from datetime import datetime, timezone
from typing import Any, ClassVar

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


class LlamaLog:
    """llama.cpp's own log, which llama_cpp prints, as records: every line of stderr is then of the format asked for."""

    _LEVELS: ClassVar = {1: logging.DEBUG, 2: logging.DEBUG, 3: logging.WARNING, 4: logging.ERROR}
    """ggml's debug, info, warning and error; 5 goes on with the line before."""

    def __init__(self) -> None:
        import llama_cpp  # not for the front

        self._logger = logging.getLogger("laguna_gguf.llama_cpp")
        self._level, self._line = logging.DEBUG, ""
        self._callback = llama_cpp.llama_log_callback(self._on_text)  # must live as long as it is set
        llama_cpp.llama_log_set(self._callback, None)

    def _on_text(self, level: int, text: bytes, _: Any) -> None:
        self._level = self._LEVELS.get(level, self._level)
        *lines, self._line = (self._line + text.decode("utf-8", "replace")).split("\n")
        for line in lines:
            if line.strip(" ."):  # dots show progress
                self._logger.log(self._level, "%s", line)


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
