"""A conversation: its turns, and its file."""

from __future__ import annotations

import json
import os
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from localllm.errors import LocalLLMError, UsageError
from localllm.models.disk.files import write_atomic

VERSION = 1
MAX_FILE_BYTES = 64 << 20


@dataclass(slots=True)
class Conversation:
    """Turns in order: user, assistant, user, assistant, ...; always whole pairs. Owned by the chat loop."""

    system: str | None = None
    turns: list[tuple[str, str]] = field(default_factory=list)

    def messages(self, question: str | None = None) -> tuple[dict[str, str], ...]:
        """Return the chat messages so far, and `question` as a new user turn."""
        found = [{"role": "system", "content": self.system}] if self.system else []
        for asked, answered in self.turns:
            found += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
        if question is not None:
            found.append({"role": "user", "content": question})
        return tuple(found)

    def undo(self) -> tuple[str, str]:
        """Take the last turn back and return it. Raises UsageError where there is none."""
        if not self.turns:
            raise UsageError("There is no turn yet.", "ask something first")
        return self.turns.pop()


def save(conversation: Conversation, path: Path, model: str, sha256: str | None) -> None:
    """Write the conversation, readable by its owner only; the file is whole or as it was before.

    Raises: UsageError where the file is there and is something else; LocalLLMError where it
    cannot be written.
    """
    if os.path.lexists(path):
        _refuse_foreign(path)
    body = {
        "v": VERSION,
        "model": {"name": model, "sha256": sha256},
        "system": conversation.system,
        "messages": [message for message in conversation.messages() if message["role"] != "system"],
    }
    if not path.name or "\0" in path.name:
        raise UsageError(f"{str(path)!r} is no name for a file.", "/save talk.json")
    try:
        write_atomic(path, json.dumps(body, indent=1).encode(), mode=0o600)
    except OSError as error:
        raise LocalLLMError(f"Cannot write {path}: {error.strerror}.", "/save to another place") from None


def load(path: Path) -> Conversation:
    """Return the conversation of a file that `save` wrote. Raises UsageError saying what is wrong with it."""
    try:
        if stat.S_ISFIFO(path.stat().st_mode):  # which would wait for a writer
            raise _unfit(path, "it is no file")
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"Cannot read {path}: {reason}.", "/load FILE takes what /save wrote") from None
    if len(data) > MAX_FILE_BYTES:
        raise _unfit(path, "it is too large")
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        raise _unfit(path, "it is not JSON") from None
    if not isinstance(body, dict) or body.get("v") != VERSION:
        raise _unfit(path, f"it has no version {VERSION}")
    system = body.get("system")
    if system is not None and not isinstance(system, str):
        raise _unfit(path, "system is not a text")
    return Conversation(system, _turns(path, body.get("messages")))


def _turns(path: Path, messages: Any) -> list[tuple[str, str]]:
    if not isinstance(messages, list) or len(messages) % 2:
        raise _unfit(path, "messages is not a list of questions and answers")
    texts: list[str] = []
    for place, message in enumerate(messages):
        role = ("user", "assistant")[place % 2]
        if not isinstance(message, dict) or message.get("role") != role or not isinstance(message.get("content"), str):
            raise _unfit(path, f"messages[{place}] is not a text by the {role}")
        texts.append(message["content"])
    return list(zip(texts[::2], texts[1::2], strict=True))


def _refuse_foreign(path: Path) -> None:
    try:
        load(path)
    except UsageError:
        raise UsageError(f"{path} is there and is no saved conversation.", "/save under another name") from None


def _unfit(path: Path, reason: str) -> UsageError:
    return UsageError(f"{path} is no saved conversation: {reason}.", "/load FILE takes what /save wrote")
