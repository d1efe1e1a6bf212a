"""uvicorn in the front's event loop."""

from __future__ import annotations

import argparse
import contextlib
import logging
import socket
from collections.abc import Iterator

import uvicorn

from laguna_gguf.daemon.model import Model
from laguna_gguf.daemon.options import has_traces
from laguna_gguf.daemon.proxy.app import CHATS, LIMITS, OWN, TEXTS, App
from laguna_gguf.daemon.proxy.compression import Compressor
from laguna_gguf.daemon.proxy.history import History
from laguna_gguf.daemon.proxy.metrics import Metrics
from laguna_gguf.daemon.proxy.requests import Policy
from laguna_gguf.daemon.proxy.upstream import Upstream
from laguna_gguf.http.connection import uvicorn_config
from laguna_gguf.http.listening import address, listen
from laguna_gguf.http.middleware import Answers

logger = logging.getLogger(__name__)

SHUTDOWN_SECONDS = 30
"""For answers in progress when the daemon ends."""


class ProxyServer:
    """The proxy, listening from the start; it answers once `serve_until_stopped` runs."""

    def __init__(self, args: argparse.Namespace, model: Model, stack: contextlib.ExitStack) -> None:
        """ConfigError for addresses that do not work. The socket is closed with `stack`."""
        if args.prefill_skip_park:
            logger.warning("--prefill-skip-park is ignored: nothing is parked here")
        self._upstream = Upstream(args.upstream)
        metrics = Metrics(model)
        app = App(
            self._upstream,
            model,
            Compressor(self._upstream, model, Policy.from_arguments(args), has_traces(args)),
            metrics,
            History(),
            passthrough_on_error=args.on_error == "passthrough",
        )
        self._listener: socket.socket = stack.enter_context(listen(args.host, args.port))
        self.url = address(self._listener)
        counted = Answers(app, metrics.count_request, frozenset(OWN | CHATS | TEXTS))
        self._server = _Server(
            uvicorn_config(counted, LIMITS, shutdown_seconds=SHUTDOWN_SECONDS, access_log=False, date_header=False)
        )

    async def serve_until_stopped(self) -> None:
        """Answer requests until `refuse_new` or `stop`."""
        await self._server.serve(sockets=[self._listener])

    def refuse_new(self) -> None:
        """Take no further connections and let answers in progress end."""
        self._server.should_exit = True

    async def stop(self) -> None:
        """End what is still in progress."""
        self._server.should_exit = self._server.force_exit = True
        await self._upstream.close()


class _Server(uvicorn.Server):
    """Signals are the front's."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
