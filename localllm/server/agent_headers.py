"""Lines that agents put before the system text anew with each request: left out, so that prompts stay the same.

Only lines known by name and shape, only at the very start of the system text; nothing else is changed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

HEADER: Final = "x-localllm-left-out"
"""The response header that names what was left out."""

KNOWN: Final = ("x-anthropic-billing-header",)
"""Of Claude Code: pairs `key=value;`, of which `cch=` is new each time."""

_SYSTEM: Final = ("system", "developer")

# The whole line is pairs: what has other text on it is left alone.
_LINE: Final = re.compile(
    rf"({'|'.join(map(re.escape, KNOWN))}):(?:[ \t]*+[A-Za-z0-9_.-]++=[^;\s]*+;)++[ \t]*+(?:\r?\n|\Z)"
)


def leave_out(
    messages: Sequence[Mapping[str, Any]], *, is_kept: bool
) -> tuple[Sequence[Mapping[str, Any]], dict[str, str]]:
    """Return the conversation without such a line, and the response header that tells of it ({} where none was).

    `is_kept`: leave everything as it is. The messages given are not changed.
    """
    first = messages[0] if messages else {}
    if is_kept or first.get("role") not in _SYSTEM:
        return messages, {}
    content = first.get("content")
    if isinstance(content, str):
        name, rest = _split(content)
    elif isinstance(content, list) and content:
        name, rest = _split(_text(content[0]))
        if name and not rest:  # the line was a part of its own
            rest = content[1:]
        elif name:
            part = content[0]
            rest = [{**part, "text": rest} if isinstance(part, dict) else rest, *content[1:]]
    else:
        return messages, {}
    return ([{**first, "content": rest}, *messages[1:]], {HEADER: name}) if name else (messages, {})


def _text(part: Any) -> str:
    """Return the text of a content part, "" for one of another kind."""
    if isinstance(part, dict):
        part = part.get("text") if part.get("type") in ("text", "input_text") else None
    return part if isinstance(part, str) else ""


def _split(text: str) -> tuple[str, Any]:
    """Return the name of the known line that a text begins with, "" for none, and the text after that line."""
    line = _LINE.match(text)
    return ("", text) if line is None else (line[1], text[line.end() :])
