"""The model process: loads the drafter and compresses one prompt at a time, for the front that started it.

It is started as `python -m laguna_gguf.daemon.child FD` with its end of a socket pair. The front sends Load, it answers
Ready or Error; then requests and replies. It ends when the front does, and holds nothing that the front cannot lose.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import queue
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from laguna_gguf.daemon import protocol
from laguna_gguf.daemon.loading import Begun, Count, Counted, Load, Ready
from laguna_gguf.daemon.logs import LlamaLog, configure
from laguna_gguf.daemon.protocol import Cancel, Compress, CompressChat
from laguna_gguf.daemon.streams import Stream
from laguna_gguf.errors import ConfigError, LagunaError
from laguna_gguf.pflash.compress import PFlash
from laguna_gguf.pflash.compressed import Compressed
from laguna_gguf.pflash.drafter_file import DrafterFile
from laguna_gguf.pflash.hashing import file_sha256
from laguna_gguf.pflash.settings import SelectionSettings

logger = logging.getLogger("laguna_gguf.daemon.child")

REQUEST_SETTINGS = frozenset(
    "select_mode select_chunk_size select_query_tokens select_query_parser select_top_p select_score select_split "
    "chat_skeleton_tokens chat_history_queries chat_recall_min_lift chat_view".split()
)
"""Settings that a request can have of its own; the others belong to the loaded drafter or name files."""

_REQUESTS = protocol.decoder(Compress | CompressChat | Cancel | Counted)


class Cancelled(LagunaError):
    """Nobody waits for the request any more."""


class ModelProcess:
    """A loaded drafter and the front's connection."""

    def __init__(self, stream: Stream, pflash: PFlash) -> None:
        self._stream = stream
        self._pflash = pflash
        self._requests: queue.SimpleQueue[Compress | CompressChat] = queue.SimpleQueue()
        self._counts: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._cancelled: set[int] = set()
        self._current: int | None = None
        pflash.on_progress = self._on_progress

    def serve(self) -> None:
        """Answer requests; the process ends from the reading thread when the front is gone."""
        threading.Thread(target=self._read, name="requests", daemon=True).start()
        while True:
            request = self._requests.get()
            self._current = request.id
            self._stream.send(protocol.encode(Begun(request.id)))
            try:
                reply: Any = self._result(request)
            except Cancelled:
                reply = protocol.Error(protocol.CANCELLED, "the request was cancelled", request.id)
            except Exception as error:
                reply = protocol.error_frame(error, request.id)
                if reply.code == protocol.INTERNAL:
                    logger.error("a request failed", exc_info=error)
            self._current = None
            self._cancelled.discard(request.id)
            try:
                data = protocol.encode(reply)
            except LagunaError as error:
                data = protocol.encode(protocol.error_frame(error, request.id))
            self._stream.send(data)

    def _read(self) -> None:
        try:
            while (body := self._stream.receive()) is not None:
                frame = protocol.decode(body, _REQUESTS)
                if isinstance(frame, Cancel):
                    self._cancelled.add(frame.id)
                elif isinstance(frame, Counted):
                    self._counts.put(frame.count)
                else:
                    self._requests.put(frame)
        except Exception as error:
            logger.error("the front's frames cannot be read", exc_info=error)
        finally:
            os._exit(0)  # whatever llama.cpp is doing: nobody wants it any more

    def _on_progress(self, done: int, total: int) -> None:
        if self._current in self._cancelled:
            raise Cancelled

    def _result(self, request: Compress | CompressChat) -> protocol.Result:
        self._pflash.bind_target(self._count if isinstance(request, CompressChat) and request.count else None)
        with self._settings(request.settings or {}):
            compressed = self._chat(request) if isinstance(request, CompressChat) else self._compress(request)
        return result_frame(request, compressed)

    def _compress(self, request: Compress) -> Compressed:
        return self._pflash.compress(
            np.frombuffer(request.ids or b"", "<i4") if request.text is None else request.text,
            keep_ratio=request.keep_ratio,
            query=request.query,
            required=request.required,
            history=request.history,
            session=request.session,
            suffix_candidates=request.suffix_candidates,
        )

    def _count(self, text: str) -> int:
        """Target tokens, which the front knows to count."""
        self._stream.send(protocol.encode(Count(text)))
        count = self._counts.get()
        if count is None:
            raise Cancelled
        return count

    def _chat(self, request: CompressChat) -> Compressed:
        return self._pflash.compress_chat(
            request.rendered_prompt,
            keep_ratio=request.keep_ratio,
            session=request.session,
            pflash_query=request.pflash_query,
            pflash_required=request.pflash_required,
            compression=request.compression,
            threshold=request.threshold,
            target_n_ctx=request.target_n_ctx,
            max_tokens=request.max_tokens,
        )

    @contextmanager
    def _settings(self, given: dict[str, Any]) -> Iterator[None]:
        unknown = sorted(set(given) - REQUEST_SETTINGS)
        if unknown:
            raise ConfigError(f"{', '.join(unknown)}: not a setting that a request can have; see the daemon's own")
        before = self._pflash.settings
        self._pflash.use_settings(dataclasses.replace(before, **given))
        try:
            yield
        finally:
            self._pflash.use_settings(before)


def result_frame(request: Compress | CompressChat, compressed: Compressed) -> protocol.Result:
    """The reply to a request."""
    return protocol.Result(
        id=request.id,
        ids=np.asarray(compressed.ids, "<i4").tobytes(),
        spans=np.asarray(compressed.spans, "<i4").tobytes(),
        text=compressed.text,
        budget=compressed.budget,
        retained_tokens=compressed.retained_tokens,
        stop_reason=compressed.stop_reason,
        retained_mass=compressed.retained_mass,
        timings=compressed.timings,
        trace=json.dumps(compressed.trace, separators=(",", ":")).encode("ascii") if request.trace else None,
        byte_spans=None if compressed.byte_spans is None else np.asarray(compressed.byte_spans, "<i4").tobytes(),
        inserted=list(compressed.inserted),
        ceiling=compressed.ceiling,
    )


def load(config: Load) -> tuple[PFlash, Ready]:
    """The drafter and what clients are told about it. Raises as PFlash does."""
    settings = SelectionSettings.from_env(os.environ)
    if config.trace_path is not None:
        settings = dataclasses.replace(settings, trace_path=config.trace_path)
    head = config.scoring_head or settings.scoring_head_gguf
    probe = config.segment_probe or settings.segment_probe_gguf
    ready = Ready(
        architecture=DrafterFile(config.drafter).arch,
        drafter_sha256=file_sha256(config.drafter),
        head_sha256=None if head is None else _hash(head),
        probe_sha256=None if probe is None else _hash(probe),
    )
    pflash = PFlash(config.drafter, scoring_head=head, segment_probe=probe, settings=settings, **config.llama)
    return pflash, ready


def _hash(path: str) -> str | None:
    return file_sha256(path) if os.path.isfile(path) else None  # a missing file is PFlash's error


def main(descriptor: int) -> int:
    """Load, then serve. Returns the exit code when loading failed."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the front decides; it closes the connection
    stream = Stream(socket.socket(fileno=descriptor))
    body = stream.receive()
    if body is None:
        return 0
    config = protocol.decode(body, protocol.decoder(Load))
    configure(config.log_format, verbose=config.verbose)
    _llama_log = LlamaLog()
    try:
        pflash, ready = load(config)
    except Exception as error:
        logger.debug("loading failed", exc_info=error)
        frame = protocol.error_frame(error)
        if not isinstance(error, LagunaError):
            frame.message = f"{type(error).__name__}: {error}"
        stream.send(protocol.encode(frame))
        return 1
    try:
        stream.send(protocol.encode(ready))
        ModelProcess(stream, pflash).serve()
    except OSError:
        pass  # the front is gone
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
