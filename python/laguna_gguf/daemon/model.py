"""The front's side of the model process: it is started, fed, stopped, and started again when it dies."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

from laguna_gguf.daemon import protocol
from laguna_gguf.daemon.fairness import FairQueue
from laguna_gguf.daemon.loading import Begun, Count, Counted, Load, Ready
from laguna_gguf.daemon.protocol import CodedError, Compress, CompressChat, Error, Result
from laguna_gguf.errors import LagunaError, ProtocolError

logger = logging.getLogger(__name__)

DEFAULT_SECONDS = 3600.0
"""Deadline of requests without one."""
KILL_SECONDS = 30.0
"""How long a cancelled request may go on (a micro-batch cannot be interrupted) before the process is killed."""
IDLE_SECONDS = 300.0
"""After which residency `auto` gives the drafter's memory back."""
LONGEST_DELAY = 30.0
"""Longest wait before the process is started again; the first is FIRST_DELAY, and they double."""
FIRST_DELAY = 0.1

PERSISTENT, REQUEST_SCOPED, AUTO = "persistent", "request-scoped", "auto"

_REPLIES = protocol.decoder(Result | Error | Begun | Count)
_STARTS = protocol.decoder(Ready | Error)


CountText = Callable[[str], Awaitable[int]]
"""Target tokens of a text."""


class LoadError(Exception):
    """The drafter cannot be loaded; the cause is what a client would be told."""


@dataclass(eq=False)
class _Job:
    request: Compress | CompressChat
    client: Hashable
    count: CountText | None = None
    error: Exception | None = None
    """Why `count` failed."""
    answer: asyncio.Future[Result] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class _Child:
    """A running model process."""

    def __init__(self, process: asyncio.subprocess.Process, reader: Any, writer: asyncio.StreamWriter) -> None:
        self.process = process
        self._reader, self._writer = reader, writer
        self.lost = False
        """It died, or cannot be trusted any more."""

    @classmethod
    async def start(cls, config: Load) -> tuple[_Child, Ready]:
        """Start and load. LoadError with the reason."""
        ours, theirs = socket.socketpair()
        with theirs:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "laguna_gguf.daemon.child",
                str(theirs.fileno()),
                pass_fds=(theirs.fileno(),),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=2,
            )
        reader, writer = await asyncio.open_connection(sock=ours, limit=1 << 20)
        child = cls(process, reader, writer)
        try:
            await child.send(config)
            frame = protocol.decode(await child.receive(), _STARTS)
        except (OSError, asyncio.IncompleteReadError):
            code = await process.wait()
            await child.close()
            raise LoadError(f"the model process ended with status {code} while it loaded the drafter") from None
        except BaseException:
            await child.close()
            raise
        if isinstance(frame, Error):
            await child.close()
            raise LoadError(frame.message)
        return child, frame

    async def send(self, frame: protocol.Frame) -> None:
        await self.send_bytes(protocol.encode(frame))

    async def send_bytes(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def receive(self) -> bytes:
        size = protocol.length(await self._reader.readexactly(protocol.HEADER_BYTES))
        return await self._reader.readexactly(size)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()

    async def close(self) -> None:
        """End the process: it does when its connection ends."""
        self._writer.close()
        try:
            await asyncio.wait_for(self.process.wait(), KILL_SECONDS)
        except asyncio.TimeoutError:
            self.kill()
            await self.process.wait()


class Model:
    """The drafter as the front sees it: a queue, and a process that works on one request at a time."""

    def __init__(self, config: Load, *, residency: str = PERSISTENT, idle_seconds: float = IDLE_SECONDS) -> None:
        self._config = config
        self._residency = residency
        self._idle_seconds = idle_seconds
        self._queue: FairQueue[_Job] = FairQueue()
        self._child: _Child | None = None
        self._current: _Job | None = None
        self._kill_timer: asyncio.TimerHandle | None = None
        self._numbers = 0
        self._ending = False
        self._started = time.monotonic()
        self._task: asyncio.Task[None] | None = None
        self.idle = asyncio.Event()
        """Set while nothing waits or runs."""
        self.idle.set()
        self.ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        """What was loaded first, or LoadError."""
        self.state = "loading"
        """loading, ready, unloaded, restarting, failed or stopped."""
        self.counts: Counter[str] = Counter()

    @property
    def available(self) -> bool:
        """Whether a request would be worked on now."""
        return self.state in ("ready", "unloaded") and not self._ending

    def start(self) -> None:
        """Begin to load."""
        self._task = asyncio.create_task(self._run(), name="model")

    async def stop(self) -> None:
        """End the process; whatever waits fails."""
        self._ending = True
        self._fail_waiting(CodedError("the daemon is ending", protocol.ENDING))
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._current is not None:
            self._finish(self._current, CodedError("the daemon is ending", protocol.ENDING))
        if self._child is not None:
            await self._child.close()
        self.state = "stopped"

    async def ended(self) -> None:
        """Wait until there is no more process to be had, which is a bug; raises why."""
        if self._task is not None:
            await asyncio.shield(self._task)

    def refuse_new(self) -> None:
        """Take no further requests; those that wait are still worked on."""
        self._ending = True

    async def compress(
        self, request: Compress | CompressChat, client: Hashable, *, count: CountText | None = None
    ) -> Result:
        """Work on a request; its id is replaced. Cancelling the call cancels the request.

        count: for a chat, counts target tokens; what it raises is raised here. Raises what the model process raised,
        and CodedError: busy, deadline, drafter_lost, ending.
        """
        if self._ending:
            raise CodedError("the daemon is ending", protocol.ENDING)
        if isinstance(request, CompressChat):
            request.count = count is not None
        job = _Job(request, client, count)
        self._queue.put(client, job)
        self.idle.clear()
        self.counts["requests"] += 1
        seconds = DEFAULT_SECONDS if request.seconds is None else request.seconds
        try:
            result = await asyncio.wait_for(job.answer, seconds)
        except asyncio.TimeoutError:
            self.counts["deadlines"] += 1
            raise CodedError(f"not done within {seconds:g} s", protocol.DEADLINE) from None
        except asyncio.CancelledError:
            self.counts["cancelled"] += 1
            raise
        except LagunaError:
            self.counts["failed"] += 1
            raise
        finally:
            self._abandon(job)
        self.counts["completed"] += 1
        self.counts["input_tokens"] += int(result.timings.get("drafter_input_tokens", 0))
        self.counts["kept_tokens"] += result.retained_tokens
        return result

    def stats(self) -> dict[str, Any]:
        """Counters since the start, and the state."""
        names = ("requests", "completed", "failed", "cancelled", "deadlines", "restarts", "input_tokens", "kept_tokens")
        return {
            "state": self.state,
            "residency": self._residency,
            "uptime_seconds": time.monotonic() - self._started,
            "waiting": len(self._queue),
            "running": int(self._current is not None),
            "drafter_pid": self._child.process.pid if self._child is not None else None,
            **{name: self.counts[name] for name in names},
        }

    def _abandon(self, job: _Job) -> None:
        """Nobody waits for a job any more, if it is still there."""
        if self._queue.remove(job.client, job):
            self._note_idle()
        elif self._current is job and self._child is not None:
            child = self._child
            if self._kill_timer is None:
                self._kill_timer = asyncio.get_running_loop().call_later(KILL_SECONDS, child.kill)
            task = asyncio.create_task(self._send_cancel(child, job.request.id))
            task.add_done_callback(lambda _: None)

    async def _send_cancel(self, child: _Child, number: int) -> None:
        with contextlib.suppress(OSError):
            await child.send(protocol.Cancel(number))

    def _note_idle(self) -> None:
        if self._current is None and not len(self._queue):
            self.idle.set()

    def _finish(self, job: _Job, outcome: Result | LagunaError) -> None:
        self._current = None
        if self._kill_timer is not None:
            self._kill_timer.cancel()
            self._kill_timer = None
        if not job.answer.done():
            if isinstance(outcome, LagunaError):
                job.answer.set_exception(outcome)
            else:
                job.answer.set_result(outcome)
        self._note_idle()

    def _fail_waiting(self, error: LagunaError) -> None:
        for job in self._queue.clear():
            if not job.answer.done():
                job.answer.set_exception(error)
        self._note_idle()

    async def _run(self) -> None:
        failures = 0
        while True:
            try:
                child = await self._load()
            except (LoadError, OSError) as error:  # OSError: no process or descriptor to be had
                if not self.ready.done():
                    self.state = "failed"
                    self.ready.set_exception(error if isinstance(error, LoadError) else LoadError(str(error)))
                    return
                logger.error("the drafter cannot be loaded again: %s", error)
                self.state = "failed"
                self._fail_waiting(CodedError(f"the drafter cannot be loaded again: {error}", protocol.DRAFTER_LOST))
            else:
                before = self.counts["completed"]
                if await self._feed(child):
                    self.state = "unloaded"
                    failures = 0
                    await self._queue.filled.wait()
                    continue
                if self.counts["completed"] > before:
                    failures = 0
                self.state = "restarting"
                self.counts["restarts"] += 1
            delay = min(LONGEST_DELAY, FIRST_DELAY * 2**failures)
            failures = min(failures + 1, 20)
            logger.warning("the model process is started again in %.1f s", delay)
            await asyncio.sleep(delay)

    async def _load(self) -> _Child:
        began = time.monotonic()
        self.state = "loading" if not self.ready.done() else self.state
        child, ready = await _Child.start(self._config)
        self._child = child
        self.state = "ready"
        logger.info("the drafter is loaded (%s, %.1f s)", ready.architecture, time.monotonic() - began)
        if not self.ready.done():
            self.ready.set_result(ready)
        return child

    async def _feed(self, child: _Child) -> bool:
        """Give the process work until it ends; True when that was our wish."""
        reading = asyncio.create_task(child.receive())
        try:
            while True:
                if not await self._wait_for_work(reading):
                    logger.info("the drafter is not needed and gives its memory back")
                    return True
                if reading.done():
                    logger.error("the model process ended unasked")
                    return False
                job = self._queue.take()
                if job.answer.done():
                    self._note_idle()
                    continue
                self._current = job
                try:
                    outcome = await self._exchange(child, job, reading)
                except Exception as error:  # whatever a request did: it must not end the daemon
                    logger.error("a request failed", exc_info=error)
                    child.lost = True
                    child.kill()
                    outcome = CodedError(f"{type(error).__name__} in the daemon; its log says more", protocol.INTERNAL)
                if outcome is None:
                    self._current = None
                    if not job.answer.done():
                        self._queue.put_back(job.client, job)
                else:
                    self._finish(job, outcome)
                if child.lost:
                    return False
                reading = asyncio.create_task(child.receive())
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            await asyncio.shield(self._lose(child))

    async def _wait_for_work(self, reading: asyncio.Task[bytes]) -> bool:
        """Wait for a request or the end of the process; False when patience ended first."""
        if len(self._queue):
            await asyncio.sleep(0)  # notice a process that has just ended
            return True
        filled = asyncio.create_task(self._queue.filled.wait())
        try:
            done, _ = await asyncio.wait(
                {filled, reading}, timeout=self._patience(), return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            filled.cancel()
        return bool(done)

    async def _lose(self, child: _Child) -> None:
        self._child = None
        await child.close()

    def _patience(self) -> float | None:
        """Seconds that an idle drafter stays loaded."""
        return {REQUEST_SCOPED: 0.0, AUTO: self._idle_seconds}.get(self._residency)

    async def _exchange(self, child: _Child, job: _Job, reading: asyncio.Task[bytes]) -> Result | LagunaError | None:
        """The outcome of a job; None when the process died before it had begun."""
        self._numbers += 1
        job.request.id = self._numbers
        try:
            data = protocol.encode(job.request)
        except ProtocolError as error:
            reading.cancel()
            return error
        begun = False
        try:
            await child.send_bytes(data)
            frame = protocol.decode(await reading, _REPLIES)
            if isinstance(frame, Begun):
                begun = True
                frame = protocol.decode(await child.receive(), _REPLIES)
            while isinstance(frame, Count):
                await child.send(Counted(await _counted(job, frame.text)))
                frame = protocol.decode(await child.receive(), _REPLIES)
        except (OSError, asyncio.IncompleteReadError):
            child.lost = True
            if not begun:
                return None
            logger.error("the model process died while it worked on a request")
            return CodedError("the model process died while it worked on this request", protocol.DRAFTER_LOST)
        except ProtocolError as error:
            child.lost = True
            child.kill()
            return error
        if isinstance(job.error, LagunaError) and isinstance(frame, Error):
            return job.error
        return protocol.exception(frame) if isinstance(frame, Error) else frame


async def _counted(job: _Job, text: str) -> int | None:
    if job.count is None or job.answer.done():
        return None
    try:
        return await job.count(text)
    except LagunaError as error:
        job.error = error
    except Exception as error:
        logger.error("tokens cannot be counted", exc_info=error)
    return None
