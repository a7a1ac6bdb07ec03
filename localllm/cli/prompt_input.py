"""The prompt of a command line: its argument, its files and its stdin, joined in that order."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from localllm.errors import ContextOverflow, LocalLLMError, ModelNotFound, UsageError, pasteable

MAX_BYTES = 64 << 20
"""More text than any context holds; reading stops here, so an endless pipe ends in a sentence."""

PATIENCE_S = 1.0
"""A pipe that is silent for longer is mentioned on stderr: it may be one that nobody writes to."""

STDIN = Path("-")


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked, of which model; `model` None = the default one."""

    model: str | None
    prompt: str


def read_question(arguments: Sequence[str], files: Sequence[Path], *, raw: bool, quiet: bool = False) -> Question:
    """Return the question that arguments, `-f` files and piped stdin make together.

    Parts are joined by a blank line: the prompt, the files in their order, then stdin, unless
    `-f -` placed it. Raises UsageError for text that is not UTF-8 and where nothing is asked.
    """
    piped = read_stdin(asked_for=STDIN in files, quiet=quiet)
    extra = _texts(files, piped)
    if piped is not None and STDIN not in files:
        extra.append(piped)
    model, prompt = split_arguments(arguments, has_text=any(text.strip() for text in extra))
    parts = ([argument_text(prompt, "The prompt")] if prompt is not None else []) + extra
    if not raw:
        parts = [text for text in (part.strip("\r\n") for part in parts) if text.strip()]
    joined = "\n\n".join(part for part in parts if part)
    if not joined:
        raise _nothing_asked(model)
    return Question(model, joined)


def split_arguments(arguments: Sequence[str], *, has_text: bool) -> tuple[str | None, str | None]:
    """Return (model, prompt): the first argument is the model, unless it can only be a prompt.

    A single argument with white space in it is a prompt for the default model (where no file has
    that name); without any argument, `has_text` says that the prompt comes from elsewhere.
    """
    if any(not argument.strip() for argument in arguments[:1]):
        raise UsageError("The first argument, the model, is empty.", "localllm run MODEL 'your question'")
    if not arguments:
        if not has_text:
            raise _nothing_asked(None)
        return None, None
    if len(arguments) > 1:
        return arguments[0], arguments[1]
    only = arguments[0]
    if any(character.isspace() for character in only) and not _is_path(only):
        return None, only
    return only, None


def read_stdin(*, asked_for: bool = False, quiet: bool = False) -> str | None:
    """Return what is piped in; None where stdin is closed, or a terminal that nobody asked to read."""
    if sys.stdin is None or sys.stdin.closed:
        return None
    typed = sys.stdin.isatty()
    if typed and not asked_for:
        return None
    if not quiet and (typed or _is_silent()):
        how = "Ctrl-D ends it" if typed else "< /dev/null if there is nothing to read"
        print(f"reading stdin until its end ({how})", file=sys.stderr)
    try:
        return _read_text(sys.stdin.buffer, "stdin")
    except OSError as error:
        raise UsageError(f"Cannot read stdin: {error.strerror}.") from None


def read_files(files: Sequence[Path]) -> list[str]:
    """Return the texts of files. Raises UsageError for one that cannot be read or is no text."""
    return [_read_file(file) for file in files]


def decode(data: bytes, name: str) -> str:
    """Return UTF-8 text without its byte order mark. Raises UsageError naming the first bad byte."""
    if len(data) > MAX_BYTES:
        raise ContextOverflow(f"{name} holds more than {MAX_BYTES >> 20} MiB of text; no context takes that.")
    zero = data.find(0)
    if zero >= 0:
        raise UsageError(f"{name} is binary, not text: byte 0 at offset {zero}.", "give UTF-8 text")
    try:
        return data.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        bad = f"byte 0x{data[error.start]:02x} at offset {error.start}"
        raise UsageError(f"{name} is not UTF-8 text: {bad}.", "convert it first: iconv -t UTF-8") from None


def argument_text(text: str, name: str) -> str:
    """Return an argument as the UTF-8 text that it is, whatever the locale made of its bytes.

    Raises: UsageError where its bytes are no UTF-8.
    """
    try:
        return os.fsencode(text).decode("utf-8")
    except UnicodeError:
        raise UsageError(f"{name} is not UTF-8 text.", "convert it first: iconv -t UTF-8") from None


def _texts(files: Sequence[Path], piped: str | None) -> list[str]:
    if list(files).count(STDIN) > 1:
        raise UsageError("Stdin is named twice: -f - can be given once.")
    if STDIN in files and piped is None:
        raise UsageError("-f - reads stdin, but stdin is closed.", "cat notes.txt | localllm run MODEL -f -")
    return [(piped or "") if file == STDIN else _read_file(file) for file in files]


def _read_file(path: Path) -> str:
    try:
        with path.open("rb") as stream:
            return _read_text(stream, str(path))
    except OSError as error:
        raise UsageError(f"Cannot read {path}: {error.strerror}.", "check the name of the file") from None


def _read_text(stream: BinaryIO, name: str) -> str:
    return decode(stream.read(MAX_BYTES + 1), name)


def _is_silent() -> bool:
    """Say whether stdin is a pipe with nothing to read for a while."""
    try:
        return not select.select([sys.stdin.fileno()], [], [], PATIENCE_S)[0]
    except (OSError, ValueError):
        return False


def _is_path(argument: str) -> bool:
    try:
        return os.path.exists(argument)
    except ValueError:
        return False


def _nothing_asked(model: str | None) -> UsageError:
    """Return the refusal, with a line that works: a lone word that names no model was meant as the prompt."""
    from localllm.models.catalog import DEFAULT_ALIAS

    if model is not None and not _is_model(model):
        return UsageError(
            f"There is no prompt, and {model!r}, which stands where the model does, names none that is here.",
            pasteable("localllm", "run", DEFAULT_ALIAS, model),
        )
    return UsageError("There is no prompt.", pasteable("localllm", "run", model or DEFAULT_ALIAS, "your question"))


def _is_model(name: str) -> bool:
    from localllm.models import resolve

    try:
        resolve.resolve(name)
    except ModelNotFound:
        return False
    except LocalLLMError:  # it is there, and its own trouble will be told
        return True
    return True
