"""Take the first fenced code block out of Markdown that arrives in pieces (`--extract`).

Source: CommonMark 0.31, section 4.5.
"""

from __future__ import annotations

import re
from typing import Protocol

_OPENING = re.compile(r"( {0,3})(`{3,}(?=[^`]*$)|~{3,})")
_MAYBE_CLOSING = re.compile(r" {0,3}(`*|~*)[ \t]*$")


class Selection(Protocol):
    """Which part of a text that arrives in pieces is shown."""

    found: bool
    closed: bool  # nothing that follows can be shown any more

    def push(self, text: str) -> str:
        """Take a piece; return what of it is certainly shown."""
        ...

    def flush(self) -> str:
        """The text ends here; return what was held back."""
        ...


class Everything:
    """Selects the whole text."""

    found = True
    closed = False

    def push(self, text: str) -> str:
        """Return the piece."""
        return text

    def flush(self) -> str:
        """Nothing is held back."""
        return ""


class FenceExtractor:
    """Gives out the inside of the first block as it comes; everything else is dropped.

    Only the beginning of a line that may still become the closing fence is held back.
    """

    def __init__(self) -> None:
        self.found = False
        self.closed = False
        self._line = ""
        self._indent = 0
        self._fence = ""
        self._given = 0  # characters of `_line` that were given out

    def push(self, text: str) -> str:
        """Take a piece of the text; return what of it is now certainly inside the block."""
        out = []
        while text and not self.closed:
            piece, newline, text = text.partition("\n")
            self._line += piece
            if newline:
                out.append(self._end_line("\n"))
            elif self.found and not self._may_close():
                out.append(self._rest())
        return "".join(out)

    def flush(self) -> str:
        """Return what is still held back when the text ends; an open block ends there too."""
        return "" if self.closed or not self._line else self._end_line("")

    def _end_line(self, newline: str) -> str:
        if not self.found:
            opening = _OPENING.match(self._line.rstrip("\r"))
            if opening:
                self.found, self._indent, self._fence = True, len(opening[1]), opening[2]
            out = ""
        elif self._closes():
            self.closed, out = True, ""
        else:
            out = self._rest() + newline
        self._line, self._given = "", 0
        return out

    def _rest(self) -> str:
        """Return what was not given out yet of this line, less the indentation of the fence."""
        if self._given == 0:
            spaces = len(self._line) - len(self._line.lstrip(" "))
            self._given = min(spaces, self._indent)
        rest, self._given = self._line[self._given :], len(self._line)
        return rest

    def _may_close(self) -> bool:
        """Say whether the line so far may still turn out to be the closing fence."""
        if self._given:
            return False
        run = _MAYBE_CLOSING.fullmatch(self._line.rstrip("\r"))
        return run is not None and (not run[1] or run[1][0] == self._fence[0])

    def _closes(self) -> bool:
        run = self._line.strip(" \t\r")
        return self._may_close() and len(run) >= len(self._fence) and set(run) == {self._fence[0]}
