"""Errors on the wire: body, type by status, and what steers a client's retries."""

from __future__ import annotations

import json

import pytest

from localllm import errors
from localllm.server.errors import HttpRefusal, error_body, error_event, error_headers, error_response

KINDS = [kind for kind in errors.LocalLLMError.__subclasses__() if kind.__module__ == "localllm.errors"]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_error_has_a_whole_body_and_an_error_status(kind: type[errors.LocalLLMError]) -> None:
    response = error_response(kind("It went wrong.", "type this"))
    body = json.loads(response.body)["error"]
    assert set(body) == {"message", "type", "param", "code"}
    assert body["message"] == "It went wrong. Hint: type this"
    assert isinstance(body["code"], str)
    assert 400 <= response.status_code <= 599


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (413, "invalid_request_error"),
        (422, "invalid_request_error"),
        (429, "rate_limit_error"),
        (500, "server_error"),
        (503, "unavailable_error"),
    ],
)
def test_the_type_follows_the_status(status: int, kind: str) -> None:
    assert error_body(HttpRefusal(status, "x", "y"))["error"]["type"] == kind


def test_details_stand_beside_the_message_as_far_as_json_can_tell_them() -> None:
    error = errors.ContextOverflow(
        "Too long.", n_ctx=512, field="messages", odd=object(), endless=float("inf"), code="x"
    )
    body = error_body(error)["error"]
    assert body["n_ctx"] == 512
    assert body["param"] == "messages"
    assert body["code"] == "context_length_exceeded"
    assert not body.keys() & {"odd", "endless", "field"}


@pytest.mark.parametrize(
    ("error", "headers"),
    [
        (errors.QueueFull("full"), {"retry-after": "1"}),
        (errors.Unavailable("loading", retry_after_s=2.1), {"retry-after": "3"}),
        (errors.Unavailable("odd", retry_after_s=float("nan")), {"retry-after": "1"}),
        (errors.WorkerDied("died"), {"retry-after": "1"}),
        (errors.EngineError("rc"), {"x-should-retry": "false"}),
        (errors.NotEnoughMemory("no"), {"x-should-retry": "false"}),
        (errors.UsageError("no"), {}),
        (HttpRefusal(401, "x", "y", headers={"www-authenticate": "Bearer"}), {"www-authenticate": "Bearer"}),
    ],
)
def test_headers_say_whether_to_try_again(error: errors.LocalLLMError, headers: dict[str, str]) -> None:
    assert error_headers(error) == headers


def test_an_error_event_is_one_that_clients_raise_on() -> None:
    event = error_event(errors.WorkerDied("It died."))
    assert event.startswith(b'data: {"error":{')
    assert event.endswith(b"}}\n\n")
    assert event.count(b"\n") == 2


def test_an_error_event_is_one_line_to_every_reader() -> None:
    event = error_event(errors.TemplateError("a\u2028b\u2029c\x85d\ne")).decode()
    assert len(event.splitlines()) == 2
    assert json.loads(event.removeprefix("data: "))["error"]["message"] == "a\u2028b\u2029c\x85d\ne"
