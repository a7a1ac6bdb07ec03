"""A report as Markdown, with everything but the plots."""

from __future__ import annotations

from collections.abc import Iterator

from localllm.bench.reports.page import Page, Section, Table
from localllm.bench.reports.safe import markdown_text

MAX_PADDED = 60
"""Columns are laid out to so many characters; a longer cell stands out of its column."""


def markdown(page: Page) -> str:
    """Return the report: GitHub's Markdown, tables readable as text too."""
    return "\n\n".join(_parts(page)) + "\n"


def _parts(page: Page) -> Iterator[str]:
    yield f"# {markdown_text(page.title)}"
    yield from (f"> **{markdown_text(alarm)}**" for alarm in page.alarms)
    yield from map(markdown_text, page.facts)
    for section in page.sections:
        if not section.is_empty:
            yield from _section(section)


def _section(section: Section) -> Iterator[str]:
    tables = [table for table in section.tables if table.rows]
    if not (section.bullets or tables) and (section.charts or not section.sentences):
        return  # plots alone, and what is said of them
    yield f"## {markdown_text(section.title)}"
    yield from map(markdown_text, section.sentences)
    if section.bullets:
        yield "\n".join(f"- {markdown_text(bullet)}" for bullet in section.bullets)
    for table in tables:
        if table.caption:
            yield markdown_text(table.caption)
        yield _table(table)


def _table(table: Table) -> str:
    columns = []
    for i, cells in enumerate(zip(table.head, *table.rows, strict=True)):
        texts = [markdown_text(cell) for cell in cells]
        width = min(max(3, *map(len, texts)), MAX_PADDED)
        is_left = table.is_words(i)
        rule = "-" * width if is_left else "-" * (width - 1) + ":"
        laid = [cell.ljust(width) if is_left else cell.rjust(width) for cell in texts]
        columns.append([laid[0], rule, *laid[1:]])
    return "\n".join(f"| {' | '.join(line)} |" for line in zip(*columns, strict=True))
