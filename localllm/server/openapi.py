"""`/openapi.json`: every route, what it takes and every way in which it can answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

import localllm
from localllm.server import agent_headers, answer_schemas, cache, embeddings, health, metrics, models, tokens, wire
from localllm.server.body_schemas import REF, Schema, body_schemas
from localllm.server.replies import InPieces
from localllm.server.state import ServerState

PATH: Final = "/openapi.json"

_ANY: Final = (400, 403, 408, 431, 500, 503)
_WITH_BODY: Final = (413, 415)
_WITH_MODEL: Final = (404, 422, 504)
_STATUSES: Final[Mapping[int, str]] = {
    400: "The request is malformed, or asks for what cannot be honoured; `param` names the field.",
    401: "The API key is missing or wrong.",
    403: "The Host or Origin header is that of another server or page.",
    404: "There is no such model; the message lists those there are.",
    408: "The request did not come in time.",
    413: "The body is too large.",
    415: "The body is not declared as plain JSON.",
    422: "The model cannot be loaded, or this very request ended its process before.",
    429: "The queue is full.",
    431: "The headers are too large.",
    500: "The server or the engine failed.",
    503: "Loading, stopping, too busy, out of memory, or the model's process died.",
    504: "The model's process did not answer in time.",
}
_RETRY: Final = (429, 503)
_HEADERS: Final[Mapping[str, Schema]] = {
    "x-request-id": {
        "description": "The caller's, or a new one; it stands in every log line about the request.",
        "schema": {"type": "string", "pattern": "^[A-Za-z0-9._-]{1,64}$"},
    },
    "retry-after": {"description": "Seconds after which to try again.", "schema": {"type": "integer", "minimum": 1}},
    "x-localllm-ignored-fields": {
        "description": "Fields of the body that mean nothing here.",
        "schema": {"type": "string"},
    },
    "x-localllm-cached-tokens": {
        "description": "Prompt tokens that were not computed.",
        "schema": {"type": "integer", "minimum": 0},
    },
    "x-localllm-cached-by-tier": {
        "description": "The same by where their KV was: device=N, ram=N, disk=N.",
        "schema": {"type": "string", "pattern": "^device=[0-9]+, ram=[0-9]+, disk=[0-9]+$"},
    },
    "x-localllm-left-out": {
        "description": "A line that an agent puts before the system text anew each time, and that was left out.",
        "schema": {"enum": list(agent_headers.KNOWN)},
    },
    "x-localllm-queue-ms": {
        "description": "Time in the queue in ms.",
        "schema": {"type": "number", "minimum": 0},
    },
    "x-localllm-max-tokens": {
        "description": "The limit of the answer, where it is less than was asked for.",
        "schema": {"type": "integer", "minimum": 1},
    },
    "x-localllm-tools": {
        "description": "What became of tools; a call comes back as text.",
        "schema": {"enum": ["rendered", "ignored-by-template"]},
    },
}
_ABOUT_WORK: Final = (
    *("x-localllm-cached-tokens", "x-localllm-cached-by-tier", "x-localllm-queue-ms", "x-localllm-max-tokens"),
    *("x-localllm-tools",),
)
_WITH_CHAT: Final = ("x-localllm-left-out",)


@dataclass(frozen=True, slots=True)
class Operation:
    """One route.

    `told`: the struct of its answer, or a media type; `body`: the struct that it takes, or several; `chunk`:
    of a stream's events; `statuses`: of failures, beside those of any route; `unready`: the struct of its
    503; `is_open`: no key is asked for.
    """

    method: str
    path: str
    summary: str
    told: type | str
    body: type | tuple[type, ...] | None = None
    chunk: type | None = None
    statuses: tuple[int, ...] = ()
    unready: type | None = None
    is_open: bool = False


OPERATIONS: Final = (
    Operation(
        "post",
        "/v1/chat/completions",
        "Answer a conversation.",
        answer_schemas.ChatAnswer,
        wire.ChatBody,
        answer_schemas.ChatChunk,
        (*_WITH_MODEL, 429),
    ),
    Operation(
        "post",
        "/v1/completions",
        "Continue a text, or fill in.",
        answer_schemas.CompletionAnswer,
        wire.CompletionBody,
        answer_schemas.CompletionChunk,
        (*_WITH_MODEL, 429),
    ),
    Operation(
        "post",
        embeddings.PATH,
        "Turn texts into vectors.",
        embeddings.EmbeddingsAnswer,
        embeddings.EmbeddingsBody,
        statuses=(*_WITH_MODEL, 429),
    ),
    Operation(
        "post",
        cache.EXPLAIN_PATH,
        "Tell what the caches know of a prompt, and why not more; nothing is generated.",
        cache.CacheExplanation,
        (wire.ChatBody, wire.CompletionBody),
        None,
        _WITH_MODEL,
    ),
    Operation(
        "post", "/tokenize", "Turn a text into tokens.", tokens.TokenizeAnswer, tokens.TokenizeBody, None, _WITH_MODEL
    ),
    Operation(
        "post",
        "/detokenize",
        "Turn tokens into a text.",
        tokens.DetokenizeAnswer,
        tokens.DetokenizeBody,
        None,
        _WITH_MODEL,
    ),
    Operation(
        "post",
        "/apply-template",
        "Render a conversation as the model would see it.",
        tokens.TemplateAnswer,
        tokens.TemplateBody,
        None,
        _WITH_MODEL,
    ),
    Operation("get", models.LIST_PATH, "List the models.", models.ModelList),
    Operation("get", models.LIST_PATH + "/{model}", "Show a model.", models.ModelCard, statuses=(404,)),
    Operation("post", models.LOAD_PATH, "Load a model.", models.ModelCard, models.ModelBody, None, (404, 422)),
    Operation("post", models.UNLOAD_PATH, "Unload a model.", models.ModelCard, models.ModelBody, None, (404,)),
    Operation("get", "/health", "Ask whether the engines work.", health.Health, unready=health.Unhealthy),
    Operation("get", "/livez", "Ask whether the process answers.", health.Alive, is_open=True),
    Operation("get", "/readyz", "Ask whether work is taken.", health.Alive, unready=health.Unready, is_open=True),
    Operation("get", metrics.PATH, "Read the metrics, for Prometheus.", "text/plain"),
    Operation("get", PATH, "Read this document.", "application/json"),
)


def routes(state: ServerState) -> list[BaseRoute]:
    """Return the route. The document is made when it is first asked for."""
    made: list[bytes] = []

    async def show(request: Request) -> Response:
        if not made:
            made.append(msgspec.json.encode(document(state)))
        return InPieces(made[0], media_type="application/json")

    return [Route(PATH, show, methods=["GET"])]


def document(state: ServerState) -> Schema:
    """Return the document as it is true for this server's settings."""
    has_key = bool(state.settings.api_keys)
    paths: dict[str, Schema] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation, has_key)
    security = {"key": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "localllm",
            "version": localllm.__version__,
            "description": "Language models on this machine, in the API of OpenAI.",
        },
        "paths": paths,
        "components": {
            "schemas": {**_answers(), **body_schemas(state.settings.strict)},
            **({"securitySchemes": security} if has_key else {}),
        },
    }


def _answers() -> dict[str, Schema]:
    told = [operation.told for operation in OPERATIONS if isinstance(operation.told, type)]
    others = [struct for o in OPERATIONS for struct in (o.chunk, o.unready) if struct is not None]
    _, found = msgspec.json.schema_components([*told, *others, answer_schemas.ErrorBody], ref_template=REF)
    return found


def _operation(operation: Operation, has_key: bool) -> Schema:
    statuses = {*_ANY, *operation.statuses, *(_WITH_BODY if operation.body is not None else ())}
    is_guarded = has_key and not operation.is_open
    if is_guarded:
        statuses.add(401)
    described: Schema = {
        "operationId": _identifier(operation),
        "summary": operation.summary,
        "responses": {"200": _answer(operation), **{str(s): _failure(s, operation) for s in sorted(statuses)}},
    }
    if is_guarded:
        described["security"] = [{"key": []}]
    if operation.body is not None:
        refs = [_ref(body) for body in _bodies(operation)]
        schema = refs[0] if len(refs) == 1 else {"anyOf": refs}
        described["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    if "{model}" in operation.path:
        name = {"name": "model", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        described["parameters"] = [name]
    return described


def _bodies(operation: Operation) -> tuple[type, ...]:
    if operation.body is None:
        return ()
    return operation.body if isinstance(operation.body, tuple) else (operation.body,)


def _answer(operation: Operation) -> Schema:
    names = ["x-request-id"]
    if operation.body is not None:
        names.append("x-localllm-ignored-fields")
    if {wire.ChatBody, tokens.TemplateBody}.intersection(_bodies(operation)):
        names += _WITH_CHAT
    if operation.chunk is not None:
        names += _ABOUT_WORK
    elif operation.told is embeddings.EmbeddingsAnswer:
        names.append("x-localllm-queue-ms")
    if isinstance(operation.told, str):
        schema = {"type": "string"} if operation.told == "text/plain" else {"type": "object"}
        content: Schema = {operation.told: {"schema": schema}}
    else:
        content = {"application/json": {"schema": _ref(operation.told)}}
    if operation.chunk is not None:
        content["text/event-stream"] = {"schema": _event(operation.chunk)}
    return {"description": operation.summary, "headers": {n: _HEADERS[n] for n in names}, "content": content}


def _event(chunk: type) -> Schema:
    """Return the schema of each server-sent event of a stream."""
    parts = {"anyOf": [_ref(chunk), _ref(answer_schemas.ErrorBody)]}
    told = {"type": "string", "contentMediaType": "application/json", "contentSchema": parts}
    return {
        "description": "Each event. An ErrorBody is the last one; else [DONE] is.",
        "type": "object",
        "properties": {"data": {"anyOf": [{"const": "[DONE]"}, told]}},
        "required": ["data"],
    }


def _failure(status: int, operation: Operation) -> Schema:
    names = ["x-request-id", *(["retry-after"] if status in _RETRY else [])]
    struct = operation.unready if status == 503 and operation.unready is not None else answer_schemas.ErrorBody
    return {
        "description": _STATUSES[status],
        "headers": {name: _HEADERS[name] for name in names},
        "content": {"application/json": {"schema": _ref(struct)}},
    }


def _identifier(operation: Operation) -> str:
    words = operation.path.replace("{model}", "one").replace("-", "/").replace(".", "/").split("/")
    return "_".join([operation.method, *filter(None, words)])


def _ref(struct: type) -> dict[str, Any]:
    return {"$ref": REF.format(name=struct.__name__)}
