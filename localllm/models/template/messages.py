"""Conversations as a template sees them: OpenAI's shape checked, parts flattened, texts marked as the caller's."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from localllm.errors import TemplateError
from localllm.models.template.text import OTHER, NullText, Text, role_origin, written

_ROLES = frozenset(("system", "developer", "user", "assistant", "tool", "function", "model", "ipython", "tool_results"))
_REASONING = ("reasoning_content", "thinking", "reasoning")
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_MAX_DEPTH = 64


def prepare_messages(messages: Sequence[Mapping[str, Any]], *, arguments_as_text: bool) -> list[dict[str, Any]]:
    """Return what a template gets as `messages`: plain values, texts with their origin, nothing merged or dropped.

    Null fields are absent, null content is "", text parts are joined by newlines, a reasoning text
    stands under every name that templates read it by, and tool-call arguments given as JSON text are
    objects unless `arguments_as_text`.
    Raises: TemplateError naming the message.
    """
    if not messages:
        raise TemplateError("The conversation has no messages.", "give at least one user message")
    return [_message(index, message, arguments_as_text) for index, message in enumerate(messages)]


def prepare_value(value: Any, origin: int = OTHER, where: str = "a tool or template argument") -> Any:
    """Return a JSON value with its texts, names of fields too, marked as the caller's."""
    return _value(value, origin, where, 0)


def _message(index: int, message: Mapping[str, Any], arguments_as_text: bool) -> dict[str, Any]:
    where = f"message {index}"
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or not message["role"]:
        raise TemplateError(f"{where.capitalize()} has no role.", "give each message a role: system, user, assistant")
    role: str = message["role"]
    fields = {key: value for key, value in message.items() if value is not None and value != {}}
    if not fields.get("tool_calls", True):
        del fields["tool_calls"]
    prepared = {key: _value(value, index, where, 0) for key, value in fields.items() if key not in ("role", "content")}
    known = written(role, role_origin(index) if role in _ROLES else index)
    content = _content(index, message.get("content"), has_calls="tool_calls" in fields)
    ordered: dict[str, Any] = {"role": known, "content": content, **prepared}
    if "tool_calls" in ordered and not arguments_as_text:
        _parse_arguments(index, ordered["tool_calls"])
    reasoning = next((ordered[name] for name in _REASONING if name in ordered), None)
    if reasoning is not None:
        ordered = {"thinking": reasoning, **ordered, "reasoning_content": reasoning}
    return ordered


def _content(index: int, content: Any, *, has_calls: bool) -> Text:
    if content is None:
        return NullText("", ()) if has_calls else written("", index)
    if isinstance(content, str):
        return written(content, index)
    if isinstance(content, Sequence) and not isinstance(content, (bytes, bytearray)):
        return written("\n".join(_part(index, part) for part in content), index)
    raise TemplateError(f"Message {index}: content must be text or a list of parts.")


def _part(index: int, part: Any) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    text = part.get(_TEXT_PARTS[kind]) if isinstance(part, Mapping) and kind in _TEXT_PARTS else None
    if not isinstance(text, str):
        raise TemplateError(
            f"Message {index} has a content part of type {str(kind)[:40]!r}: this model reads text only.",
            "send text parts only",
        )
    return text


def _parse_arguments(index: int, calls: Any) -> None:
    """Turn JSON arguments of tool calls into objects, in place."""
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function", call) if isinstance(call, dict) else None
        arguments = function.get("arguments") if isinstance(function, dict) else None
        if not isinstance(function, dict) or not isinstance(arguments, str):
            continue
        try:
            parsed = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            parsed = None
        if not isinstance(parsed, dict):
            raise TemplateError(
                f"Message {index}: the arguments of a tool call are not a JSON object, which this template needs.",
                "send the arguments as a JSON object",
                message_index=index,
            )
        function["arguments"] = _value(parsed, index, f"message {index}", 0)


def _value(value: Any, origin: int, where: str, depth: int) -> Any:
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, str):
        return written(value, origin)
    if depth > _MAX_DEPTH:
        raise TemplateError(f"{where.capitalize()} nests values deeper than {_MAX_DEPTH}.")
    if isinstance(value, Mapping):
        return {_key(key, origin, where): _value(item, origin, where, depth + 1) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray)):
        return [_value(item, origin, where, depth + 1) for item in value]
    raise TemplateError(f"{where.capitalize()} holds a value of type {type(value).__name__}, which is not JSON.")


def _key(key: Any, origin: int, where: str) -> Text:
    if not isinstance(key, str):
        raise TemplateError(f"{where.capitalize()} has a field name that is not text.")
    return written(key, origin)


def count_chars(value: Any) -> int:
    """Return the characters of text inside a JSON value."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(len(str(key)) + count_chars(item) for key, item in value.items())
    return sum(map(count_chars, value)) if isinstance(value, list) else 8
