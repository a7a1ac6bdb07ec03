"""The numbers that a plot shows, as a table."""

from __future__ import annotations

from localllm.bench.reports.charts import Chart, Ecdf, Lines, Series, Spreads
from localllm.bench.reports.page import Row, Table
from localllm.bench.reports.words import NONE, number

_SHARES = (0.05, 0.25, 0.5, 0.75, 0.95, 0.99)


def chart_table(chart: Chart) -> Table:
    """Return a plot's numbers; a distribution's at some shares of its samples."""
    match chart:
        case Lines():
            loads = sorted({x for series in chart.series for x, _ in series.points})
            values = [dict(series.points) for series in chart.series]
            rows = tuple((f"{x:g}", *(number(of.get(x)) for of in values)) for x in loads)
            return Table((chart.x_title, *(series.name or chart.y_title for series in chart.series)), rows)
        case Ecdf():
            head = (chart.x_title, *(f"p{100 * share:g}" for share in _SHARES))
            return Table(head, tuple(_at_shares(series) for series in chart.series))
        case Spreads():
            rows = tuple((row.name, number(row.p50), number(row.p95), number(row.p99)) for row in chart.rows)
            return Table((chart.x_title, "p50", "p95", "p99"), rows)


def _at_shares(series: Series) -> Row:
    found = [next((x for x, reached in series.points if reached >= share), None) for share in _SHARES]
    return series.name or NONE, *(number(value) for value in found)
