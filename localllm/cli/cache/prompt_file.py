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

    text = (read_stdin(asked_for=True) or "") if str(file) == "-" else read_files([file])[0]
    if not text.strip():
        raise UsageError(f"There is no text in {file}.", "give a document, or JSON with messages")
    asked = _json(text)
    if asked is None:
        asked = {"messages": [{"role": "system", "content": text}]}
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
    from localllm.server.agent_headers import leave_out
    from localllm.server.openai_chat import check_messages

    messages, prompt = asked.get("messages"), asked.get("prompt")
    if messages is None:
        if not isinstance(prompt, str):
            raise UsageError(f"The prompt of {file} is no text.", "send one text")
        return CompletionRequest(prompt)
    tools, kwargs = asked.get("tools") or [], asked.get("chat_template_kwargs") or {}
    if not _is_list_of_objects(messages) or not _is_list_of_objects(tools) or not isinstance(kwargs, dict):
        raise UsageError(f"The messages of {file} are no conversation.", "a list of role and content")
    check_messages(messages)
    kept, _ = leave_out(messages, is_kept=False)
    return ChatRequest(tuple(kept), tools=tuple(tools), template_kwargs=kwargs)


def _is_list_of_objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, dict) for one in value)
