"""What a process that owns an engine may see and decide of its work; in process, nothing is hooked in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # a worker names its hooks before it has loaded anything
    from localllm.runtime.engine import Engine
    from localllm.runtime.sequence import RequestRun


class StepWatch(Protocol):
    """Is told of every step by the engine's thread, so that whoever finds it dead knows what it was doing."""

    def began(self, runs: tuple[RequestRun, ...], expected_s: float | None) -> None:
        """A step for these requests is about to enter native code; it should take `expected_s`."""
        ...

    def ended(self) -> None:
        """The step came back, well or not."""
        ...


class NoWatch:
    """Nobody looks."""

    def began(self, runs: tuple[RequestRun, ...], expected_s: float | None) -> None:
        """Nothing is kept."""

    def ended(self) -> None:
        """Nothing is kept."""


NO_WATCH = NoWatch()


def admit_all(run: RequestRun) -> None:
    """Let every request in."""


def nothing_to_send() -> None:
    """Readers in this process were told already."""


def as_it_is(engine: Engine) -> Engine:
    """Return the engine itself."""
    return engine


@dataclass(frozen=True, slots=True)
class Hooks:
    """`gate`: sees a prepared request before it is queued; raises to refuse it, or sets `run.is_lone`.

    `published`: called by the engine's thread after events were handed to their readers, at most a
    few times a step. `wrap_engine`: called once, with the engine that was opened.
    """

    watch: StepWatch = NO_WATCH
    gate: Callable[[RequestRun], None] = admit_all
    published: Callable[[], None] = nothing_to_send
    wrap_engine: Callable[[Engine], Engine] = as_it_is


NO_HOOKS = Hooks()
