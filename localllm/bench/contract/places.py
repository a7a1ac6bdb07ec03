"""Where in a contract's text something stands, so that a mistake can be told with its line."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from localllm.errors import UsageError

_HEADER = re.compile(r"\s*\[{1,2}\s*([A-Za-z_]+)[^\]]*\]{1,2}")
_KEY = re.compile(r"""\s*["']?([A-Za-z0-9_-]+)["']?\s*[.=]""")
_ADVICE = "localllm bench init prints one to change"


@dataclass(frozen=True, slots=True)
class Place:
    """One table of a contract: `table` "" is the file itself; `index` counts from 0 in a list of tables."""

    source: str
    lines: Mapping[tuple[str, int, str], int]
    table: str = ""
    index: int = 0

    def text(self, key: str = "") -> str:
        """Return the place as people read it: "contract.toml, line 12, rule 3"."""
        line = self.lines.get((self.table, self.index, key)) or self.lines.get((self.table, self.index, ""))
        parts = [self.source]
        if line is not None:
            parts.append(f"line {line}")
        if self.table and self.table != "run":
            parts.append(f"{self.table} {self.index + 1}")
        return ", ".join(parts)

    def mistake(self, message: str, key: str = "", hint: str = "") -> UsageError:
        """Return a mistake here, at one of the table's keys where that is named."""
        return UsageError(f"{self.text(key)}: {message}", hint or _ADVICE)

    @contextmanager
    def at(self, key: str) -> Iterator[None]:
        """Let what is refused inside say where it stands."""
        try:
            yield
        except UsageError as error:
            raise self.mistake(error.message, key, error.hint) from None


class Places:
    """The lines of a contract's tables and keys, found by how they begin. `source`: what the file is called."""

    def __init__(self, source: str, text: str) -> None:
        self._source = source
        self._lines: dict[tuple[str, int, str], int] = {}
        table, counts = "", {"": 1}
        for number, line in enumerate(text.splitlines(), 1):
            if header := _HEADER.match(line):
                table = header[1]
                counts[table] = counts.get(table, 0) + 1
                self._lines.setdefault((table, counts[table] - 1, ""), number)
            elif key := _KEY.match(line):
                self._lines.setdefault((table, counts[table] - 1, key[1]), number)

    def of(self, table: str = "", index: int = 0) -> Place:
        """Return the place of a table."""
        return Place(self._source, self._lines, table, index)
