"""The document: valid, complete, and true of what the server answers."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from jsonschema import Draft202012Validator
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from starlette.routing import Route

from localllm.errors import LocalLLMError, NotEnoughMemory, Poisoned, QueueFull, TimedOut, WorkerDied
from localllm.runtime.sampling_params import LEAST, RANGES, Sampling
from localllm.server.app import App, create_app
from localllm.server.openapi import OPERATIONS, Operation
from localllm.server.state import ServerSettings
from tests.server.fakes import Running, serving

MODEL_ROUTES = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")
TRUE_OF_ANSWERS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    negative_data_rejection,
]


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with serving() as server:
        yield server


@pytest.fixture(scope="module")
def document(running: Running) -> Any:
    return running.get("/openapi.json").json


def schema_of(document: Any, name: str) -> Draft202012Validator:
    """Return a validator of one schema of the document."""
    return Draft202012Validator({"$ref": f"#/components/schemas/{name}", "components": document["components"]})


def test_every_route_is_described_and_nothing_else(running: Running, document: Any) -> None:
    app = create_app(running.state)
    assert isinstance(app, App)
    there = {
        (route.path_format, method.lower())
        for route in app._router.routes
        if isinstance(route, Route)
        for method in (route.methods or ()) - {"HEAD"}
    }
    told = {(path, method) for path, methods in document["paths"].items() for method in methods}
    assert told == there
    assert len(OPERATIONS) == len(told)
    assert {method for _, method in there} == {"get", "post"}  # security checks the content of POST alone


def test_every_schema_is_a_schema_and_every_reference_leads_to_one(document: Any) -> None:
    schemas = document["components"]["schemas"]
    for schema in schemas.values():
        Draft202012Validator.check_schema(schema)

    def references(part: Any) -> Iterator[str]:
        if isinstance(part, dict):
            yield from [part["$ref"]] if "$ref" in part else []
            for value in part.values():
                yield from references(value)
        elif isinstance(part, list):
            for value in part:
                yield from references(value)

    assert {reference.removeprefix("#/components/schemas/") for reference in references(document)} <= schemas.keys()


def test_operations_have_names_of_their_own(document: Any) -> None:
    names = [operation["operationId"] for methods in document["paths"].values() for operation in methods.values()]
    assert len(set(names)) == len(names)


def test_every_sampling_setting_is_there_with_its_range(document: Any) -> None:
    for body in ("ChatBody", "CompletionBody"):
        properties = document["components"]["schemas"][body]["properties"]
        assert {field.name for field in fields(Sampling)} <= properties.keys()
        for name, (low, high) in RANGES.items():
            number = properties[name]["anyOf"][0]
            assert (number["minimum"], number["maximum"]) == (low, high)
        for name, (low, _) in LEAST.items():
            assert properties[name]["anyOf"][0]["minimum"] == low


HELLO = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    ("path", "name", "body"),
    [
        ("/v1/chat/completions", "ChatBody", {**HELLO, "temperature": 101}),
        ("/v1/chat/completions", "ChatBody", {**HELLO, "temperature": 100, "max_tokens": 1}),
        ("/v1/chat/completions", "ChatBody", {**HELLO, "n": 17}),
        ("/v1/chat/completions", "ChatBody", {**HELLO, "max_tokens": 0}),
        ("/v1/chat/completions", "ChatBody", {**HELLO, "max_tokens": -1}),
        ("/v1/chat/completions", "ChatBody", {**HELLO, "seed": 2**64 - 1, "max_tokens": 1}),
        ("/v1/chat/completions", "ChatBody", {**HELLO, "seed": 2**64}),
        ("/v1/chat/completions", "ChatBody", {**HELLO, "seed": -2}),
        ("/v1/chat/completions", "ChatBody", {**HELLO, "stop": ""}),
        ("/v1/chat/completions", "ChatBody", {**HELLO, "stop": ["x"] * 17}),
        ("/v1/chat/completions", "ChatBody", {**HELLO, "stop": ["x"] * 16, "max_tokens": 1}),
        ("/v1/chat/completions", "ChatBody", {**HELLO, "logit_bias": {"x": 1}}),
        ("/v1/chat/completions", "ChatBody", {**HELLO, "logit_bias": {"97": 101}}),
        ("/v1/chat/completions", "ChatBody", {**HELLO, "logit_bias": {"97": 5}, "max_tokens": 1}),
        ("/v1/chat/completions", "ChatBody", {**HELLO, "logit_bias": [[97, 5]], "max_tokens": 1}),
        ("/v1/chat/completions", "ChatBody", {**HELLO, "logit_bias": [[97]]}),
        ("/v1/chat/completions", "ChatBody", {**HELLO, "response_format": {"type": "json_object"}}),
        ("/v1/chat/completions", "ChatBody", {**HELLO, "response_format": {"type": "text"}, "max_tokens": 1}),
        ("/v1/chat/completions", "ChatBody", {**HELLO, "tool_choice": "required"}),
        ("/v1/chat/completions", "ChatBody", {**HELLO, "tool_choice": None, "max_tokens": 1}),
        ("/v1/chat/completions", "ChatBody", {**HELLO, "grammar": "x"}),
        ("/v1/chat/completions", "ChatBody", {**HELLO, "grammar": "", "user": {"odd": 1}, "max_tokens": 1}),
        ("/v1/chat/completions", "ChatBody", {**HELLO, "mirostat": 2}),
        ("/v1/chat/completions", "ChatBody", {"messages": []}),
        ("/v1/chat/completions", "ChatBody", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
        ("/v1/chat/completions", "ChatBody", {**HELLO, "stream_options": {"include_usage": 1}}),
        ("/v1/completions", "CompletionBody", {"prompt": []}),
        ("/v1/completions", "CompletionBody", {"prompt": ["a"] * 65}),
        ("/v1/completions", "CompletionBody", {"prompt": ["a", "b"], "max_tokens": 1}),
        ("/v1/completions", "CompletionBody", {"prompt": [97, 98], "max_tokens": 1}),
        ("/v1/completions", "CompletionBody", {"prompt": ["a", 1]}),
        ("/v1/completions", "CompletionBody", {"prompt": "a", "logprobs": 21}),
        ("/v1/embeddings", "EmbeddingsBody", {"input": ["a", 1]}),
        ("/v1/embeddings", "EmbeddingsBody", {"input": ["a"], "truncate": True}),
        ("/v1/embeddings", "EmbeddingsBody", {"input": [[97], [98, 99]], "truncate": False}),
        ("/tokenize", "TokenizeBody", {}),
        ("/tokenize", "TokenizeBody", {"content": "a", "prompt": "a"}),
        ("/tokenize", "TokenizeBody", {"content": "a", "prompt": None}),
        ("/detokenize", "DetokenizeBody", {"tokens": [-1]}),
        ("/apply-template", "TemplateBody", {**HELLO, "add_generation_prompt": False}),
        ("/v1/models/load", "ModelBody", {"model": ""}),
    ],
)
def test_the_schema_and_the_server_agree_on_a_body(
    running: Running, document: Any, path: str, name: str, body: Any
) -> None:
    is_valid = schema_of(document, name).is_valid(body)
    assert (running.post(path, body).status == 200) == is_valid


def test_under_strict_unknown_fields_are_no_part_of_a_body() -> None:
    with serving(settings=ServerSettings(strict=True)) as running:
        strict = schema_of(running.get("/openapi.json").json, "ChatBody")
        for extra, status in (({"odd": 1}, 400), ({"user": "u", "grammar": ""}, 200)):
            body = {**HELLO, "max_tokens": 1, **extra}
            assert running.post("/v1/chat/completions", body).status == status
            assert strict.is_valid(body) == (status == 200)
        body = {**HELLO, "max_tokens": 1, "stream_options": {"odd": True}}
        assert (running.post("/v1/chat/completions", body).status, strict.is_valid(body)) == (400, False)


def test_with_a_key_it_says_where_it_is_asked_for() -> None:
    with serving(settings=ServerSettings(api_keys=(b"k",))) as running:
        assert running.get("/openapi.json").status == 401
        document = running.get("/openapi.json", authorization="Bearer k").json
        for operation in OPERATIONS:
            described = document["paths"][operation.path][operation.method]
            path = operation.path.replace("{model}", "fake")
            is_open = running.request(operation.method.upper(), path, b"{}" if operation.body else None).status != 401
            assert ("security" not in described) == ("401" not in described["responses"]) == is_open


@pytest.mark.parametrize("error", [QueueFull("m"), WorkerDied("m"), Poisoned("m"), NotEnoughMemory("m"), TimedOut("m")])
@pytest.mark.parametrize(
    "operation",
    [o for o in OPERATIONS if o.body is not None],
    ids=lambda value: value.path if isinstance(value, Operation) else value.code,
)
def test_every_failure_is_described(running: Running, document: Any, operation: Any, error: LocalLLMError) -> None:
    """What a worker or the supervisor can raise on a route is a status that the document lists, with its body."""
    bodies = {"/v1/completions": {"prompt": "a"}, "/v1/embeddings": {"input": "a"}, "/detokenize": {"tokens": [97]}}
    body = bodies.get(operation.path, {**HELLO, "content": "a", "model": "fake"})
    running.supervisor.refuses["fake"] = error
    try:
        reply = running.post(operation.path, body)
    finally:
        del running.supervisor.refuses["fake"]
    if operation.path == "/v1/models/unload":
        assert reply.status == 200
        running.post("/v1/models/load", {"model": "fake"})
        return
    if error.http_status == 429 and operation.path not in MODEL_ROUTES:
        return  # nothing there stands in the queue
    if error.http_status == 504 and operation.path == "/v1/models/load":
        return  # it waits for as long as it takes
    described = document["paths"][operation.path]["post"]["responses"][str(reply.status)]
    assert ("retry-after" in described["headers"]) or "retry-after" not in reply.headers
    assert schema_of(document, "ErrorBody").is_valid(reply.json)


def test_answers_that_tell_of_trouble_are_described(running: Running, document: Any) -> None:
    running.worker.answers_ping = False
    try:
        assert schema_of(document, "Unhealthy").is_valid(running.get("/health").json)
    finally:
        running.worker.answers_ping = True
    assert schema_of(document, "Health").is_valid(running.get("/health").json)
    running.state.is_draining = True
    try:
        assert schema_of(document, "Unready").is_valid(running.get("/readyz").json)
    finally:
        running.state.is_draining = False


BRIEF = settings(
    max_examples=8,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(scope="module")
def calls(running: Running, document: Any) -> Any:
    """The document as schemathesis reads it."""
    schema = schemathesis.openapi.from_dict(copy.deepcopy(document))
    schema.config.update(base_url=running.url)
    return schema


@pytest.mark.parametrize(
    ("operation", "mode"),
    [
        *((operation, GenerationMode.POSITIVE) for operation in OPERATIONS),
        *((operation, GenerationMode.NEGATIVE) for operation in OPERATIONS if operation.body is not None),
    ],
    ids=lambda value: value.path if isinstance(value, Operation) else str(value),
)
def test_generated_requests_are_answered_as_described(calls: Any, operation: Any, mode: GenerationMode) -> None:
    described = calls[operation.path][operation.method]
    n_calls = 0

    @BRIEF
    @given(case=described.as_strategy(generation_mode=mode))
    def call(case: Any) -> None:
        nonlocal n_calls
        n_calls += 1
        case.call_and_validate(checks=TRUE_OF_ANSWERS, timeout=20)

    call()
    assert n_calls > 0
