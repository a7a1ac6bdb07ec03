"""Failures as HTTP tells them: status, OpenAI's error body, and the headers that steer a client's retries."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import msgspec
from starlette.exceptions import HTTPException
from starlette.responses import Response

from localllm.errors import LocalLLMError, NotEnoughMemory
from localllm.server import sse

_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    501: "not_supported_error",
    503: "unavailable_error",
}
_CODES: Final = {404: "not_found", 405: "method_not_allowed"}
_HIDDEN_DETAILS: Final = frozenset(("field", "retry_after_s", "message", "type", "param", "code"))


class HttpRefusal(LocalLLMError):
    """A request that HTTP itself refuses, whatever a model could do with it."""

    exit_code, http_status, code = 2, 400, "http_refused"

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        hint: str = "",
        headers: Mapping[str, str] | None = None,
        **details: object,
    ) -> None:
        super().__init__(message, hint, **details)
        self.http_status = status
        self.code = code
        self.headers = dict(headers or {})


def from_http_exception(error: HTTPException) -> HttpRefusal:
    """Return the refusal that the router's own exception stands for."""
    code = _CODES.get(error.status_code, "http_refused")
    message = "There is no such route." if error.status_code == 404 else f"{error.detail}."
    return HttpRefusal(error.status_code, code, message, "GET /openapi.json lists what there is", error.headers)


def internal(kind: str) -> LocalLLMError:
    """Return what a client is told of a failure of ours: its kind, never its text."""
    return LocalLLMError(f"The server failed ({kind}).", "look at its log")


def error_body(error: LocalLLMError) -> dict[str, Any]:
    """Return `{"error": {message, type, param, code, ...}}`; the hint stands in the message, details beside it."""
    extra = {name: value for name, value in error.details.items() if name not in _HIDDEN_DETAILS and _is_plain(value)}
    return {
        "error": {
            "message": _sentence(error),
            "type": _type(error.http_status),
            "param": _param(error),
            "code": error.code,
            **extra,
        }
    }


def error_headers(error: LocalLLMError) -> dict[str, str]:
    """Return `retry-after` where trying again helps, `x-should-retry: false` where it does not."""
    headers = dict(error.headers) if isinstance(error, HttpRefusal) else {}
    if error.http_status in (429, 503) and not isinstance(error, NotEnoughMemory):
        wait_s = error.details.get("retry_after_s")
        wait_s = wait_s if isinstance(wait_s, (int, float)) and math.isfinite(wait_s) else 1
        headers.setdefault("retry-after", str(max(1, math.ceil(wait_s))))
    elif error.http_status >= 500:
        headers.setdefault("x-should-retry", "false")
    return headers


def error_response(error: LocalLLMError) -> Response:
    """Return the plain JSON answer that tells of `error`."""
    content = msgspec.json.encode(error_body(error))
    return Response(content, _status(error), error_headers(error), media_type="application/json")


def error_event(error: LocalLLMError) -> bytes:
    """Return the server-sent event that ends a stream with `error`."""
    return b"data: " + sse.encode(error_body(error)) + b"\n\n"


def _status(error: LocalLLMError) -> int:
    return error.http_status if 400 <= error.http_status <= 599 else 500


def _param(error: LocalLLMError) -> object:
    """Return the field that is to blame; of a conversation, at least the message."""
    index = error.details.get("message_index")
    return error.details.get("field") or (f"messages[{index}]" if isinstance(index, int) else None)


def _type(status: int) -> str:
    return _TYPES.get(status) or ("invalid_request_error" if status < 500 else "server_error")


def _sentence(error: LocalLLMError) -> str:
    if not error.hint:
        return error.message
    return f"{error.message.rstrip('.')}. Hint: {error.hint}"


def _is_plain(value: object) -> bool:
    return isinstance(value, (str, int)) or (isinstance(value, float) and math.isfinite(value))
