"""Fills the body of a request: every string is filler but the words of the API itself; what is unknown is left out.

Deny by default: a field is kept only where it stands in a table here, and only with values of the
kind that the table names, so that a field nobody thought of cannot carry text into a recording.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

from localllm.bench.workloads.filler import MAX_DEPTH, Filler

_Fill: TypeAlias = "Callable[[BodyFiller, Any], Any]"


class _Unknown(Exception):
    """The value is none that is known at its place: it is left out."""


class BodyFiller:
    """Fills one body after another with the same filler. `n_left_out`: fields and parts that were, so far."""

    def __init__(self, filler: Filler) -> None:
        self.filler = filler
        self.n_left_out = 0

    def body(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the body of a chat or text completion with filler for what was written, and without the rest."""
        return self.fields(body, _BODY)

    def fields(self, value: Any, table: Mapping[str, _Fill]) -> dict[str, Any]:
        """Return an object's known fields, each filled as the table says."""
        if not isinstance(value, Mapping):
            raise _Unknown
        found: dict[str, Any] = {}
        for name, inner in value.items():
            fill = table.get(name)
            try:
                if fill is None:
                    raise _Unknown
                found[name] = None if inner is None else fill(self, inner)
            except (_Unknown, RecursionError):
                self.n_left_out += 1
        return found

    def each(self, values: Any, fill: _Fill) -> list[Any]:
        """Return a list with every element filled; those that are not known are left out."""
        if not isinstance(values, list):
            raise _Unknown
        found: list[Any] = []
        for value in values:
            try:
                found.append(fill(self, value))
            except _Unknown:
                self.n_left_out += 1
        return found


def _text(of: BodyFiller, value: Any) -> Any:
    return of.filler.text(_string(value))


def _text_or_json(of: BodyFiller, value: Any) -> Any:
    return of.filler.text_or_json(_string(value))


def _name(of: BodyFiller, value: Any) -> Any:
    return of.filler.name(_string(value))


def _string(value: Any) -> str:
    if not isinstance(value, str):
        raise _Unknown
    return value


def _plain(of: BodyFiller, value: Any) -> Any:
    """Numbers and switches of known parameters say nothing."""
    if not isinstance(value, (bool, int, float)):
        raise _Unknown
    return value


def _word(*words: str) -> _Fill:
    """Keep the API's own words."""

    def fill(of: BodyFiller, value: Any) -> Any:
        if value not in words:
            raise _Unknown
        return value

    return fill


def _object(table: Mapping[str, _Fill]) -> _Fill:
    return lambda of, value: of.fields(value, table)


def _list(fill: _Fill) -> _Fill:
    return lambda of, value: of.each(value, fill)


def _either(first: _Fill, second: _Fill) -> _Fill:
    """Fill as the first; what it does not know, as the second."""

    def fill(of: BodyFiller, value: Any) -> Any:
        try:
            return first(of, value)
        except _Unknown:
            return second(of, value)

    return fill


def _token(of: BodyFiller, value: Any) -> Any:
    """A token id is text too: another for each, from among a thousand that every vocabulary has."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise _Unknown
    return 1000 + int.from_bytes(of.filler.text(f"{value:08d}").encode(), "big") % 1000


def _content(of: BodyFiller, value: Any) -> Any:
    return _text_or_json(of, value) if isinstance(value, str) else of.each(value, _part)


def _part(of: BodyFiller, value: Any) -> Any:
    """A part of a message that is text; pictures, sounds and files are left out whole."""
    if not isinstance(value, dict) or value.get("type") not in ("text", "input_text", "output_text", "refusal"):
        raise _Unknown
    return of.fields(value, {"type": _word(value["type"]), "text": _text_or_json, "refusal": _text})


def _arguments(of: BodyFiller, value: Any) -> Any:
    """The arguments of a call: JSON in a string, or as it is."""
    return of.filler.value(value) if isinstance(value, dict) else _text_or_json(of, value)


def _schema(of: BodyFiller, value: Any, depth: int = 0) -> Any:
    """A JSON schema with other names; its patterns and bounds, which could say what was written, are left out."""
    if isinstance(value, bool):
        return value
    if depth > MAX_DEPTH:
        raise _Unknown

    def inner(of: BodyFiller, value: Any) -> Any:
        return _schema(of, value, depth + 1)

    def by_name(of: BodyFiller, value: Any) -> Any:
        if not isinstance(value, dict):
            raise _Unknown
        return {of.filler.name(name): inner(of, one) for name, one in value.items()}

    table: dict[str, _Fill] = {
        **_SCHEMA,
        **dict.fromkeys(("properties", "$defs", "definitions", "dependentSchemas"), by_name),
        **dict.fromkeys(("items", "additionalItems"), _either(inner, _list(inner))),
        **dict.fromkeys(("additionalProperties", "not", "if", "then", "else", "contains", "propertyNames"), inner),
        **dict.fromkeys(("unevaluatedProperties", "unevaluatedItems"), inner),
        **dict.fromkeys(("anyOf", "oneOf", "allOf", "prefixItems"), _list(inner)),
    }
    return of.fields(value, table)


def _constant(of: BodyFiller, value: Any) -> Any:
    """A value that a schema names: one text of several must stay one of several."""
    return of.filler.name(value) if isinstance(value, str) else of.filler.value(value)


def _reference(of: BodyFiller, value: Any) -> Any:
    """A reference within the schema, by the names that are filled as where they are given."""
    parts = _string(value).split("/")
    if parts[0] != "#":
        raise _Unknown
    return "/".join(part if part in _KEYWORDS or part == "#" else of.filler.name(part) for part in parts)


_KEYWORDS: Final = frozenset(("$defs", "definitions", "properties", "items", "anyOf", "oneOf", "allOf"))
_TYPES: Final = _word("object", "array", "string", "number", "integer", "boolean", "null")
_SCHEMA: Final[Mapping[str, _Fill]] = {
    "type": _either(_list(_TYPES), _TYPES),
    "format": _word("date", "time", "date-time", "duration", "email", "uri", "uuid", "ipv4", "ipv6", "hostname"),
    **dict.fromkeys(("title", "description", "$comment"), _text),
    **dict.fromkeys(("enum", "examples"), _list(_constant)),
    **dict.fromkeys(("const", "default"), _constant),
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems", "uniqueItems"), _plain),
    **dict.fromkeys(("minProperties", "maxProperties", "minContains", "maxContains", "nullable"), _plain),
    "required": _list(_name),
    "$ref": _reference,
}
_FUNCTION: Final[Mapping[str, _Fill]] = {
    "name": _name,
    "description": _text,
    "parameters": _schema,
    "strict": _plain,
}
_TOOL: Final[Mapping[str, _Fill]] = {"type": _word("function"), "function": _object(_FUNCTION)}
_CALL: Final[Mapping[str, _Fill]] = {
    "id": _name,
    "index": _plain,
    "type": _word("function"),
    "function": _object({"name": _name, "arguments": _arguments}),
}
_MESSAGE: Final[Mapping[str, _Fill]] = {
    "role": _either(_word("system", "developer", "user", "assistant", "tool", "function"), lambda _of, _value: "user"),
    "content": _content,
    "name": _name,
    "tool_calls": _list(_object(_CALL)),
    "tool_call_id": _name,
    **dict.fromkeys(("reasoning", "reasoning_content", "thinking", "refusal"), _text),
    "prefix": _plain,
}
_FORMAT: Final[Mapping[str, _Fill]] = {
    "type": _word("text", "json_object", "json_schema"),
    "json_schema": _object({"name": _name, "description": _text, "schema": _schema, "strict": _plain}),
    "schema": _schema,
}
_PARAMETERS: Final = (
    *("temperature", "top_p", "top_k", "min_p", "typical_p", "top_a", "tfs_z", "seed", "n", "best_of"),
    *("max_tokens", "max_completion_tokens", "min_tokens", "n_predict", "n_keep", "stream", "echo"),
    *("presence_penalty", "frequency_penalty", "repeat_penalty", "repetition_penalty", "repeat_last_n"),
    *("length_penalty", "use_beam_search", "mirostat", "mirostat_tau", "mirostat_eta", "logprobs", "top_logprobs"),
    *("parallel_tool_calls", "ignore_eos", "cache_prompt", "skip_special_tokens", "add_generation_prompt"),
    *("include_stop_str_in_output", "continue_final_message", "return_progress", "timings_per_token"),
)
_BODY: Final[Mapping[str, _Fill]] = {
    **dict.fromkeys(_PARAMETERS, _plain),
    "messages": _list(_object(_MESSAGE)),
    "prompt": _either(_text, _list(_either(_text, _either(_token, _list(_token))))),
    "suffix": _text,
    "stop": _either(_text, _list(_text)),
    "tools": _list(_object(_TOOL)),
    "tool_choice": _either(_word("none", "auto", "required"), _object({**_TOOL, "function": _object(_FUNCTION)})),
    "response_format": _object(_FORMAT),
    "json_schema": _schema,
    "reasoning_effort": _word("none", "minimal", "low", "medium", "high", "xhigh"),
    "stream_options": _object(dict.fromkeys(("include_usage", "continuous_usage_stats"), _plain)),
    "chat_template_kwargs": _object(dict.fromkeys(("enable_thinking", "thinking", "add_generation_prompt"), _plain)),
}
