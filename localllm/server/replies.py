"""What the routes beside generation share: plain JSON answers, and what becomes of fields that mean nothing to them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import msgspec
from starlette.responses import Response

from localllm.errors import UsageError
from localllm.server.body import Body
from localllm.server.options import INERT

Neutral = Mapping[str, tuple[tuple[Any, ...], str]]
"""Fields that would change an answer: the values that change nothing (null always), and what to do instead."""

_HEADER_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def reply(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return structs or builtins as a JSON answer."""
    return Response(msgspec.json.encode(value), status, headers, media_type="application/json")


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
