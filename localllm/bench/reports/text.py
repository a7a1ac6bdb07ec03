"""A report as text for a terminal: its lines fit 80 to 120 columns, and what matters first stands first."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from localllm.bench.reports.page import Page, Row, Section, Table
from localllm.bench.reports.safe import one_line

WIDTH = 100
_GAP = "  "


def text(page: Page, width: int = WIDTH) -> str:
    """Return the report without its details. `width`: where lines are broken; a table may be wider if it must."""
    parts = ["\n".join(_head(page, width))]
    parts += [found for section in page.sections if (found := _section(section, width))]
    return "\n\n".join(parts) + "\n"


def _head(page: Page, width: int) -> Iterator[str]:
    yield f" {one_line(page.title)} ".center(min(width, 80), "=")
    for alarm in page.alarms:
        yield from _wrapped(f"!! {one_line(alarm)}", width, "!! ")
    for fact in page.facts:
        yield from _wrapped(one_line(fact), width)


def _section(section: Section, width: int) -> str:
    if section.is_detail or section.is_empty:
        return ""
    lines = [f" {one_line(section.title)} ".center(min(width, 80), "-")]
    for sentence in section.sentences:
        lines += _wrapped(one_line(sentence), width)
    for bullet in section.bullets:
        lines += _wrapped(f"- {one_line(bullet)}", width, "  ")
    for table in section.tables:
        if table.rows:
            lines += _table(table, width)
    return "\n".join(lines)


def _wrapped(line: str, width: int, indent: str = "") -> list[str]:
    return textwrap.wrap(line, width, subsequent_indent=indent, break_on_hyphens=False) or [""]


def _table(table: Table, width: int) -> Iterator[str]:
    if table.caption:
        yield one_line(table.caption) + ":"
    rows = [tuple(one_line(cell) for cell in row) for row in table.rows]
    head = tuple(one_line(cell) for cell in table.head)
    heads = _folded(head, rows, width) if any(head) else []
    widths = [max(len(row[i]) for row in (*heads, *rows)) for i in range(len(head))]
    is_of_words = table.n_left > 2 or widths[0] > width / 2
    if widths[0] + len(_GAP) + max(widths[1:], default=0) > width or (_total(widths) > width and is_of_words):
        yield from _stacked(head, rows, width)
        return
    for columns in _blocks(widths, width):
        for row in (*heads, *rows):
            laid = [row[i].ljust(widths[i]) if table.is_words(i) else row[i].rjust(widths[i]) for i in columns]
            yield _GAP.join(laid).rstrip()


def _blocks(widths: Sequence[int], width: int) -> Iterator[list[int]]:
    """Yield the columns that fit beside each other, the first in front of each block."""
    columns = [0]
    for i in range(1, len(widths)):
        if len(columns) > 1 and _total([widths[c] for c in (*columns, i)]) > width:
            yield columns
            columns = [0]
        columns.append(i)
    yield columns


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + len(_GAP) * (len(widths) - 1)


def _folded(head: Row, rows: Sequence[Row], width: int) -> list[Row]:
    """Return the head in as many lines as it takes to fit: its cells are broken at blanks."""
    widest = [max((len(row[i]) for row in rows), default=0) for i in range(len(head))]
    if _total([max(len(cell), size) for cell, size in zip(head, widest, strict=True)]) <= width:
        return [head]
    cells = [
        textwrap.wrap(cell, max(size, 8), break_long_words=False) or [""]
        for cell, size in zip(head, widest, strict=True)
    ]
    n_lines = max(map(len, cells))
    filled = [[""] * (n_lines - len(lines)) + lines for lines in cells]
    return [tuple(lines[n] for lines in filled) for n in range(n_lines)]


def _stacked(head: Row, rows: Sequence[Row], width: int) -> Iterator[str]:
    """Yield each row as lines of its own, for tables that are too wide: commands, reasons."""
    for row in rows:
        yield from _wrapped(row[0], width)
        pairs = [
            f"{name} {cell}".strip() for name, cell in zip(head[1:], row[1:], strict=True) if cell not in ("", "-")
        ]
        for line in textwrap.wrap(", ".join(pairs), width - 4, break_on_hyphens=False):
            yield f"    {line}"
