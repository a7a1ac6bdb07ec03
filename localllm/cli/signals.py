"""What ends a command early: Ctrl-C, SIGTERM, SIGHUP and `--timeout`, as one little state machine.

While nothing is being answered, the first signal raises here and now. While an answer runs, it
cancels that, so that what there is can be kept. The second leaves the process at once.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import TypeVar

GRACE_S = 5.0
"""How long a cancelled answer may take to end before the command leaves without it."""

EXIT_CODES = {signal.SIGHUP: 129, signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGALRM: 124}

T = TypeVar("T")


class Stopped(KeyboardInterrupt):
    """A signal ended the work. No Exception, so that no handler of failures swallows it."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number
        self.exit_code = EXIT_CODES[signal.Signals(number)]


class Interrupts:
    """The signal handlers of one command, as a context manager; main thread only.

    `timeout_s` starts to count on entry and covers everything inside. `outlives_answers`: Ctrl-C
    ends an answer, not the command, so it waits for a slow step instead of leaving without it.
    """

    def __init__(self, timeout_s: float | None = None, *, outlives_answers: bool = False) -> None:
        self._timeout_s = timeout_s
        self._outlives_answers = outlives_answers
        self._previous: dict[signal.Signals, object] = {}
        self._cancel: Callable[[], None] | None = None
        self._is_kept = False
        self._is_leaving = False
        self.stopped: Stopped | None = None

    def __enter__(self) -> Interrupts:
        for number in EXIT_CODES:
            # A shell starts background jobs with SIGINT ignored, nohup likewise: leave that as it is.
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._handle)
        if self._timeout_s is not None:
            signal.setitimer(signal.ITIMER_REAL, max(self._timeout_s, 1e-6))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    @contextmanager
    def cancelling(self) -> Iterator[Callable[[Callable[[], None]], None]]:
        """While inside, the first signal is kept in `stopped` and cancels; the second leaves.

        What cancels is handed to the function that is yielded, once there is something to cancel:
        a signal that came before cancels it then.
        """
        self._is_kept = True
        try:
            yield self._cancel_by
        finally:
            self._is_kept, self._cancel = False, None

    def _cancel_by(self, cancel: Callable[[], None]) -> None:
        self._cancel = cancel
        if self.stopped is not None:
            cancel()

    def rearm(self, timeout_s: float | None) -> None:
        """Forget a stop that was dealt with, and let the time limit count anew."""
        self.stopped, self._is_leaving = None, False
        signal.setitimer(signal.ITIMER_REAL, 0 if timeout_s is None else max(timeout_s, 1e-6))

    def _handle(self, number: int, frame: FrameType | None) -> None:
        stop = Stopped(number)
        if not self._is_kept:
            if self._is_leaving:  # raised into what cleans up after the first, it would be mistaken for a failure
                leave(stop.exit_code)
            self._is_leaving = True
            raise stop
        if self.stopped is not None:
            leave((self.stopped if number == signal.SIGALRM else stop).exit_code)
        self.stopped = stop
        if self._cancel is not None:
            self._cancel()
        if number != signal.SIGINT or self._cancel is None or not self._outlives_answers:
            signal.setitimer(signal.ITIMER_REAL, GRACE_S)


def leave(code: int) -> None:
    """Leave the process now, whatever its threads do in native code; what was written is flushed."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            continue
    os._exit(code)


def in_thread(work: Callable[[], T]) -> T:
    """Run `work` in a thread of its own and wait where signals get through; return what it returns.

    A native load cannot be interrupted: when a signal ends the wait, the thread is left behind.
    """
    results: list[T] = []
    failures: list[BaseException] = []
    done = threading.Event()

    def call() -> None:
        try:
            results.append(work())
        except BaseException as error:
            failures.append(error)
        finally:
            done.set()

    threading.Thread(target=call, name="localllm-load", daemon=True).start()
    done.wait()
    if failures:
        raise failures[0]
    return results[0]
