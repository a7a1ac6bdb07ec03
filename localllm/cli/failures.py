"""Every failure of a command as a sentence and an exit code; never a traceback unless asked for."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import typer

from localllm.cli.output import CLOSED_EXIT_CODE, Answer, OutputClosed, give_up_stdout, legible, write_stderr
from localllm.cli.signals import Interrupts, Stopped
from localllm.errors import LocalLLMError, TimedOut, UsageError


@dataclass(frozen=True, slots=True)
class Manner:
    """How a command that fails says so: in a JSON document too, as an event, with the traceback.

    `verb`: what was typed after `localllm`, for hints; "" where that is not known.
    """

    json: bool = False
    jsonl: bool = False
    verbose: bool = False
    verb: str = ""


class Interrupted(LocalLLMError):
    """Ctrl-C or SIGTERM, as a program reads it."""

    exit_code, http_status, code = 130, 499, "interrupted"


class AfterOutput(Exception):
    """`cause` is what stdout's document or events ended in: only stderr and the exit code are left."""

    def __init__(self, cause: Exception | Stopped) -> None:
        super().__init__(cause)
        self.cause = cause


@contextmanager
def told(manner: Manner) -> Iterator[None]:
    """Turn what goes wrong inside into a sentence on stderr and `typer.Exit` with its code."""
    try:
        with Interrupts():
            yield
    except (typer.Exit, typer.Abort, typer.TyperException):
        raise
    except AfterOutput as after:
        raise typer.Exit(tell(after.cause, replace(manner, json=False, jsonl=False))) from None
    except Stopped as stop:
        raise typer.Exit(tell(stop, manner)) from None
    except Exception as error:
        raise typer.Exit(tell(error, manner)) from None


def tell(error: Exception | Stopped, manner: Manner) -> int:
    """Write the sentence (and the document, where one is due); return the exit code."""
    if isinstance(error, Stopped):
        return _tell_stop(error, manner)
    if isinstance(error, BrokenPipeError):
        error = give_up_stdout(error)
    if isinstance(error, OutputClosed):
        return CLOSED_EXIT_CODE
    failure = _as_failure(error)
    if manner.verb and failure.hint.startswith("--no-server"):  # said where the verb is not known
        failure.hint = f"localllm {manner.verb} {failure.hint}"
    if manner.verbose and failure is not error:
        import traceback

        write_stderr("".join(traceback.format_exception(error)))
    _sentence(failure)
    _document(failure, manner)
    return failure.exit_code


def usage_failure(error: typer.TyperException) -> UsageError:
    """Return a command line that could not be read as a sentence that names the source and the way out."""
    context: Any = getattr(error, "ctx", None)
    parameter: Any = getattr(error, "param", None)
    path = context.command_path if context else "localllm"
    message, hint = _close_to(error) or error.format_message(), f"{path} --help"
    if parameter is not None and context and context.get_parameter_source(parameter.name).name == "ENVIRONMENT":
        message, hint = f"{parameter.envvar} in the environment: {error.message}", f"unset {parameter.envvar}"
    takes_text = context is not None and any(one.name in ("prompt", "text") for one in context.command.params)
    if "unexpected extra argument" in message and takes_text:
        message += " (a text of several words needs quotes)"
    message = _INNER_TYPE.sub(lambda found: f"is not a {_TYPES[found[1]]}", message).rstrip(".")
    return UsageError(message if message.endswith("?") else message + ".", hint)


def from_variable(variable: str, error: UsageError) -> UsageError:
    """Return what is wrong with a value as the fault of the variable that gave it."""
    return UsageError(f"{variable} in the environment: {error.message}", f"unset {variable}")


_INNER_TYPE = re.compile("is not a valid (int|float)(?: range)?")
_TYPES = {"int": "whole number", "float": "number"}


def _close_to(error: typer.TyperException) -> str | None:
    """Return a sentence for an unknown flag with the one that looks most like it; the dashes alone are no likeness."""
    name, flags = getattr(error, "option_name", None), getattr(error, "possibilities", None)
    if name is None or not flags:
        return None
    import difflib

    bare = {flag.lstrip("-"): flag for flag in flags}
    close = [bare[match] for match in difflib.get_close_matches(name.lstrip("-"), bare, 1)]
    return f"No such option: {name}." + (f" Did you mean {close[0]}?" if close else "")


def _tell_stop(stop: Stopped, manner: Manner) -> int:
    """A signal that the user sent needs no sentence; the time limit does."""
    timed_out = stop.number == signal.SIGALRM
    failure: LocalLLMError = TimedOut("The time limit was reached.", "--timeout SECONDS sets a longer one")
    if timed_out:
        _sentence(failure)
    else:
        failure = Interrupted("Interrupted.")
    _document(failure, manner)
    return stop.exit_code


def _sentence(failure: LocalLLMError) -> None:
    hint = f"hint: {failure.hint}\n" if failure.hint else ""
    write_stderr(legible(f"error: {failure.message}\n{hint}"))


def _document(failure: LocalLLMError, manner: Manner) -> None:
    """Write the failure to stdout where a program reads it; that stdout fails too is no news."""
    from localllm.runtime import events

    if manner.json:
        body = {"code": failure.code, "message": failure.message, "hint": failure.hint}
        value = {"error": {**body, **failure.details}}
    elif manner.jsonl:
        value = events.encode(events.Error(failure.code, failure.message, failure.hint))
    else:
        return
    with suppress(OutputClosed, LocalLLMError):
        Answer().document(value)


def _as_failure(error: Exception) -> LocalLLMError:
    if isinstance(error, LocalLLMError):
        return error
    if isinstance(error, OSError) and error.strerror:
        where = f": {error.filename}" if error.filename else ""
        return LocalLLMError(f"{error.strerror}{where}.")
    if isinstance(error, MemoryError):
        return LocalLLMError("Out of memory.", "localllm doctor")
    # What the exception says may hold the prompt: only its kind and place are told unasked.
    place, trace = "", error.__traceback__
    while trace is not None:
        place = f" in {Path(trace.tb_frame.f_code.co_filename).name}, line {trace.tb_lineno}"
        trace = trace.tb_next
    return LocalLLMError(
        f"Unexpected failure: {type(error).__name__}{place}.", "run it again with -v and report what it prints"
    )


def flush_stdout(code: int) -> int:
    """Flush what the command printed; return `code`, or that of the failure to write it."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        return tell(give_up_stdout(error), Manner())
    return code
