"""Whole answers, sent as their reader takes them, so that a large one does not look like a reader that stalls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

_PIECE_BYTES: Final = 64 * 1024


async def send_body(send: Send, body: bytes | memoryview) -> None:
    """Send a body in pieces, each when the one before was taken."""
    for start in range(0, len(body), _PIECE_BYTES):
        await send({"type": "http.response.body", "body": body[start : start + _PIECE_BYTES], "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


class InPieces(Response):
    """An answer whose body is sent in pieces."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send_body(send, b"" if scope["method"] == "HEAD" else self.body)


def reply(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return structs or builtins as a JSON answer."""
    return InPieces(msgspec.json.encode(value), status, headers, media_type="application/json")
