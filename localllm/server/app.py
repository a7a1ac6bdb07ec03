"""The app: every route, and round each request its record, the checks of who may ask, and errors as JSON."""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import traceback
from collections.abc import Iterator
from typing import Final

from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import BaseRoute, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from localllm.errors import LocalLLMError
from localllm.runtime.types import new_request_id
from localllm.server import cache, embeddings, health, metrics, models, openai_chat, openai_completions, openapi, tokens
from localllm.server.body import ClientGone
from localllm.server.errors import error_response, from_http_exception, internal
from localllm.server.record import CLIENT_GONE, RequestRecord
from localllm.server.security import Headers, Preflight, Security
from localllm.server.state import ServerState, draining

_REQUEST_ID: Final = re.compile(rb"[A-Za-z0-9._-]{1,64}")
_MAX_DRAINED_S: Final = 2.0
_MAX_DRAINED_BYTES: Final = 32 * 1024 * 1024


def create_app(state: ServerState) -> ASGIApp:
    """Return the ASGI app of a server."""
    return App(state, list(_routes(state)))


def _routes(state: ServerState) -> Iterator[BaseRoute]:
    for module in (openai_chat, openai_completions, embeddings, cache, models, tokens, health, metrics, openapi):
        yield from module.routes(state)


class App:
    """What stands round every route. One coroutine a request; exceptions end here, told by kind only."""

    def __init__(self, state: ServerState, routes: list[BaseRoute]) -> None:
        self._state = state
        self._router = Router(routes, redirect_slashes=False)
        self._security = Security(state)
        self._salt = os.urandom(16)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        record = RequestRecord(_request_id(scope), "", method=_method(scope), client=self._client(scope))
        scope["state"]["record"] = record
        scope["app"] = self
        answer = _Answer(scope, receive, send, record)
        try:
            answer.headers += self._security.check(scope)
            await self._router(scope, answer.receive, answer.send)
        except Preflight as preflight:
            answer.headers += preflight.headers
            await Response(status_code=204)(scope, receive, answer.send)
        except ClientGone:
            record.code, record.is_cancelled = record.code or CLIENT_GONE, True
        except asyncio.CancelledError:  # the server ends: whoever waits is told
            await answer.refuse(draining(self._state.settings.drain_timeout_s))
        except (LocalLLMError, HTTPException) as error:
            await answer.refuse(from_http_exception(error) if isinstance(error, HTTPException) else error)
        except Exception as error:
            self._state.log.note("error", f"request {record.request_id} failed: {_place(error)}")
            await answer.refuse(internal(type(error).__name__))
        finally:
            route = scope.get("route")
            record.route = route.path_format if route is not None else "other"
            self._state.leave(scope)
            self._state.finish(record)

    def _client(self, scope: Scope) -> str:
        """Return whose the request is, for fairness: the key's, as a hash of this process only, or the connection's."""
        for name, value in scope["headers"]:
            if name == b"authorization":
                return "key:" + hashlib.blake2b(value, digest_size=4, key=self._salt).hexdigest()
        client = scope.get("client")
        return f"conn:{client[1]}" if client else "conn:0"


class _Answer:
    """The way back of one request: adds what every answer carries, and notes its status."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, record: RequestRecord) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        self._record = record
        self._is_started = False
        self._owes_body = _has_body(scope)
        self.headers: Headers = [(b"x-request-id", record.request_id.encode())]

    async def receive(self) -> Message:
        message = await self._receive()
        if not message.get("more_body", False):
            self._owes_body = False
        return message

    async def send(self, message: Message) -> None:
        if not self._is_started:
            self._is_started = True
            self._record.code = message["status"]
            message["headers"] = [*message.get("headers", ()), *self.headers]
        await self._send(message)

    async def refuse(self, error: LocalLLMError) -> None:
        """Answer with an error; where an answer is under way already, only close."""
        self._record.error = self._record.error or error.code
        if self._is_started:
            return
        response = error_response(error)
        headers = response.raw_headers
        if self._owes_body:
            headers = [*headers, (b"connection", b"close")]
        await self.send({"type": "http.response.start", "status": response.status_code, "headers": headers})
        is_head = self._scope["method"] == "HEAD"
        await self._send({"type": "http.response.body", "body": b"" if is_head else response.body, "more_body": True})
        await self._take_rest()
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _take_rest(self) -> None:
        """Read on for a moment: closing on unread bytes would take the answer from the client."""
        if not self._owes_body or _expects_continue(self._scope):
            return
        try:
            async with asyncio.timeout(_MAX_DRAINED_S):
                n_bytes = 0
                while self._owes_body and n_bytes < _MAX_DRAINED_BYTES:
                    n_bytes += len((await self.receive()).get("body", b""))
        except TimeoutError:
            return


def _method(scope: Scope) -> str:
    """Return the method for the record: one of those there are, never what a caller made up."""
    method: str = scope["method"]
    return method if method in ("GET", "HEAD", "POST", "OPTIONS", "PUT", "DELETE", "PATCH") else "OTHER"


def _request_id(scope: Scope) -> str:
    """Return the caller's x-request-id where it is one that can go anywhere, else a new one."""
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _REQUEST_ID.fullmatch(value):
            text: str = value.decode()
            return text
    return new_request_id()


def _has_body(scope: Scope) -> bool:
    for name, value in scope["headers"]:
        if name == b"transfer-encoding" or (name == b"content-length" and value.strip() != b"0"):
            return True
    return False


def _expects_continue(scope: Scope) -> bool:
    return any(name == b"expect" for name, _ in scope["headers"])


def _place(error: Exception) -> str:
    """Return where an exception of ours was raised and its kind; its text may hold text of a request."""
    frames = traceback.extract_tb(error.__traceback__)
    last = frames[-1] if frames else None
    where = f" at {os.path.basename(last.filename)}:{last.lineno} in {last.name}" if last else ""
    return f"{type(error).__name__}{where}"
