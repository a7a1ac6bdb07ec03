"""A prompt from a file: plain text is a system message, JSON is what one would send to the server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from localllm.errors import UsageError

if TYPE_CHECKING:
    from localllm.runtime.types import GenerationRequest

PromptFile: TypeAlias = Annotated[
    Path,
    typer.Argument(
        metavar="FILE", help="Text that is taken as the system message, or JSON with messages or prompt; - is stdin."
    ),
]


def read_request(file: Path) -> GenerationRequest:
    """Return the request of a file. Raises UsageError for what is neither text nor such JSON."""
    from localllm.cli.prompt_input import read_files, read_stdin
    from localllm.runtime.types import ChatRequest

    text = (read_stdin(asked_for=True) or "") if str(file) == "-" else read_files([file])[0]
    if not text.strip():
        raise UsageError(f"There is no text in {file}.", "give a document, or JSON with messages")
    asked = _json(text)
    if asked is None:
        return ChatRequest(({"role": "system", "content": text},))
    return _request(asked, file)


def _json(text: str) -> dict[str, Any] | None:
    if not text.lstrip().startswith("{"):
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) and ("messages" in value or "prompt" in value) else None


def _request(asked: dict[str, Any], file: Path) -> GenerationRequest:
    from localllm.runtime.types import ChatRequest, CompletionRequest

    messages, prompt, tools = asked.get("messages"), asked.get("prompt"), asked.get("tools") or []
    if messages is not None:
        is_list = isinstance(messages, list) and messages and all(isinstance(m, dict) and "role" in m for m in messages)
        if not is_list or not isinstance(tools, list):
            raise UsageError(f"The messages of {file} are no conversation.", "a list of role and content")
        return ChatRequest(tuple(messages), tools=tuple(tools), template_kwargs=asked.get("chat_template_kwargs") or {})
    if not isinstance(prompt, str):
        raise UsageError(f"The prompt of {file} is no text.", "send one text")
    return CompletionRequest(prompt)
