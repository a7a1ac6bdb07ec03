"""`localllm bench history`: what was measured here before, and how it moved."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from localllm.cli.options import Json
from localllm.cli.output import Answer, Notes

if TYPE_CHECKING:
    from localllm.bench.history import Entry

_HEAD = ("WHEN", "WHAT", "MODEL", "RUN", "FOUND", "SINCE THE LAST LIKE IT", "FILE")


def history(
    model: Annotated[str, typer.Argument(metavar="[MODEL]", help="Only models whose name contains this.")] = "",
    json: Json = False,
) -> None:
    """Show what was measured before, newest first.

    Each beside the last run of the same on this machine, with the same model and settings; whether a change is more
    than chance, `bench compare` tells.
    """
    from localllm.bench.history import entries

    found = entries(model)
    if json:
        Answer().document({"runs": [_document(entry) for entry in found]})
    elif found:
        Answer().write(_listing(found))
    else:
        Notes().say(f"nothing measured yet{f' of {model}' if model else ''}: localllm bench engine")


def _document(entry: Entry) -> dict[str, object]:
    return {
        "at": entry.at,
        "what": entry.tool,
        "model": entry.model,
        "run": entry.name,
        "facts": dict(entry.facts),
        "measures": dict(entry.measures),
        "changes": dict(entry.changes),
        "fingerprint_id": entry.fingerprint_id or None,
        "file": entry.file,
        "doubtful": entry.is_doubtful,
    }


def _listing(found: Sequence[Entry]) -> str:
    from localllm.cli.tables import table

    return table(_HEAD, [_row(entry) for entry in found])


def _row(entry: Entry) -> tuple[str, ...]:
    from pathlib import PurePath

    when = entry.at.replace("T", " ").removesuffix("Z")[:16]
    shown = _shown(entry)
    changes = [f"{name} {_change(entry.changes[name])}" for name in shown if name in entry.changes]
    return (
        when,
        entry.tool + (" (doubtful)" if entry.is_doubtful else ""),
        PurePath(entry.model).name if PurePath(entry.model).is_absolute() else entry.model,
        entry.name,
        ", ".join(f"{name} {_value(name, entry.measures[name])}" for name in shown),
        ", ".join(changes) or "-",
        PurePath(entry.file).name if entry.file else "-",
    )


def _shown(entry: Entry) -> list[str]:
    """Return the measures that a line has room for."""
    few = [name for name in ("ttft_p95", "tpot_p50", "output_throughput") if name in entry.measures]
    return few or list(entry.measures)[:3]


def _value(name: str, value: float) -> str:
    from localllm.bench.compare.cell import measure_named, rate_of_test, shown, time_of_test
    from localllm.errors import UsageError

    try:
        of = measure_named(name, [])
    except UsageError:
        of = time_of_test(name) if name.startswith("start ") else rate_of_test(name)
    return shown(of, value)


def _change(change: float) -> str:
    if abs(change) < 0.0005:
        return "as before"
    return f"{100 * change:+.1f}%"
