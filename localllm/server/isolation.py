"""Whose a request is: with whom it shares KV - with all, or, where clients are isolated, with those of the same key.

Every route makes its requests of a `Sender`, so that none looks up, or renders, with what is another's.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, field
from typing import Final

from starlette.types import Scope

from localllm.runtime.types import GenerationOptions, new_request_id
from localllm.server.state import ServerSettings, record_of

CONNECTION: Final = "connection"
"""Where the scope's state holds what no two connections have in common."""

KEY: Final = "key"
"""Where it holds the server's key that a request was let in by; nothing where the server asks for none."""

_PURPOSE: Final = b"localllm cache"


@dataclass(frozen=True, slots=True)
class Sharing:
    """Requests share KV where their `salt` is the same. `is_private`: nothing of it is worth a place on disk."""

    salt: str = ""
    is_private: bool = False


@dataclass(frozen=True, slots=True)
class Sender:
    """Who sends a body, as far as the request that becomes of it depends on that.

    `options` hold the client and with whom it shares; what the body asks for is added to them.
    """

    options: GenerationOptions = GenerationOptions()
    request_id: str = field(default_factory=new_request_id)
    keeps_agent_headers: bool = False


def new_connection() -> str:
    """Return a name that no other connection has or had."""
    return os.urandom(16).hex()


def sender_of(scope: Scope, settings: ServerSettings) -> Sender:
    """Return who sends the request of a scope."""
    record, sharing = record_of(scope), sharing_of(scope, settings)
    options = GenerationOptions(client=record.client, salt=sharing.salt, is_private=sharing.is_private)
    return Sender(options, record.request_id, settings.keeps_agent_headers)


def sharing_of(scope: Scope, settings: ServerSettings) -> Sharing:
    """Return with whom the request of a scope shares KV.

    Where the server asks for a key it is the one that was verified, else whatever key was sent. Without any it is
    the connection that counts: what it computed is of no use once it is closed. The salt is the same after a
    restart, so that a key finds its own again; keys in the tiers are keyed once more.
    """
    if settings.is_cache_shared:
        return Sharing()
    key = scope["state"][KEY] if settings.api_keys else _token(scope)
    if key:
        return Sharing("key:" + hashlib.blake2b(key, digest_size=16, key=_PURPOSE).hexdigest())
    return Sharing("connection:" + (scope["state"].get(CONNECTION) or new_connection()), is_private=True)


def kept_apart(n_keys: int) -> str:
    """Return one line on whom isolation keeps apart on a server that takes so many keys."""
    match n_keys:
        case 0:
            who = "clients are kept apart by the key they send, else by connection; those that send the same share"
        case 1:
            who = "all clients with this key share; --api-key-file may hold several keys, one a line"
        case _:
            who = f"the clients of {n_keys} keys are kept apart; those with the same key share"
    return f"--no-shared-cache: {who}"


def _token(scope: Scope) -> bytes:
    """Return the API key that was sent, b"" for none: the first, as the check of keys reads it."""
    for name, value in scope["headers"]:
        if name == b"authorization":
            return bytes(value).partition(b" ")[2].strip()
    return b""
