"""The front: listeners, the model process, and an orderly end."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import resource
import signal
from typing import Any

from laguna_gguf.daemon import options
from laguna_gguf.daemon.addresses import Address, listening, parse
from laguna_gguf.daemon.model import Model
from laguna_gguf.daemon.server import Server

logger = logging.getLogger(__name__)

DRAIN_SECONDS = 30.0
"""For requests that run or wait when the daemon is asked to end; a second signal ends it at once."""
MAX_DESCRIPTORS = 8192


async def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT. Returns the exit code; raises LoadError, ConfigError."""
    _allow_connections()
    token = options.read_token(args.token_file)
    config = options.load_config(args)
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(listening(parse(args.socket))) if args.socket else None
        model = Model(config, residency=args.draft_residency)
        http = _http_server(args, model, stack) if args.upstream else None
        server = Server(
            model, name=f"pflash_daemon {options.version()}", token=token, stats=lambda: _stats(model, server)
        )
        ending, at_once = _signals()
        tasks: list[asyncio.Task[Any]] = []
        try:
            model.start()
            if listener is not None:
                await server.listen(listener)
            if http is not None:
                tasks.append(asyncio.create_task(http.serve_until_stopped()))
            await _first(model.ready, ending.wait(), *tasks)
            if listener is not None:
                logger.info("listening on %s", _described(listener, parse(args.socket)))
            if http is not None:
                logger.info("listening on %s, in front of %s", http.url, args.upstream.rpartition("@")[2])
            await _first(ending.wait(), model.ended(), *tasks)
            logger.info("ending; requests in progress have %g s", DRAIN_SECONDS)
            model.refuse_new()
            server.refuse_new()
            if http is not None:
                http.refuse_new()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(_first(_drained(model, tasks), at_once.wait()), DRAIN_SECONDS)
            await server.flush()
        finally:
            await model.stop()
            await server.close()
            if http is not None:
                await http.stop()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    return 0


def _allow_connections() -> None:
    """Connections are descriptors, of which many systems allow a process 1024 unless it asks for more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(MAX_DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _http_server(args: argparse.Namespace, model: Model, stack: contextlib.ExitStack) -> Any:
    from laguna_gguf.daemon.proxy.server import ProxyServer

    return ProxyServer(args, model, stack)


def _stats(model: Model, server: Server) -> dict[str, Any]:
    return model.stats() | {"connections": server.n_connections, **server.counts}


def _described(listener: Any, address: Address) -> str:
    if not address.is_tcp:
        return str(address)
    host, port = listener.getsockname()[:2]
    return str(Address(host=host, port=port))


def _signals() -> tuple[asyncio.Event, asyncio.Event]:
    """Events of the first signal to end and of the second. SIGHUP changes nothing: there is nothing to read anew, and
    traces are opened for each line."""
    ending, at_once = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (at_once if ending.is_set() else ending).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    loop.add_signal_handler(signal.SIGHUP, lambda: logger.info("SIGHUP: nothing to do"))
    return ending, at_once


async def _drained(model: Model, tasks: list[asyncio.Task[Any]]) -> None:
    """Wait until the drafter has nothing to do and the HTTP server has ended its answers."""
    await model.idle.wait()
    if tasks:
        await asyncio.wait(tasks)


async def _first(*things: Any) -> None:
    """Wait for the first of these; its exception is raised, the others are cancelled unless they are futures."""
    waiting = [thing if isinstance(thing, asyncio.Future) else asyncio.ensure_future(thing) for thing in things]
    try:
        done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for one in done:
            one.result()
    finally:
        for thing, task in zip(things, waiting, strict=True):
            if thing is not task:
                task.cancel()
