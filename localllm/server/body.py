"""Request bodies: read within limits of size and time, scanned for what JSON leaves open, decoded into structs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from starlette.types import Receive, Scope

from localllm.server.state import ServerState

Struct = TypeVar("Struct")


@dataclass(frozen=True, slots=True)
class Body(Generic[Struct]):
    """A decoded body: its struct, and the names that stand at its top level."""

    value: Struct
    names: tuple[str, ...]


async def read(scope: Scope, receive: Receive, state: ServerState, kind: type[Struct]) -> Body[Struct]:
    """Read and decode the body of a request (in an endpoint: `request.scope, request.receive`).

    Raises: HttpRefusal (408, 413, 503), UsageError whose `field` is the JSON pointer of what is wrong.
    """
    raise NotImplementedError
