"""A report as one HTML file: no script, nothing from a network, light and dark, fit to print."""

from __future__ import annotations

from collections.abc import Iterator

from localllm.bench.reports.chart_table import chart_table
from localllm.bench.reports.charts import Chart, Lines, Spreads
from localllm.bench.reports.page import Page, Row, Section, Table
from localllm.bench.reports.plots import svg, swatch
from localllm.bench.reports.safe import html_text
from localllm.bench.reports.style import STYLE

NOTHING = "Nothing was measured that could be plotted."
_GOOD, _BAD = ("holds", "met"), ("FAILED", "NOT MET")


def html(page: Page) -> str:
    """Return the report with its plots, and under each plot its numbers."""
    title = html_text(page.title)
    body = "".join([*_head(page), *(part for section in page.sections for part in _section(section))])
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{title}</title>\n<style>\n{STYLE}</style></head>\n<body><main>\n{body}</main></body></html>\n"
    )


def _head(page: Page) -> Iterator[str]:
    yield f"<header><h1>{html_text(page.title)}</h1>\n"
    yield from (f'<p class="fact">{html_text(fact)}</p>\n' for fact in page.facts)
    yield from (f'<p class="alarm" role="note">{html_text(alarm)}</p>\n' for alarm in page.alarms)
    yield "</header>\n"


def _section(section: Section) -> Iterator[str]:
    is_of_plots = section.title.startswith("Plots")
    if section.is_empty and not is_of_plots:
        return
    yield f"<section><h2>{html_text(section.title)}</h2>\n"
    yield from (f"<p>{html_text(sentence)}</p>\n" for sentence in section.sentences)
    if section.bullets:
        yield f"<ul>{''.join(f'<li>{html_text(bullet)}</li>' for bullet in section.bullets)}</ul>\n"
    yield from (_table(table) for table in section.tables if table.rows)
    figures = [found for chart in section.charts if (found := _figure(chart))]
    if figures:
        yield f'<div class="figures">\n{"".join(figures)}</div>\n'
    elif is_of_plots:
        yield f"<p>{NOTHING}</p>\n"
    yield "</section>\n"


def _figure(chart: Chart) -> str:
    drawn = svg(chart)
    if not drawn:
        return ""
    unit = chart.y_title if isinstance(chart, Lines) else chart.x_title
    return (
        f"<figure><figcaption>{html_text(chart.title)} <span>{html_text(unit)}</span></figcaption>"
        f"{_legend(chart)}\n{drawn}\n{_table(chart_table(chart), 'numbers')}</figure>\n"
    )


def _legend(chart: Chart) -> str:
    if isinstance(chart, Spreads):
        return '<p class="legend">marker: median, thick: to p95, thin: to p99</p>'
    if len(chart.series) < 2:
        return ""
    items = [f"<li>{swatch(series.slot)}{html_text(series.name)}</li>" for series in chart.series if series.points]
    return f'<ul class="legend">{"".join(items)}</ul>'


def _table(table: Table, classes: str = "") -> str:
    caption = f"<caption>{html_text(table.caption)}</caption>" if table.caption else ""
    head = f"<thead>{_row(table, table.head, 'th')}</thead>" if any(table.head) else ""
    rows = "".join(_row(table, row, "td") for row in table.rows)
    return f'<div class="scroll"><table class="{classes}">{caption}{head}<tbody>{rows}</tbody></table></div>\n'


def _row(table: Table, row: Row, tag: str) -> str:
    return f"<tr>{''.join(_cells(table, row, tag))}</tr>"


def _cells(table: Table, row: Row, tag: str) -> Iterator[str]:
    for i, cell in enumerate(row):
        kinds = [] if table.is_words(i) else ["n"]
        kinds += ["good"] if cell in _GOOD else ["bad"] if cell in _BAD else []
        attribute = f' class="{" ".join(kinds)}"' if kinds else ""
        yield f"<{tag}{attribute}>{html_text(cell)}</{tag}>"
