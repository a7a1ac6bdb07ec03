"""A prompt from a file: plain text is a system message, JSON is what one would send to the server.

JSON is a file of that name, what begins as a request does, and what is an object or a list as a whole.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from localllm.errors import UsageError

if TYPE_CHECKING:
    from localllm.cli.output import Notes
    from localllm.runtime.types import GenerationOptions, GenerationRequest

_BEGINNING = re.compile(r"""\s*\{\s*["']""")
_HINT = 'put it as {"messages": [{"role": "system", "content": "your document"}]}'

PromptFile: TypeAlias = Annotated[
    Path,
    typer.Argument(
        metavar="FILE", help="Text that is taken as the system message, or JSON with messages or prompt; - is stdin."
    ),
]


def read_request(file: Path, own: GenerationOptions, notes: Notes) -> GenerationRequest:
    """Return the request of a file, made as the server makes it of a body; `own` are the options of the flags.

    What of it has no effect is told. Raises UsageError for what is neither text nor what a server could answer.
    """
    from localllm.cli.prompt_input import read_files, read_stdin

    is_stdin = str(file) == "-"
    name = "stdin" if is_stdin else str(file)
    text = (read_stdin(asked_for=True) or "") if is_stdin else read_files([file])[0]
    if not text.strip():
        raise UsageError(f"There is no text in {name}.", "give a document, or JSON with messages")
    names = _names(text, name)
    if names is None:
        names = ["messages"]
        text = json.dumps({"messages": [{"role": "system", "content": text}]})
    from localllm.server.agent_headers import HEADER
    from localllm.server.cache import decoded, request_of
    from localllm.server.fields import IGNORED
    from localllm.server.isolation import Sender

    try:
        request, told = request_of(decoded(text.encode(), names), Sender(own), strict=False)
    except UsageError as error:
        raise UsageError(f"{name} is no request: {error.message}", error.hint) from None
    if HEADER in told:
        notes.say(f"note: the line {told[HEADER]} is left out, as by a server without --keep-agent-headers")
    if IGNORED in told:
        notes.say(f"note: this means nothing here: {told[IGNORED]}")
    return request


def _names(text: str, name: str) -> list[str] | None:
    """Return the names at the top of a request, None for plain text. Raises UsageError for JSON that is no request."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        if not name.lower().endswith(".json") and not _BEGINNING.match(text):
            return None
        raise UsageError(f"{name} is no valid JSON{_place(error)}.", _HINT) from None
    if isinstance(value, dict) and ("messages" in value or "prompt" in value):
        return list(value)
    if isinstance(value, dict | list) or name.lower().endswith(".json"):
        raise UsageError(f"{name} is JSON with neither messages nor a prompt in it.", _HINT)
    return None


def _place(error: Exception) -> str:
    return (
        f": {error.msg}, line {error.lineno}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
    )
