"""What the user types in a chat: lines with editing and history at a terminal, or piped lines.

History lives as long as the chat: no prompt is written to disk unasked.
"""

from __future__ import annotations

import sys
from typing import Protocol

from localllm.cli.output import write_stderr
from localllm.cli.prompt_input import decode
from localllm.errors import UsageError

PROMPT, MORE = ">>> ", "... "
BLOCK = '"""'


class Lines(Protocol):
    """Where lines come from; `is_script`: nobody sits there to see a failure and go on."""

    is_script: bool

    def read(self, prompt: str) -> str:
        """Return the next line without its end. Raises EOFError after the last one."""
        ...


class PipedLines:
    """Lines of a pipe or a file; no prompt is shown."""

    is_script = True

    def __init__(self) -> None:
        self._n_lines = 0

    def read(self, prompt: str) -> str:
        """Return the next line. Raises UsageError for one that is not UTF-8 text."""
        self._n_lines += 1
        data = sys.stdin.buffer.readline() if sys.stdin is not None else b""
        if not data:
            raise EOFError
        return decode(data, f"line {self._n_lines} of stdin").rstrip("\r\n")


class PlainLines:
    """Lines of a terminal through the C library's readline."""

    is_script = False

    def __init__(self) -> None:
        import readline

        readline.set_auto_history(True)

    def read(self, prompt: str) -> str:
        """Return the line that is typed."""
        if sys.stdout.isatty():
            return input(prompt)
        write_stderr(prompt)  # stdout goes elsewhere and carries the answers only
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line.rstrip("\n")


class ToolkitLines:
    """Lines of a terminal through prompt_toolkit, drawn on stderr."""

    is_script = False

    def __init__(self) -> None:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.output import create_output

        self._session = PromptSession(output=create_output(stdout=sys.stderr))

    def read(self, prompt: str) -> str:
        """Return the line that is typed."""
        line: str = self._session.prompt(prompt)
        return line


def open_lines() -> Lines:
    """Return the best source of lines that stdin and what is installed allow."""
    if sys.stdin is None or not sys.stdin.isatty():
        return PipedLines()
    try:
        return ToolkitLines()
    except ImportError:
        return PlainLines()


def read_message(lines: Lines) -> str:
    '''Return the next message: a line, lines that end in a backslash, or a block between """.

    Raises: EOFError at the end; UsageError for a block that is not closed.
    '''
    line = lines.read(PROMPT)
    if line.lstrip().startswith(BLOCK):
        return _read_block(lines, line.lstrip()[len(BLOCK) :])
    parts = [line]
    while parts[-1].endswith("\\"):
        parts[-1] = parts[-1][:-1]
        try:
            parts.append(lines.read(MORE))
        except EOFError:
            break
    return "\n".join(parts)


def _read_block(lines: Lines, line: str) -> str:
    parts: list[str] = []
    while not line.rstrip().endswith(BLOCK):
        parts.append(line)
        try:
            line = lines.read(MORE)
        except EOFError:
            raise UsageError(f"A block was opened with {BLOCK} and not closed.", f"end it with {BLOCK}") from None
    parts.append(line.rstrip()[: -len(BLOCK)])
    return "\n".join(parts).strip("\n")
