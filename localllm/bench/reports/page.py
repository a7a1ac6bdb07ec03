"""What a report says, apart from how it is laid out: sections of sentences, tables and charts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from localllm.bench.reports.charts import Chart

Row: TypeAlias = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Table:
    """Cells as text: `head` and rows of its length.

    The first `n_left` columns hold words, and the last where `ends_in_words`; the rest numbers.
    """

    head: Row
    rows: tuple[Row, ...]
    n_left: int = 1
    caption: str = ""
    ends_in_words: bool = False

    def is_words(self, column: int) -> bool:
        """Say whether a column holds words: they begin at its left, numbers end at its right."""
        return column < self.n_left or (self.ends_in_words and column == len(self.head) - 1)


@dataclass(frozen=True, slots=True)
class Section:
    """One part of a report. `is_detail`: left out on a terminal."""

    title: str
    sentences: tuple[str, ...] = ()
    tables: tuple[Table, ...] = ()
    charts: tuple[Chart, ...] = ()
    bullets: tuple[str, ...] = ()
    is_detail: bool = False

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to show."""
        return not (self.sentences or self.bullets or self.charts or any(table.rows for table in self.tables))


@dataclass(frozen=True, slots=True)
class Page:
    """A report. `facts`: lines under its title; `alarms`: what a reader must know first."""

    title: str
    facts: tuple[str, ...] = ()
    alarms: tuple[str, ...] = ()
    sections: Sequence[Section] = field(default_factory=tuple)
