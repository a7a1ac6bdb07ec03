"""What the plots of a report show: series of points with names and units, not yet drawn."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TypeAlias

SECONDS_FROM_MS = 20_000.0


@dataclass(frozen=True, slots=True)
class Series:
    """One line: points (x, y) in order of x. `slot`: which of the styles it has, so that a name looks alike everywhere.

    `marked`: the x of a point that is pointed out, with `mark` as its words.
    """

    name: str
    points: tuple[tuple[float, float], ...]
    slot: int = 0
    marked: float | None = None
    mark: str = ""


@dataclass(frozen=True, slots=True)
class Lines:
    """Values against load. Axis titles hold their units."""

    title: str
    x_title: str
    y_title: str
    series: tuple[Series, ...]
    limit: float | None = None
    limit_name: str = ""


@dataclass(frozen=True, slots=True)
class Ecdf:
    """The share of samples at or below a value: a step line for each series of points (value, share)."""

    title: str
    x_title: str
    series: tuple[Series, ...]
    limit: float | None = None
    limit_name: str = ""


@dataclass(frozen=True, slots=True)
class Spread:
    """One row: the median, and how far p95 and p99 lie above it."""

    name: str
    p50: float
    p95: float
    p99: float
    slot: int = 0


@dataclass(frozen=True, slots=True)
class Spreads:
    """Latencies of several side by side, where there is only one load to show them at."""

    title: str
    x_title: str
    rows: tuple[Spread, ...]
    limit: float | None = None
    limit_name: str = ""


Chart: TypeAlias = Lines | Ecdf | Spreads


def readable(chart: Chart) -> Chart:
    """Return a chart of milliseconds in seconds where its values are many thousands of them; else as it is."""
    limit = None if chart.limit is None else chart.limit / 1e3
    match chart:
        case Lines(y_title="ms") if _most(y for s in chart.series for _, y in s.points) > SECONDS_FROM_MS:
            series = tuple(replace(s, points=tuple((x, y / 1e3) for x, y in s.points)) for s in chart.series)
            return replace(chart, y_title="s", series=series, limit=limit)
        case Ecdf(x_title="ms") if _most(x for s in chart.series for x, _ in s.points) > SECONDS_FROM_MS:
            series = tuple(replace(s, points=tuple((x / 1e3, y) for x, y in s.points)) for s in chart.series)
            return replace(chart, x_title="s", series=series, limit=limit)
        case Spreads(x_title="ms") if _most(row.p99 for row in chart.rows) > SECONDS_FROM_MS:
            rows = tuple(replace(r, p50=r.p50 / 1e3, p95=r.p95 / 1e3, p99=r.p99 / 1e3) for r in chart.rows)
            return replace(chart, x_title="s", rows=rows, limit=limit)
    return chart


def _most(values: Iterable[float]) -> float:
    return max(values, default=0.0)
