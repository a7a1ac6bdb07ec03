"""With whom a request shares KV: with all, or, where clients are isolated, with those of the same key."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from typing import Final

from starlette.types import Scope

from localllm.server.state import ServerSettings

CONNECTION: Final = "connection"
"""Where the scope's state holds what no two connections have in common."""

_PURPOSE: Final = b"localllm cache"


@dataclass(frozen=True, slots=True)
class Sharing:
    """Requests share KV where their `salt` is the same. `is_private`: nothing of it is worth a place on disk."""

    salt: str = ""
    is_private: bool = False


def new_connection() -> str:
    """Return a name that no other connection has or had."""
    return os.urandom(16).hex()


def sharing_of(scope: Scope, settings: ServerSettings) -> Sharing:
    """Return with whom the request of a scope shares KV.

    Without a key it is the connection that counts: what it computed is of no use once it is closed. The salt
    is the same after a restart, so that a key finds its own again; keys in the tiers are keyed once more.
    """
    if settings.is_cache_shared:
        return Sharing()
    token = _token(scope)
    if token:
        return Sharing("key:" + hashlib.blake2b(token, digest_size=16, key=_PURPOSE).hexdigest())
    return Sharing("connection:" + (scope["state"].get(CONNECTION) or new_connection()), is_private=True)


def _token(scope: Scope) -> bytes:
    """Return the API key that was sent, b"" for none: the first, as the check of keys reads it."""
    for name, value in scope["headers"]:
        if name == b"authorization":
            return bytes(value).partition(b" ")[2].strip()
    return b""
