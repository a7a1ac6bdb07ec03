"""A prompt from a file: plain text is a system message, JSON is what one would send to the server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from localllm.errors import UsageError

if TYPE_CHECKING:
    from localllm.cli.output import Notes
    from localllm.runtime.types import GenerationOptions, GenerationRequest

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

    text = (read_stdin(asked_for=True) or "") if str(file) == "-" else read_files([file])[0]
    if not text.strip():
        raise UsageError(f"There is no text in {file}.", "give a document, or JSON with messages")
    body = _json(text)
    if body is None:
        body = {"messages": [{"role": "system", "content": text}]}
        text = json.dumps(body)
    from localllm.server.agent_headers import HEADER
    from localllm.server.cache import decoded, request_of
    from localllm.server.fields import IGNORED
    from localllm.server.isolation import Sender

    try:
        request, told = request_of(decoded(text.encode(), body), Sender(own), strict=False)
    except UsageError as error:
        raise UsageError(f"{file} is no request: {error.message}", error.hint) from None
    if HEADER in told:
        notes.say(f"note: the line {told[HEADER]} is left out, as by a server without --keep-agent-headers")
    if IGNORED in told:
        notes.say(f"note: this means nothing here: {told[IGNORED]}")
    return request


def _json(text: str) -> dict[str, Any] | None:
    if not text.lstrip().startswith("{"):
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) and ("messages" in value or "prompt" in value) else None
