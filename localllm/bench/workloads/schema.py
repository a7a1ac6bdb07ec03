"""JSON schemas of answer types in the plainest form there is, so that every server's constraint engine takes them."""

from __future__ import annotations

from typing import Any

import msgspec


def answer_schema(answer_type: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the JSON schema of a type (not of one that holds itself), with no `$ref` in it."""
    schema = msgspec.json.schema(answer_type)
    found = _inlined(schema, schema.get("$defs", {}))
    assert isinstance(found, dict)
    return found


def _inlined(value: Any, definitions: dict[str, Any]) -> Any:
    """Return `value` with every reference replaced by what it refers to."""
    if isinstance(value, list):
        return [_inlined(item, definitions) for item in value]
    if not isinstance(value, dict):
        return value
    if "$ref" in value:
        return _inlined(definitions[value["$ref"].rpartition("/")[2]], definitions)
    return {key: _inlined(item, definitions) for key, item in value.items() if key != "$defs"}
