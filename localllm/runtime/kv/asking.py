"""Asks the disk on threads of their own: a folder that does not answer any more holds up nobody for long.

No call of the system that looks into a folder can be given a limit, so a thread may be lost in it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TypeAlias, TypeVar

logger = logging.getLogger("localllm.runtime.kv")

T = TypeVar("T")
Tick: TypeAlias = Callable[[], None]
"""Called after each answer of the disk; raises where nobody waits for the next one any more."""

STEP_S = 0.5  # without any answer of the disk, after which it is asked no more
ALL_S = 2.0  # that somebody waits altogether
_LAST_STEP_S = 0.5  # that closing waits for the step at work


class _GivenUp(Exception):
    """Nobody waits for the answer any more."""


class _Question:
    """What is asked, and what became of it."""

    def __init__(self, work: Callable[[Tick], object]) -> None:
        self.work = work
        self.answer: list[object] = []  # at most one
        self.is_over = self.is_given_up = False


class Asker:
    """One thread that answers questions to the disk, one after another. Thread safe.

    Once a step has been waited for in vain, nobody asks until it has come to its end.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._questions = deque[_Question]()
        self._n_steps = 0
        self._stuck_at = -1
        self._is_closed = False
        self._thread: threading.Thread | None = None

    @property
    def is_resting(self) -> bool:
        """Say whether the disk still owes the answer to a step that was waited for in vain."""
        return self._stuck_at == self._n_steps

    def ask(self, work: Callable[[Tick], T]) -> T | None:
        """Return what `work` returns; None where the disk takes too long, or took too long before, or it failed."""
        question = _Question(work)
        end_s = time.monotonic() + ALL_S
        with self._changed:
            if self._is_closed or self.is_resting:
                return None
            self._questions.append(question)
            self._start()
            while not question.is_over and not question.is_given_up:
                n_steps, left_s = self._n_steps, end_s - time.monotonic()
                self._changed.wait_for(lambda: question.is_over or self._is_closed, min(STEP_S, left_s))
                is_stuck = self._n_steps == n_steps and not question.is_over and not self._is_closed
                if is_stuck:
                    self._stuck_at = n_steps
                    logger.warning(
                        "the disk does not answer, and nothing that is kept there is asked for until it does"
                    )
                question.is_given_up = is_stuck or self._is_closed or time.monotonic() >= end_s
        return question.answer[0] if question.is_over and question.answer else None  # type: ignore[return-value]

    def close(self) -> None:
        """End the thread, unless the disk holds it; nobody waits for an answer any more. Idempotent."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(_LAST_STEP_S)

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="localllm-kv-ask", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._questions and not self._is_closed:
                    self._changed.wait()
                if self._is_closed:
                    return
                question = self._questions.popleft()
            self._answer(question)
            del question  # and with it what it holds

    def _answer(self, question: _Question) -> None:
        try:
            if not question.is_given_up:
                question.answer.append(question.work(lambda: self._step(question)))
        except _GivenUp:
            pass
        except Exception as error:  # whatever it is, what comes after must still be answered
            logger.warning("what is kept on disk could not be asked for: %s", type(error).__name__)
        with self._changed:
            self._n_steps += 1
            question.is_over = True
            self._changed.notify_all()

    def _step(self, question: _Question) -> None:
        self._n_steps += 1
        if question.is_given_up:
            raise _GivenUp


def ask_once(question: Callable[[], T], limit_s: float) -> T:
    """Return what `question` returns, asked on a thread of its own. Raises: TimeoutError, and what it raises."""
    answers, errors, is_over = list[T](), list[BaseException](), threading.Event()

    def run() -> None:
        try:
            answers.append(question())
        except BaseException as error:
            errors.append(error)
        is_over.set()

    threading.Thread(target=run, name="localllm-kv-ask-once", daemon=True).start()
    if not is_over.wait(limit_s):
        raise TimeoutError("it does not answer")
    if errors:
        raise errors[0]
    return answers[0]
