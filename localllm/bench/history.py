"""Remembers what benchmarks found: one SQLite file in the user's data folder, one row a run.

It holds names, settings and numbers; never a prompt, an answer or an error's text. That it cannot be
written is told in a sentence and fails nothing. Only the user may read it (0600).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from localllm.bench.compare.cell import PERCENTILES, Cell
from localllm.bench.compare.read import cells_of_document
from localllm.bench.stats import summaries
from localllm.errors import Unavailable, pasteable
from localllm.models.disk import files
from localllm.models.store import default_home

VERSION = 1
FILE_NAME = "bench-history.sqlite"
WAIT_S = 5.0
MAIN = (
    *("ttft_p50", "ttft_p95", "tpot_p50", "itl_p95", "e2e_p50"),
    *("output_throughput", "goodput", "error", "peak_memory"),
)
"""What is kept of a serving run; of an engine's test its rate, or time."""

_NOT_IN_KEY = ("build_commit", "backends", "tokens counted by")
_TABLE = """
    CREATE TABLE IF NOT EXISTS run (
        id INTEGER PRIMARY KEY, at TEXT NOT NULL, tool TEXT NOT NULL, model TEXT NOT NULL, name TEXT NOT NULL,
        facts TEXT NOT NULL, measures TEXT NOT NULL, fingerprint_id TEXT NOT NULL, file TEXT, doubtful INTEGER NOT NULL,
        comparable TEXT NOT NULL
    )
"""


@dataclass(frozen=True, slots=True)
class Entry:
    """One run of a workload at a load, or all tests of an engine.

    `at`: UTC, ISO 8601. `tool`: "bench serve", "bench run" or "bench engine". `name`: workload, cache
    and load, or how many tests. `measures` by name, in their own units (measures.py; a test: tokens a
    second). `is_doubtful`: interrupted or disturbed. `changes`: of each measure since the last run
    with the same machine, model and settings that was not doubtful, as a share of it; {} where there is none.
    """

    at: str
    tool: str
    model: str
    name: str
    facts: Mapping[str, str]
    measures: Mapping[str, float]
    fingerprint_id: str
    file: str | None
    is_doubtful: bool
    changes: Mapping[str, float]


def remember(document: Mapping[str, Any], file: Path | None = None) -> None:
    """Add what a document of `bench serve`, `run` or `engine` holds. `file`: where it was written.

    Raises: LocalLLMError where it cannot be kept, whatever the reason: a note, for the benchmark is done.
    """
    try:
        cells = _runs([cell for cell in cells_of_document(document, "") if _measures(cell)])
        at = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        rows = [_row(cell, at, file) for cell in cells]
        if rows:
            with _written(_path()) as base:
                base.executemany(f"INSERT INTO run VALUES (NULL{', ?' * len(rows[0])})", rows)
    except (OSError, sqlite3.Error, ValueError) as error:
        raise _unusable("", error) from None


def entries(model: str = "") -> list[Entry]:
    """Return what is remembered, newest first, of models whose name contains `model` (in any case).

    Raises Unavailable where the file cannot be read.
    """
    path = _path()
    if not path.exists():
        return []
    try:
        with _read(path) as base:
            if not _version(base, path):  # a writer has made the file, and nothing in it yet
                return []
            rows = base.execute(
                "SELECT at, tool, model, name, facts, measures, fingerprint_id, file, doubtful, comparable "
                "FROM run ORDER BY id"
            ).fetchall()
        found = list(_with_changes(rows))
    except (OSError, sqlite3.Error, ValueError, TypeError, AttributeError) as error:
        raise _unusable("The history cannot be read: ", error) from None
    return [entry for entry in reversed(found) if model.casefold() in entry.model.casefold()]


def _path() -> Path:
    return default_home() / FILE_NAME


@contextlib.contextmanager
def _written(path: Path) -> Iterator[sqlite3.Connection]:
    """Yield the database in one transaction, made where there is none. Raises sqlite3.Error, OSError, Unavailable."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | files.OWN, 0o600))
    if not files.is_regular(path):
        raise Unavailable(f"{path} is not a file.", _way_out())
    os.chmod(path, 0o600)
    with contextlib.closing(sqlite3.connect(path, timeout=WAIT_S)) as base, base:
        base.execute("BEGIN IMMEDIATE")
        if _version(base, path) < VERSION:
            base.execute(_TABLE)
            base.execute(f"PRAGMA user_version = {VERSION}")
        yield base


@contextlib.contextmanager
def _read(path: Path) -> Iterator[sqlite3.Connection]:
    """Yield the database; it is not changed, but where a killed writer left half of a run. Raises as `_written`."""
    if not path.is_file():  # opening a pipe would wait for who writes into it
        raise Unavailable(f"{path} is not a file.", _way_out())
    uri = path.as_uri()
    with contextlib.closing(sqlite3.connect(f"{uri}?mode=ro", uri=True, timeout=WAIT_S)) as base:
        if not _must_be_mended(base):
            yield base
            return
    with contextlib.closing(sqlite3.connect(f"{uri}?mode=rw", uri=True, timeout=WAIT_S)) as base:
        yield base


def _must_be_mended(base: sqlite3.Connection) -> bool:
    """Say whether a writer was killed half-way: SQLite takes its half back before anything can be read."""
    try:
        base.execute("PRAGMA user_version")
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_READONLY:
            raise
        return True
    return False


def _version(base: sqlite3.Connection, path: Path) -> int:
    (version,) = base.execute("PRAGMA user_version").fetchone()
    if version > VERSION:
        raise Unavailable(f"{path} was written by a newer localllm.", "pip install -U localllm")
    return int(version)


def _row(cell: Cell, at: str, file: Path | None) -> tuple[Any, ...]:
    return (
        at,
        cell.origin.tool,
        cell.model.name,
        cell.name,
        json.dumps(dict(cell.facts)),
        json.dumps(_measures(cell)),
        cell.origin.fingerprint_id,
        None if file is None else os.path.abspath(file),
        int(bool(cell.doubts)),
        _comparable(cell),
    )


def _runs(cells: Sequence[Cell]) -> list[Cell]:
    """Return the cells with an engine's tests as one, for they are one run."""
    tests = [cell for cell in cells if cell.tests]
    runs = [cell for cell in cells if not cell.tests]
    if tests:
        merged = replace(
            tests[0],
            name=f"{len(tests)} tests",
            tests={name: of for cell in tests for name, of in cell.tests.items()},
            samples={name: found for cell in tests for name, found in cell.samples.items()},
            values={name: found for cell in tests for name, found in cell.values.items()},
            doubts=tuple(doubt for cell in tests for doubt in cell.doubts),
        )
        runs.append(merged)
    return runs


def _measures(cell: Cell) -> dict[str, float]:
    """Return the main measures of a cell; of several rounds their mean."""
    found: dict[str, float] = {}
    for test in cell.tests:
        values = [value for requests in cell.samples.get(test, ()) for request in requests for value in request]
        values = values or list(cell.values.get(test, ()))
        if values:
            found[test] = summaries.percentile(values, PERCENTILES["p50"])
    return found | {name: summaries.mean(cell.values[name]) for name in MAIN if cell.values.get(name)}


def _comparable(cell: Cell) -> str:
    """Return what two runs share that one can be measured against the other."""
    settings = {name: value for name, value in cell.settings.items() if name not in _NOT_IN_KEY}
    what = [cell.origin.tool, "" if cell.tests else cell.name, dict(cell.facts), settings]
    which = [cell.origin.fingerprint_id, cell.origin.machine, list(cell.model.sha256) or cell.model.name]
    return hashlib.sha256(json.dumps([what, which], sort_keys=True).encode()).hexdigest()[:16]


def _with_changes(rows: Sequence[tuple[Any, ...]]) -> Iterator[Entry]:
    """Yield the rows' entries, oldest first, each with what changed since the last that is like it."""
    last: dict[str, Mapping[str, float]] = {}
    for *texts, facts, measures, fingerprint_id, file, doubtful, comparable in rows:
        found: dict[str, float] = {str(name): float(value) for name, value in json.loads(measures).items()}
        before = last.get(comparable, {})
        changes = {name: value / before[name] - 1 for name, value in found.items() if before.get(name)}
        if not doubtful:
            last[comparable] = found
        at, tool, model, name = (str(text) for text in texts)
        yield Entry(at, tool, model, name, json.loads(facts), found, fingerprint_id, file, bool(doubtful), changes)


def _unusable(begun: str, error: Exception) -> Unavailable:
    """Return a failure of the file as a sentence; only a damaged one is to be moved away."""
    if isinstance(error, OSError) and error.strerror:
        return Unavailable(f"{begun}{error.strerror}: {error.filename or _path()}.")
    if isinstance(error, sqlite3.OperationalError):
        return Unavailable(f"{begun}{_path()}: {error}.")
    return Unavailable(f"{begun}{_path()} is damaged ({error}).", _way_out())


def _way_out() -> str:
    return pasteable("mv", str(_path()), f"{_path()}.bad")
