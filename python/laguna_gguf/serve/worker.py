"""The one thread that owns the model, and the queue in front of it.

A session serves one thread, so the model is loaded, used and closed in here; requests wait their turn in order.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable
from contextlib import closing
from typing import Any, Literal

import llama_cpp

from laguna_gguf.errors import RequestError
from laguna_gguf.http import errors
from laguna_gguf.serve.errors import of_exception
from laguna_gguf.serve.generation import run
from laguna_gguf.serve.meter import Cancelled
from laguna_gguf.serve.metrics import Metrics
from laguna_gguf.serve.requests import GenerationRequest
from laguna_gguf.serve.session import ServedSession
from laguna_gguf.serve.settings import Limits

logger = logging.getLogger(__name__)

State = Literal["loading", "ready", "failed", "stopped"]

Event = dict[str, Any] | RequestError | None
"""A chunk or the whole answer; the error that ended it; None: it is complete."""


class Job:
    """A request on its way through the model's thread. Made and read in the event loop."""

    def __init__(self, request: GenerationRequest) -> None:
        self.request = request
        self.cancelled = False
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Event] = asyncio.Queue()

    def put(self, event: Event) -> None:
        """Add an event, from any thread."""
        try:
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)
        except RuntimeError:  # the loop has ended, and with it whoever waited
            self.cancelled = True

    async def next(self) -> Event:
        """The next event. Raises RequestError instead of returning one."""
        event = await self._events.get()
        if isinstance(event, RequestError):
            raise event
        return event


class Worker:
    """Runs jobs one after the other on a session that it loads itself."""

    def __init__(
        self,
        load: Callable[[], ServedSession],
        metrics: Metrics,
        limits: Limits,
        on_failure: Callable[[], None] = lambda: None,
    ) -> None:
        """on_failure is called, in the model's thread, when the model cannot be loaded or the thread fails."""
        self._load = load
        self._metrics = metrics
        self._limits = limits
        self.on_failure = on_failure
        self.state: State = "loading"
        self.error: BaseException | None = None
        """Why the thread failed."""
        self.details: dict[str, Any] = {}
        """Facts about the loaded model, for /v1/models."""
        self._jobs: deque[Job] = deque()
        self._running: Job | None = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._main, name="model", daemon=True)

    def start(self) -> None:
        """Begin to load the model."""
        self._thread.start()

    def check_ready(self) -> None:
        """Raise RequestError 503 while there is no model to work with."""
        if self.state == "loading":
            raise errors.unavailable("Loading model")
        if self.state != "ready":
            raise errors.unavailable("the server is ending")

    def submit(self, request: GenerationRequest) -> Job:
        """Put a request into the queue. Raises RequestError 503 when it is full or there is no model."""
        job = Job(request)
        with self._changed:
            self.check_ready()
            if len(self._jobs) + (self._running is not None) > self._limits.queue:
                raise errors.unavailable(f"{len(self._jobs)} requests are waiting already; try again later")
            self._jobs.append(job)
            self._count()
            self._changed.notify()
        return job

    def cancel(self, job: Job) -> None:
        """Nobody waits for a job any more: take it out of the queue, or stop it at its next token."""
        job.cancelled = True
        with self._changed:
            if job in self._jobs:
                self._jobs.remove(job)
                self._count()

    def stop(self) -> None:
        """End all jobs with an error and let the thread end."""
        with self._changed:
            if self.state in ("loading", "ready"):
                self.state = "stopped"
            jobs = [*self._jobs, *([self._running] if self._running is not None else [])]
            self._jobs.clear()
            self._changed.notify()
        for job in jobs:
            job.cancelled = True
            job.put(errors.unavailable("the server is ending"))

    def join(self, timeout: float) -> bool:
        """Wait for the thread; whether it has ended."""
        if self._thread.ident is not None:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def _count(self) -> None:
        self._metrics.waiting.set(len(self._jobs))
        self._metrics.running.set(self._running is not None)

    def _main(self) -> None:
        try:
            with closing(self._load()) as session:
                self.details = model_details(session)
                self._metrics.watch(session)
                with self._changed:
                    if self.state == "loading":
                        self.state = "ready"
                try:
                    while (job := self._take()) is not None:
                        end = self._run(session, job)
                        self._rest()  # before the end is told: whoever has an answer finds it counted
                        job.put(end)
                finally:
                    self._metrics.watch(None)
        except BaseException as error:
            self.error, self.state = error, "failed"
            self.on_failure()

    def _rest(self) -> None:
        with self._changed:
            self._running = None
            self._count()

    def _take(self) -> Job | None:
        """The next job; None when the thread is to end."""
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self.state != "ready")
            if self.state != "ready":
                return None
            self._running = self._jobs.popleft()
            self._count()
            return self._running

    def _run(self, session: ServedSession, job: Job) -> Event:
        """Work on a job; the event that ends it."""
        meter = session.new_meter(lambda: job.cancelled)
        try:
            run(session, job.request, meter, self._limits, job.put)
        except Cancelled:
            logger.debug("a client left after %d tokens", meter.n_predicted)
        except Exception as error:
            refusal = of_exception(error)
            if refusal.status >= 500:
                logger.error("a request failed", exc_info=error)
            return refusal
        finally:
            session.meter = session.deltas = None
            self._metrics.count_generation(meter)
        return None


def model_details(session: ServedSession) -> dict[str, Any]:
    """`meta` of /v1/models, with llama-server's names."""
    return {
        "n_vocab": session.n_vocab(),
        "n_ctx": session.n_ctx(),
        "n_ctx_train": llama_cpp.llama_model_n_ctx_train(session.model),
        "n_embd": session.n_embd(),
        "n_params": llama_cpp.llama_model_n_params(session.model),
        "size": llama_cpp.llama_model_size(session.model),
    }
