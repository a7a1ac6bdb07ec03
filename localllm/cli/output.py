"""Stdout and stderr of a command: the answer on one, everything else on the other."""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Mapping
from typing import Any

from localllm.cli.tables import printable
from localllm.errors import LocalLLMError

CLOSED_EXIT_CODE = 141
"""What a shell reports for a program that SIGPIPE ended: 128 + 13."""

_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class OutputClosed(Exception):
    """Nobody reads stdout any more: the work stops quietly."""


class Answer:
    """Writes to stdout, flushed at once.

    At a terminal control characters become U+FFFD, so that no answer can drive the terminal.
    """

    def __init__(self) -> None:
        if sys.stdout is None:
            raise LocalLLMError("Stdout is closed; there is nowhere to write the answer.")
        self._is_terminal = sys.stdout.isatty()

    def write(self, text: str) -> None:
        """Write `text`. Raises OutputClosed, or LocalLLMError where it cannot be written."""
        if not text:
            return
        shown = _CONTROLS.sub("\ufffd", text) if self._is_terminal else text
        try:
            sys.stdout.write(shown)
            sys.stdout.flush()
        except UnicodeEncodeError:
            encoding = sys.stdout.encoding
            self.write(shown.encode(encoding, errors="replace").decode(encoding))
        except OSError as error:
            raise give_up_stdout(error) from None

    def width(self, most: int) -> int:
        """Return in how many columns a report is to be laid out: at a terminal its own, from 60 to `most`."""
        import shutil

        return min(most, max(60, shutil.get_terminal_size().columns)) if self._is_terminal else most

    def document(self, value: Mapping[str, Any]) -> None:
        """Write one JSON object on a line of its own."""
        import json

        # A lone surrogate cannot be encoded; escaped it is still valid JSON.
        try:
            line = json.dumps(value, ensure_ascii=False)
            line.encode("utf-8")
        except UnicodeEncodeError:
            line = json.dumps(value)
        if self._is_terminal:
            line = json.dumps(value)
        self.write(line + "\n")


def give_up_stdout(error: OSError) -> Exception:
    """Return what a failed write to stdout means; what is still buffered goes nowhere."""
    try:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
    except (OSError, ValueError):
        pass
    if error.errno == errno.EPIPE:
        return OutputClosed()
    return LocalLLMError(f"Cannot write to stdout: {error.strerror}.", "free some space, or write elsewhere")


class Notes:
    """Sentences on stderr, and at a terminal one line of progress that leaves no trace."""

    def __init__(self, *, quiet: bool = False, verbose: bool = False) -> None:
        self._quiet = quiet
        self._verbose = verbose and not quiet
        self._shows_progress = (
            not quiet and sys.stderr is not None and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        )
        self._has_progress = False

    def say(self, text: str) -> None:
        """Tell something that the user should know, unless --quiet."""
        if not self._quiet:
            self._line(text)

    def always(self, text: str) -> None:
        """Tell what was asked for by name, --quiet or not."""
        self._line(text)

    def explain(self, text: str) -> None:
        """Tell something that only --verbose asks for."""
        if self._verbose:
            self._line(text)

    def progress(self, text: str) -> None:
        """Show `text`, cut to one line, in place of the last progress; nothing where stderr is no terminal."""
        if self._shows_progress:
            self._has_progress = True
            write_stderr(f"\r\x1b[K{printable(text)[: _stderr_width() - 1]}")

    def clear(self) -> None:
        """Take the progress line away."""
        if self._has_progress:
            self._has_progress = False
            write_stderr("\r\x1b[K")

    def _line(self, text: str) -> None:
        self.clear()
        write_stderr(legible(text) + "\n")


def legible(text: str) -> str:
    """Return `text` with every control character escaped but the ends of lines.

    Sentences quote names, files and templates, which must not steer the terminal.
    """
    return "\n".join(printable(line) for line in text.split("\n"))


def _stderr_width() -> int:
    try:
        width = os.get_terminal_size(sys.stderr.fileno()).columns
    except (OSError, ValueError):
        width = 0
    return width or 80  # a terminal that was never told its size says 0


def write_stderr(text: str) -> None:
    """Write to stderr, whatever state it is in: a lost message is no reason to fail."""
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError):
        return
