"""A comparison as a page for terminals and Markdown, and as one JSON document."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, Literal, TypeAlias

from localllm.bench.compare.cell import Cell, Origin, Requests, shown
from localllm.bench.compare.change import RUN_SPREAD
from localllm.bench.compare.comparison import ALPHA, CellComparison, Comparison, Line, Verdict
from localllm.bench.compare.fail_on import Ruling, change_text, interval_text
from localllm.bench.reports.document import json_text
from localllm.bench.reports.markdown import markdown
from localllm.bench.reports.page import Page, Row, Section, Table
from localllm.bench.reports.text import text

Form: TypeAlias = Literal["text", "md", "json"]

VERSION = 1
WIDTH = 110
_HEAD = ("measure", "A", "B", "change", "95 % interval", "p", "verdict")


@dataclass(frozen=True, slots=True)
class Report:
    """A comparison and what became of the rules that were set for it."""

    comparison: Comparison
    rulings: tuple[Ruling, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether no rule failed."""
        return not any(ruling.has_failed for ruling in self.rulings)


def render(report: Report, form: Form, width: int = WIDTH) -> str:
    """Return the report in one form, with its last line ended. `width`: of text alone."""
    match form:
        case "json":
            return json_text(document(report))
        case "md":
            return markdown(page(report))
        case "text":
            return text(page(report), width)


def page(report: Report) -> Page:
    """Return the report as a page."""
    found = report.comparison
    rules = (Section("rules", tables=(_rules(report.rulings),)),) if report.rulings else ()
    return Page(
        title="localllm bench compare",
        facts=(_file("A", found.a), _file("B", found.b), *found.notes),
        alarms=found.warnings,
        sections=(*_sections(found.cells), *rules, Section("how", sentences=tuple(_method(found)))),
    )


def document(report: Report) -> dict[str, Any]:
    """Return the report as plain values; `change`, `low` and `high` are shares of A where `is_relative`."""
    found = report.comparison
    return {
        "localllm_bench_compare": VERSION,
        "a": _origin(found.a),
        "b": _origin(found.b),
        "warnings": found.warnings,
        "notes": found.notes,
        "cells": [_cell_document(cell) for cell in found.cells],
        "method": list(_method(found)),
        "rules": [
            {
                "text": one.rule.text,
                "cell": one.cell,
                "failed": one.has_failed,
                "value": one.value,
                "bound": one.bound,
                "why": one.why,
            }
            for one in report.rulings
        ],
        "passed": report.passed,
    }


def _origin(origin: Origin) -> dict[str, Any]:
    return {"file": origin.path, "tool": origin.tool, "fingerprint_id": origin.fingerprint_id or None}


def _cell_document(cell: CellComparison) -> dict[str, Any]:
    sides = {"a": dict(cell.a.facts), "b": dict(cell.b.facts)}
    return {"name": cell.name, "facts": sides, "lines": [_line_document(line) for line in cell.lines]}


def _line_document(line: Line) -> dict[str, Any]:
    found = line.change
    return {
        "measure": found.measure.name,
        "unit": found.measure.kind.value,
        "lower_is_better": found.measure.lower_is_better,
        "a": found.a,
        "b": found.b,
        "n_a": found.n_a,
        "n_b": found.n_b,
        "n_blocks": found.n_blocks,
        "is_paired": found.is_paired,
        "change": found.change,
        "is_relative": found.is_relative,
        "low": found.low,
        "high": found.high,
        "p": found.p,
        "p_adjusted": line.p_adjusted,
        "p_mann_whitney": found.p_ranks,
        "verdict": line.verdict.value,
    }


def _file(letter: str, origin: Origin) -> str:
    return f"{letter}: {PurePath(origin.path).name} ({origin.tool})"


def _sections(cells: Sequence[CellComparison]) -> Iterator[Section]:
    """Yield a section a cell; an engine's tests, of one line each, share one."""
    tests = [cell for cell in cells if cell.a.tests]
    if tests:
        rows = tuple(_row(line, cell.name) for cell in tests for line in cell.lines)
        yield Section("tests", tables=(Table(("test", *_HEAD[1:]), rows),))
    for cell in cells:
        if not cell.a.tests:
            rows = tuple(_row(line, line.change.measure.name) for line in cell.lines)
            yield Section(cell.name, tables=(Table(_HEAD, rows),))


def _row(line: Line, name: str) -> Row:
    found = line.change
    p = "-" if line.p_adjusted is None else _probability(line.p_adjusted)
    return (
        name,
        shown(found.measure, found.a),
        shown(found.measure, found.b),
        change_text(found),
        interval_text(found) or "-",
        p,
        line.verdict.value,
    )


def _probability(p: float) -> str:
    return "< 0.0001" if p < 0.0001 else f"{p:.4f}" if p < 0.001 else f"{p:.3f}"


def _rules(rulings: Sequence[Ruling]) -> Table:
    rows = tuple((one.rule.text, "FAILED" if one.has_failed else "kept", one.cell, one.why) for one in rulings)
    return Table(("rule", "", "where", "why"), rows, n_left=4)


def _method(found: Comparison) -> Iterator[str]:
    """Yield how the numbers came about, in sentences; only what is there."""
    changes = [line.change for cell in found.cells for line in cell.lines]
    tested = [change for change in changes if change.p is not None]
    if tested:
        yield (
            f"A change counts where p is below {ALPHA:g}; p is told as it counts among all {len(tested)} of this "
            "comparison (Benjamini and Hochberg), so that more lines make no more false alarms."
        )
        yield from _blocks_told(found)
    if any(change.is_gated for change in tested):
        yield "A median of unpaired requests must differ by the Mann-Whitney test too."
    if any(line.verdict is Verdict.NOT_TESTED for cell in found.cells for line in cell.lines):
        yield "One value each: how far it varies is not known, so nothing is said of it."


def _blocks_told(found: Comparison) -> Iterator[str]:
    tested = [line.change for cell in found.cells for line in cell.lines if line.change.p is not None]
    one_run = any(len(rounds) == 1 for cell in found.cells for side in (cell.a, cell.b) for rounds in _rounds(side))
    yield "Interval and p: bootstrap over whole rounds, or blocks of consecutive requests, with Student's t."
    if any(change.is_paired for change in tested):
        yield (
            "Both files asked the same requests in the same order: they are compared in pairs, and the change of a "
            "median is the median of the requests' own changes."
        )
    if one_run:
        yield (
            "One run cannot tell how the next would differ: "
            f"{100 * RUN_SPREAD:g}% of spread from run to run is assumed; "
            "rounds (localllm bench run) measure it."
        )


def _rounds(cell: Cell) -> Iterator[tuple[Requests, ...]]:
    yield from cell.samples.values()
