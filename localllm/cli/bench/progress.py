"""Progress of a measurement at a terminal: one line on stderr that leaves no trace; nothing anywhere else."""

from __future__ import annotations

import os
import sys
from types import TracebackType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

REFRESH_PER_S = 2
"""Drawing is CPU time of the client that measures: twice a second is some thousandths of a core."""


class Shown:
    """What is done, how much of it, and how long it will take; a context manager. Called from any thread."""

    def __init__(self, *, quiet: bool) -> None:
        is_terminal = sys.stderr is not None and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self._progress: Progress | None = _progress() if is_terminal and not quiet else None
        self._task: TaskID | None = None
        self._what = ""

    def __enter__(self) -> Self:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()

    def __call__(self, what: str, done: int, total: int) -> None:
        """Show it. `what` up to its colon is one piece of work; `total` 0: not known."""
        if self._progress is None:
            return
        work = what.partition(": ")[0]
        if self._task is None or work != self._what:
            if self._task is not None:
                self._progress.remove_task(self._task)
            self._what = work
            self._task = self._progress.add_task(what, total=total or None)
        self._progress.update(self._task, description=what, completed=done, total=total or None)


def _progress() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, Task, TextColumn, TimeRemainingColumn
    from rich.text import Text

    class Plain(Console):
        """Leaves the cursor alone: a second Ctrl-C ends the process without anybody to show it again."""

        def show_cursor(self, show: bool = True) -> bool:
            """Change nothing."""
            return False

    class Known(MofNCompleteColumn):
        """Says nothing of what has no known end."""

        def render(self, task: Task) -> Text:
            """Return how much is done of how much."""
            return Text() if task.total is None else super().render(task)

    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=20),
        Known(),
        TimeRemainingColumn(),
        console=Plain(file=sys.stderr),
        refresh_per_second=REFRESH_PER_S,
        transient=True,
    )
