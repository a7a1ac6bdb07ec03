"""A worker as the supervisor's callers see it: submit to it, ask it, and it is watched while it owes an answer."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Mapping
from typing import Any

from localllm.errors import LocalLLMError, Unavailable, WorkerDied
from localllm.runtime.types import Request
from localllm.worker.event_stream import EventStream
from localllm.worker.lifecycle import STEP_S
from localllm.worker.link import CONNECTION_ENDED, STOPPED, Link
from localllm.worker.process import WorkerProcess
from localllm.worker.protocol import Load
from localllm.worker.watchdog import LoadWatch, Sight, Watchdog, is_overdue

_DYING_S = 0.5
_ANSWER_S = 1.0
_LOOK_S = 0.2
_STRAGGLERS_S = 0.2

StartProcess = Callable[[Callable[[], None]], WorkerProcess]
"""Starts a worker's process, given what to call when it is gone. Raises OSError."""


class Gone(Exception):
    """The worker died before its model was loaded."""


class Worker:
    """A model in its process. `model` is what `describe_loaded` says of it, {} until it is loaded.

    `end_reason`: what was seen of its end; `is_hung`: it was ended for making no progress.
    """

    def __init__(
        self,
        name: str,
        start: StartProcess,
        log: Callable[[str, str], None],
        watchdog_s: float,
        load: Load,
        keep_s: float = 0.0,
    ) -> None:
        """Start the process; `load` is what the method `load` tells it. Raises OSError.

        `keep_s`: how long it may put on disk what it has kept, when it is stopped.
        """
        self.name = name
        self.model: Mapping[str, Any] = {}
        self.is_hung = False
        self.on_death: Callable[[], None] = _ignore
        self.link = Link(log, self._link_ended)
        self._load = load
        self._keep_s = keep_s
        self._ended = asyncio.Event()
        self._watchdog = Watchdog(watchdog_s)
        self._tick: asyncio.TimerHandle | None = None
        self._stragglers: asyncio.TimerHandle | None = None
        self._ping: asyncio.Future[Any] | None = None
        self._process = start(self._process_ended)
        self.pid = self._process.pid

    @property
    def is_alive(self) -> bool:
        """Say whether submitted work will be done."""
        return self.link.is_open and bool(self.model)

    @property
    def n_requests(self) -> int:
        """Requests at work or waiting in it."""
        return len(self.link.streams)

    @property
    def is_busy(self) -> bool:
        """Say whether it owes anybody an answer."""
        return bool(self.link.streams) or self.link.n_calls > 0

    def how_it_ended(self, code: int) -> str:
        """Return what was seen of its death, for people, with its last words as far as those may be told."""
        seen, stderr = self.link.end_reason, self._process.stderr
        if self.is_hung or seen != CONNECTION_ENDED:
            how = seen
        elif code < 0:
            how = f"its process was ended by {_signal_name(-code)}"
        else:
            how = f"its process ended with code {code}"
        more = [f"{stderr.n_other_lines} other lines"] if stderr.n_other_lines else []
        words = "; ".join([*stderr.lines, *more])
        return f"{how} ({words})" if words else how

    def submit(self, request: Request) -> EventStream:
        """Start a request; a refusal comes as its only event. Raises: Unavailable where the worker is dead."""
        if not self.is_alive:
            raise Unavailable("The process that held the model is gone.", "try again in a moment", retry_after_s=1)
        stream = self.link.submit(request)
        self._watch()
        return stream

    async def call(self, verb: str, argument: Any = None, timeout_s: float = 30.0) -> Any:
        """Return the answer to `verb`. Raises: the error it failed with, TimedOut, WorkerDied, Unavailable."""
        return await self.link.call(verb, argument, timeout_s)

    async def ping(self, timeout_s: float) -> bool:
        """Say whether the engine's thread answered in time, or is in a step that is not overdue."""
        if not self.is_alive:
            return False
        if self._ping is None or self._ping.done():
            try:
                self._ping = self.link.ask("ping")
            except LocalLLMError:
                return False
        ping = self._ping
        self._watch()
        await asyncio.wait({ping}, timeout=timeout_s)
        if ping.done():
            return self.is_alive and not ping.cancelled() and ping.exception() is None
        return self.is_alive and self._is_in_step()

    async def load(self, size_bytes: int) -> None:
        """Have the model loaded. Raises: Gone; the error that the worker gives for not loading it."""
        loop = asyncio.get_running_loop()
        await self._process.listen()
        await loop.create_connection(lambda: self.link, sock=self._process.socket)
        self.link.send(self._load)
        watch = LoadWatch(self._watchdog.limit_s, size_bytes, time.monotonic())
        loaded: asyncio.Future[Any] = self.link.loaded
        ended: asyncio.Future[Any] = asyncio.ensure_future(self._ended.wait())
        try:
            while not (loaded.done() or ended.done()):
                await asyncio.wait({loaded, ended}, timeout=watch.tick_s, return_when=asyncio.FIRST_COMPLETED)
                if not loaded.done() and watch.look(time.monotonic(), used_s(self.pid)):
                    self._hang("it made no progress in loading")
        finally:
            ended.cancel()
        if not loaded.done():
            raise Gone
        self.model = loaded.result()
        if not self.link.is_open:
            self.model = {}
            raise Gone

    async def gone(self) -> int:
        """Wait for the end of a process that is dying, or is made to. Return its code (negative: a signal)."""
        ends_by_itself = self.link.end_reason in (CONNECTION_ENDED, STOPPED)
        if self.link.end_reason == STOPPED and self.model and self._keep_s:
            ends_by_itself = await self._keeps()
        return await self._process.wait(_DYING_S if ends_by_itself else 0.0)

    def end(self, error: LocalLLMError) -> None:
        """Begin to end it on purpose, which is no death; requests end by `error`. Idempotent."""
        self.on_death = _ignore
        self.link.end(error, STOPPED)

    async def stop(self, error: LocalLLMError) -> None:
        """End it, requests by `error`, and leave nothing of it. Idempotent."""
        self.end(error)
        await self.gone()
        self.dispose()

    def kill(self) -> None:
        """End it at once, whatever it is at or still has to keep. Idempotent."""
        self._process.kill()

    def dying_step(self) -> list[bytes]:
        """Return the fingerprints of the requests that were in the step in which it died."""
        board = self._process.board.read()
        known = self.link.fingerprints
        return [known[number] for number in board.numbers if number in known] if board.is_running else []

    @property
    def ran_alone(self) -> frozenset[bytes]:
        """The requests that it was told to run with no others."""
        return frozenset(self._load.lone)

    def dispose(self) -> None:
        """Close what is left of a process that is gone. Idempotent."""
        for timer in (self._tick, self._stragglers):
            if timer is not None:
                timer.cancel()
        self._process.dispose()

    async def _keeps(self) -> bool:
        """Wait while it puts on disk what it has kept; False where it hangs, or is stuck in a step."""
        begun_s, process = time.monotonic(), self._process
        while not await process.has_ended(_LOOK_S):
            passed_s = time.monotonic() - begun_s
            hangs = passed_s > _ANSWER_S and not process.stderr.is_keeping
            is_stuck = passed_s > STEP_S and process.board.read().is_running
            if hangs or is_stuck or passed_s > STEP_S + self._keep_s:
                return False
        return True

    def _is_in_step(self) -> bool:
        board = self._process.board.read()
        return board.is_running and not is_overdue(board, time.monotonic(), self._watchdog.limit_s)

    def _process_ended(self) -> None:
        """Give what is still in the socket time to be read; whoever else holds the other end does not matter."""
        if self.link.is_open:
            loop = asyncio.get_running_loop()
            self._stragglers = loop.call_later(_STRAGGLERS_S, self.link.connection_lost, None)

    def _link_ended(self) -> None:
        self._ended.set()
        if self._tick is not None:
            self._tick.cancel()
            self._tick = None
        self.on_death()

    def _watch(self) -> None:
        """Look now and then until nothing is owed any more; an idle worker costs no timer."""
        if self._tick is None and self.link.is_open:
            self._watchdog.begin(time.monotonic())
            self._tick = asyncio.get_running_loop().call_later(self._watchdog.tick_s, self._look)

    def _look(self) -> None:
        self._tick = None
        sight = self._sight()
        if self._watchdog.look(time.monotonic(), sight):
            self._hang("it made no progress")
        elif sight.is_asked:
            self._tick = asyncio.get_running_loop().call_later(self._watchdog.tick_s, self._look)

    def _sight(self) -> Sight:
        link = self.link
        is_pinged = self._ping is not None and not self._ping.done()
        return Sight(
            board=self._process.board.read(),
            n_frames=link.n_frames,
            n_engine_frames=link.n_engine_frames,
            is_engine_asked=bool(link.fingerprints) or is_pinged,
            is_asked=bool(link.streams) or is_pinged,
        )

    def _hang(self, reason: str) -> None:
        self.is_hung = True
        self._process.kill()
        self.link.end(
            WorkerDied("The model's process made no progress; it is being started again.", "send it again"), reason
        )


def used_s(pid: int) -> float | None:
    """Return the processor time that a process has used; None where nobody tells."""
    import psutil

    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.Error:
        return None
    return float(times.user + times.system)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _ignore() -> None:
    """Nobody waits for its death."""
