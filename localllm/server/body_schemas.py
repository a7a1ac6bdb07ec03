"""The JSON schemas of bodies: what msgspec says of the structs, and what is checked outside of them.

Ranges are those that the runtime checks, read from where it keeps them; so a schema cannot drift from them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec

from localllm.runtime import sampling_params
from localllm.runtime.stop import MAX_STOPS
from localllm.runtime.types import MAX_CHOICES, MAX_PRIORITY, MAX_SEED, MAX_TOP_LOGPROBS
from localllm.server import embeddings, models, options, tokens
from localllm.server.fields import INERT, Neutral
from localllm.server.openai_completions import MAX_PROMPTS
from localllm.server.wire import ChatBody, CompletionBody

Schema = dict[str, Any]

REF: Final = "#/components/schemas/{name}"
_LEAST_INT: Final = -(2**63)
_GREATEST_INT: Final = 2**64 - 1
_NULL: Final[Schema] = {"type": "null"}
_TEXT: Final[Schema] = {"type": "string"}
_TOKEN: Final[Schema] = {"type": "integer", "minimum": 0}
_SOME_TOKENS: Final[Schema] = {"type": "array", "minItems": 1, "items": _TOKEN}
_SOME_TEXT: Final[Schema] = {"type": "string", "minLength": 1}
_LIMIT: Final[Schema] = {"anyOf": [{"const": -1}, {"type": "integer", "minimum": 1, "maximum": _GREATEST_INT}, _NULL]}
_PART: Final[Schema] = {
    "anyOf": [
        _TEXT,
        {
            "type": "object",
            "properties": {"type": {"enum": ["text", "input_text", "output_text", "refusal"]}},
            "required": ["type"],
        },
    ]
}
_MESSAGE: Final[Schema] = {
    "type": "object",
    "properties": {
        "role": {"type": "string", "minLength": 1},
        "content": {"anyOf": [_TEXT, {"type": "array", "items": _PART}, _NULL]},
    },
    "required": ["role"],
}
_CONVERSATION: Final[Schema] = {"type": "array", "minItems": 1, "items": _MESSAGE}
_BIAS: Final[Schema] = {
    "type": "number",
    "minimum": -sampling_params.MAX_BIAS,
    "maximum": sampling_params.MAX_BIAS,
}
_BIASED: Final[Schema] = {"type": "integer", "minimum": 0, "maximum": sampling_params.MAX_INT}

_GENERATION: Final[Mapping[str, Schema]] = {
    **{
        name: {"anyOf": [{"type": "number", "minimum": low, "maximum": high}, _NULL]}
        for name, (low, high) in sampling_params.RANGES.items()
    },
    **{
        name: {
            "description": meaning,
            "anyOf": [{"type": "integer", "minimum": low, "maximum": sampling_params.MAX_INT}, _NULL],
        }
        for name, (low, meaning) in sampling_params.LEAST.items()
    },
    "max_tokens": _LIMIT,
    "min_tokens": {"anyOf": [{"type": "integer", "minimum": 0, "maximum": _GREATEST_INT}, _NULL]},
    "n": {"anyOf": [{"type": "integer", "minimum": 1, "maximum": MAX_CHOICES}, _NULL]},
    "seed": {"anyOf": [{"type": "integer", "minimum": -1, "maximum": MAX_SEED}, _NULL]},
    "priority": {"anyOf": [{"type": "integer", "minimum": -MAX_PRIORITY, "maximum": MAX_PRIORITY}, _NULL]},
    "stop": {
        "anyOf": [
            _SOME_TEXT,
            {"type": "array", "maxItems": MAX_STOPS, "items": _SOME_TEXT},
            _NULL,
        ]
    },
    "dry_sequence_breakers": {
        "anyOf": [
            {
                "type": "array",
                "maxItems": sampling_params.MAX_BREAKERS,
                "items": {"type": "string", "minLength": 1, "maxLength": sampling_params.MAX_BREAKER_CHARS},
            },
            _NULL,
        ]
    },
    "logit_bias": {
        "anyOf": [
            {"type": "object", "propertyNames": {"pattern": "^[0-9]{1,10}$"}, "additionalProperties": _BIAS},
            {
                "type": "array",
                "items": {
                    "type": "array",
                    "prefixItems": [_BIASED, _BIAS],
                    "minItems": 2,
                    "maxItems": 2,
                },
            },
            _NULL,
        ]
    },
    "response_format": {
        "anyOf": [{"type": "object", "properties": {"type": {"const": "text"}}, "required": ["type"]}, _NULL]
    },
}
_TOP_LOGPROBS: Final[Schema] = {"anyOf": [{"type": "integer", "minimum": 0, "maximum": MAX_TOP_LOGPROBS}, _NULL]}
_INPUT: Final[Schema] = {
    "anyOf": [
        _SOME_TEXT,
        _SOME_TOKENS,
        {"type": "array", "minItems": 1, "items": _SOME_TEXT},
        {"type": "array", "minItems": 1, "items": _SOME_TOKENS},
    ]
}
_PROMPT: Final[Schema] = {
    "anyOf": [
        _TEXT,
        _SOME_TOKENS,
        {
            "type": "array",
            "minItems": 1,
            "maxItems": MAX_PROMPTS,
            "items": {"anyOf": [_TEXT, {"type": "array", "items": _TOKEN}]},
        },
    ]
}
_CHECKED: Final[Mapping[type, Mapping[str, Schema]]] = {
    ChatBody: {
        **_GENERATION,
        "max_completion_tokens": _LIMIT,
        "top_logprobs": _TOP_LOGPROBS,
        "tool_choice": {"enum": ["auto", "none", None]},
        "messages": _CONVERSATION,
    },
    CompletionBody: {
        **_GENERATION,
        "logprobs": _TOP_LOGPROBS,
        "best_of": {"anyOf": [{"type": "integer", "minimum": 1, "maximum": MAX_CHOICES}, _NULL]},
        "prompt": _PROMPT,
    },
    embeddings.EmbeddingsBody: {"input": _INPUT},
    tokens.TokenizeBody: {},
    tokens.DetokenizeBody: {},
    tokens.TemplateBody: {"messages": _CONVERSATION},
    models.ModelBody: {},
}
"""What is checked after decoding, by field. It stands in place of what the struct says of the field."""

_REFUSED: Final[Mapping[type, Neutral]] = {
    ChatBody: options.REFUSED,
    CompletionBody: options.REFUSED,
    embeddings.EmbeddingsBody: embeddings.REFUSED,
    tokens.TemplateBody: tokens.TEMPLATE_REFUSED,
}


def body_schemas(strict: bool) -> dict[str, Schema]:
    """Return the schemas of all bodies, by the structs' names. `strict`: unknown fields are refused."""
    _, found = msgspec.json.schema_components(list(_CHECKED), ref_template=REF)
    for struct, checked in _CHECKED.items():
        schema = found[struct.__name__]
        properties = schema["properties"]
        properties.update(copy.deepcopy(dict(checked)))
        properties.update(_beside(_REFUSED.get(struct, {})))
        for name in sorted(INERT - properties.keys()):
            properties[name] = {"description": "Accepted; no answer depends on it."}
        if strict:
            schema["additionalProperties"] = False
        if "stream_options" in properties:
            properties["stream_options"] = _stream_options(strict)
        for part in _integers(schema):
            part.setdefault("minimum", _LEAST_INT)
            part.setdefault("maximum", _GREATEST_INT)
    found["TokenizeBody"]["oneOf"] = [  # exactly one of them is a text
        {"required": [name], "properties": {name: _TEXT}} for name in ("content", "prompt")
    ]
    return found


def _stream_options(strict: bool) -> Schema:
    flag = {"type": ["boolean", "null"]}
    told = dict.fromkeys(sorted(options.STREAM_OPTIONS), flag)
    return {"anyOf": [{"type": "object", "properties": told, "additionalProperties": False if strict else flag}, _NULL]}


def _beside(refused: Neutral) -> Iterator[tuple[str, Schema]]:
    """Yield the fields that are known and cannot be honoured, with the values that change nothing."""
    for name, (neutral, hint) in refused.items():
        values = [value for i, value in enumerate((*neutral, None)) if value not in (*neutral, None)[:i]]
        yield name, {"enum": values, "description": f"Cannot be honoured otherwise: {hint}."}


def _integers(schema: Any) -> Iterator[Schema]:
    """Yield every schema of whole numbers in a schema."""
    if isinstance(schema, dict):
        if schema.get("type") == "integer":
            yield schema
        for part in schema.values():
            yield from _integers(part)
    elif isinstance(schema, list):
        for part in schema:
            yield from _integers(part)
