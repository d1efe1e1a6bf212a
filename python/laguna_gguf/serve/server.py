"""Running the application: a socket, uvicorn, signals, and the model's thread from start to end."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable

import uvicorn

from laguna_gguf.http.connection import uvicorn_config
from laguna_gguf.http.listening import quiet_signals
from laguna_gguf.serve.app import create_app
from laguna_gguf.serve.metrics import Metrics
from laguna_gguf.serve.session import ServedSession
from laguna_gguf.serve.settings import Settings
from laguna_gguf.serve.worker import Worker

logger = logging.getLogger(__name__)

SHUTDOWN_SECONDS = 5
"""For clients to take the end of their answers."""

JOIN_SECONDS = 30
"""For the decode in progress, or the loading of a model, which cannot be interrupted."""


class Server(uvicorn.Server):
    """A uvicorn server with its worker."""

    def __init__(self, load: Callable[[], ServedSession], settings: Settings, *, access_log: bool = False) -> None:
        """load is called in the model's thread."""
        metrics = Metrics()
        self.worker = Worker(load, metrics, settings.limits, self._end)
        app = create_app(self.worker, metrics, settings)
        super().__init__(uvicorn_config(app, settings.limits, shutdown_seconds=SHUTDOWN_SECONDS, access_log=access_log))

    def serve_forever(self, listener: socket.socket) -> None:
        """Load the model and answer requests until a signal or `should_exit`. Raises why the model cannot be loaded."""
        self.worker.start()
        try:
            with quiet_signals():
                self.run(sockets=[listener])
        finally:
            self.worker.stop()
            if not self.worker.join(JOIN_SECONDS):
                # The interpreter must not be taken down around a thread that is in llama.cpp.
                logger.warning("the model is still loading or working; leaving without it")
                os._exit(0)
        if self.worker.error is not None:
            raise self.worker.error

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.worker.stop()  # before uvicorn waits for the answers in progress
        await super().shutdown(sockets)

    def _end(self) -> None:
        self.should_exit = True
