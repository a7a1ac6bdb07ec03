"""Chooses what a report plots: latencies and throughput against load, and the distributions behind them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from localllm.bench.reports.cells import Cell, distinct, knee_load, labels
from localllm.bench.reports.charts import Chart, Ecdf, Lines, Series, Spread, Spreads, readable
from localllm.bench.serving.spec import Load

MAX_STEPS = 240
MAX_CURVES = 6
_ECDFS = (
    ("ttfts", "Time to first token", "ttft"),
    ("itls", "Time between pieces", "itl"),
    ("latencies", "Time to the end of the answer", "e2e"),
)


@dataclass(frozen=True, slots=True)
class Panel:
    """Cells that belong into the same plots. `slots`: the style of each series' name."""

    title: str
    cells: tuple[Cell, ...]
    slots: Mapping[str, int]

    def name(self, cell: Cell) -> str:
        """Return which series a cell belongs to."""
        return cell.candidate or cell.cache


def panels(cells: Sequence[Cell]) -> list[Panel]:
    """Return the panels of a document's cells: a workload each; where candidates are compared, each cache apart."""
    found = []
    names = distinct(cell.candidate or cell.cache for cell in cells)
    slots = {name: number for number, name in enumerate(names)}
    for workload in distinct(cell.workload for cell in cells):
        of = [cell for cell in cells if cell.workload == workload]
        if not any(cell.candidate for cell in of):
            found.append(Panel(workload, tuple(of), slots))
            continue
        for cache in distinct(cell.cache for cell in of):
            found.append(Panel(f"{workload}, {cache}", tuple(cell for cell in of if cell.cache == cache), slots))
    return found


def charts(panel: Panel) -> tuple[Chart, ...]:
    """Return what a panel plots; () where nothing was measured."""
    measured = [cell for cell in panel.cells if cell.used]
    found: list[Chart] = []
    for x_title, of in (("clients", _closed(measured)), ("requests offered a second", _open(measured))):
        if len({_x(cell.load) for cell in of}) > 1:
            found += _against_load(panel, of, x_title)
    if not found and measured:
        found += _spreads(panel, measured)
    found += _distributions(panel, measured) if measured else ()
    return tuple(readable(chart) for chart in found)


def _closed(cells: Sequence[Cell]) -> list[Cell]:
    return [cell for cell in cells if cell.load.concurrency is not None]


def _open(cells: Sequence[Cell]) -> list[Cell]:
    return [cell for cell in cells if cell.load.rate_per_s is not None]


def _x(load: Load) -> float:
    return float(load.concurrency if load.concurrency is not None else load.rate_per_s or 0.0)


def _against_load(panel: Panel, cells: Sequence[Cell], x_title: str) -> Iterator[Chart]:
    for name, words in (("ttft_p50", "Time to first token, median"), ("ttft_p95", "Time to first token, p95")):
        series = tuple(_series(panel, cells, name))
        yield Lines(words, x_title, "ms", series, *_limit(cells, name))
    yield Lines("Output tokens a second", x_title, "tokens/s", tuple(_with_knees(panel, cells)))


def _series(panel: Panel, cells: Sequence[Cell], measure: str) -> Iterator[Series]:
    for name, of in _by_name(panel, cells).items():
        points = [(_x(cell.load), value) for cell in of if (value := cell.value(measure)) is not None]
        if points:
            yield Series(name, tuple(sorted(points)), panel.slots[name])


def _with_knees(panel: Panel, cells: Sequence[Cell]) -> Iterator[Series]:
    by_name = _by_name(panel, cells)
    for series in _series(panel, cells, "output_throughput"):
        knee = knee_load(by_name[series.name])
        if knee is None:
            yield series
        else:
            yield Series(series.name, series.points, series.slot, _x(knee[0]), "knee")


def _by_name(panel: Panel, cells: Sequence[Cell]) -> dict[str, list[Cell]]:
    names = distinct(panel.name(cell) for cell in cells)
    return {name: [cell for cell in cells if panel.name(cell) == name] for name in names}


def _spreads(panel: Panel, cells: Sequence[Cell]) -> Iterator[Chart]:
    """Yield latencies side by side where there is one load alone."""
    words = labels(cells) if len(cells) > 1 else [panel.name(cells[0])]
    for base, title in (("ttft", "Time to first token"), ("tpot", "Time per output token"), ("e2e", "End to end")):
        rows = []
        for cell, name in zip(cells, words, strict=True):
            p50, p95, p99 = (cell.value(f"{base}_{statistic}") for statistic in ("p50", "p95", "p99"))
            if p50 is not None and p95 is not None and p99 is not None:
                rows.append(Spread(name, p50, p95, p99, panel.slots[panel.name(cell)]))
        if rows:
            yield Spreads(title, "ms", tuple(rows), *_limit(cells, f"{base}_p95"))


def _distributions(panel: Panel, cells: Sequence[Cell]) -> Iterator[Chart]:
    chosen = _chosen(cells)
    for where, of in chosen:
        words = labels(of) if len(of) > 1 else [panel.name(of[0])]
        suffix = f", {where}" if len(chosen) > 1 else ""
        by_load = len({panel.name(cell) for cell in of}) < len(of)
        for field, title, base in _ECDFS:
            series = [
                Series(name, steps, number if by_load else panel.slots[panel.name(cell)])
                for number, (cell, name) in enumerate(zip(of, words, strict=True))
                if (steps := _steps([1e3 * value for value in cell.samples(field)]))
            ]
            if series:
                yield Ecdf(title + suffix, "ms", tuple(series), *_limit(of, f"{base}_p95"))


def _chosen(cells: Sequence[Cell]) -> list[tuple[str, list[Cell]]]:
    """Return which cells' distributions are drawn together, and what they share.

    Candidates: those at the least load and those at the most. Runs of one server: those of a load, or of each
    cache those at several loads.
    """
    loads = distinct(str(cell.load) for cell in cells)
    if any(cell.candidate for cell in cells) or len(loads) == 1:
        ends = distinct((loads[0], loads[-1]))
        return [(load, _picked([cell for cell in cells if str(cell.load) == load])) for load in ends]
    caches = distinct(cell.cache for cell in cells)
    return [(cache, _picked([cell for cell in cells if cell.cache == cache])) for cache in caches]


def _picked(cells: Sequence[Cell]) -> list[Cell]:
    """Return the cells; of more than MAX_CURVES the first, the last and those evenly between."""
    picks = np.unique(np.linspace(0, len(cells) - 1, min(len(cells), MAX_CURVES)).round().astype(int))
    return [cells[int(pick)] for pick in picks]


def _steps(samples_ms: Sequence[float]) -> tuple[tuple[float, float], ...]:
    """Return the points (value, share at or below it) of an empirical distribution; evenly thinned where many."""
    if not samples_ms:
        return ()
    values = np.sort(np.asarray(samples_ms, dtype=np.float64))
    n = len(values)
    picks = np.unique(np.linspace(0, n - 1, min(n, MAX_STEPS)).round().astype(int))
    return tuple((float(values[pick]), float(pick + 1) / n) for pick in picks)


def _limit(cells: Sequence[Cell], measure: str) -> tuple[float | None, str]:
    """Return the bound that an SLO of these cells' runs sets for a measure, and its name; (None, "") without one."""
    for cell in cells:
        for run in cell.used:
            for verdict in (run.get("slo") or {}).get("verdicts", ()):
                if verdict["measure"] == measure:
                    return float(verdict["limit"]), "SLO"
    return None, ""
