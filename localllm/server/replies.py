"""What the routes beside generation share: plain JSON answers, and what becomes of fields that mean nothing to them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from localllm.errors import UsageError
from localllm.server.body import Body
from localllm.server.options import INERT

Neutral = Mapping[str, tuple[tuple[Any, ...], str]]
"""Fields that would change an answer: the values that change nothing (null always), and what to do instead."""

_PIECE_BYTES: Final = 64 * 1024
_HEADER_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class InPieces(Response):
    """An answer that goes out as its reader takes it, so that a large one does not look like a reader that stalls."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        body = b"" if scope["method"] == "HEAD" else self.body
        for start in range(0, len(body), _PIECE_BYTES):
            await send({"type": "http.response.body", "body": body[start : start + _PIECE_BYTES], "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def reply(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return structs or builtins as a JSON answer."""
    return InPieces(msgspec.json.encode(value), status, headers, media_type="application/json")


def ignored_fields(body: Body[Any], refused: Neutral, strict: bool) -> dict[str, str]:
    """Return the header that lists the fields of a body which mean nothing here; {} where there are none.

    Raises: UsageError naming one of `refused` that cannot be honoured, or, where `strict`, an unknown one.
    """
    for name, value in body.values(refused).items():
        neutral, hint = refused[name]
        if value is not None and not any(value == other and type(value) is type(other) for other in neutral):
            raise UsageError(f"The field {name} cannot be honoured.", hint, field=name)
    unknown = sorted(set(body.names) - set(body.value.__struct_fields__) - INERT - refused.keys())
    shown = [name if _HEADER_NAME.fullmatch(name) else "?" for name in unknown]
    if shown and strict:
        raise UsageError(f"The field {shown[0]} means nothing here (--strict).", "leave it out", field=shown[0])
    return {"x-localllm-ignored-fields": ", ".join(shown)} if shown else {}
