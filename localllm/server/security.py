"""Who may ask: exact Host names, no foreign pages, the key, and JSON only. Checked before any work, on every route."""

from __future__ import annotations

import hmac
import re
from collections.abc import Iterable
from typing import Final

from starlette.types import Scope

from localllm.server.errors import HttpRefusal
from localllm.server.isolation import KEY
from localllm.server.state import ServerState

_MAX_HEADERS: Final = 100
_OPEN_PATHS: Final = frozenset(("/livez", "/readyz"))
_TOKENS: Final = re.compile(rb"[A-Za-z0-9!#$%&'*+.^_`|~, -]{1,2000}")
_EXPOSED: Final = (
    b"x-request-id, x-localllm-cached-tokens, x-localllm-queue-ms, x-localllm-max-tokens, "
    b"x-localllm-cached-by-tier, x-localllm-ignored-fields, x-localllm-left-out, x-localllm-tools, retry-after"
)

Headers = list[tuple[bytes, bytes]]


class Preflight(Exception):
    """The request is a browser's question whether it may ask; `headers` are the answer."""

    def __init__(self, headers: Headers) -> None:
        super().__init__("preflight")
        self.headers = headers


class Security:
    """The checks of one server."""

    def __init__(self, state: ServerState) -> None:
        settings = state.settings
        self._hosts = _hosts(settings.host, state.port, settings.allow_hosts)
        self._names = frozenset(name.lower() for name in settings.allow_hosts if not _has_port(name))
        self._origins = frozenset(settings.allow_origins)
        self._keys = settings.api_keys
        self._header_bytes = settings.limits.header_bytes

    def check(self, scope: Scope) -> Headers:
        """Return the headers to add to the answer (those of CORS, where an origin was allowed).

        Raises: HttpRefusal (400, 401, 403, 415, 431), before anything of the body is read; Preflight.
        """
        _check_size(scope, self._header_bytes)
        _check_framing(scope)
        self._check_host(scope)
        origin = self._check_origin(scope)
        allowed = _allowing(origin) if origin is not None else []
        if scope["method"] == "OPTIONS" and origin is not None and _one(scope, b"access-control-request-method"):
            raise Preflight([*allowed, *_preflight(scope)])
        if self._keys and scope["path"] not in _OPEN_PATHS:
            scope["state"][KEY] = self._verified_key(scope)
        if scope["method"] == "POST":  # no route takes a body by another method
            _check_content(scope)
        return allowed

    def is_host_allowed(self, host: str) -> bool:
        """Say whether a Host header names this server."""
        return host in self._hosts or _without_port(host) in self._names

    def _check_host(self, scope: Scope) -> None:
        hosts = [value for name, value in scope["headers"] if name == b"host"]
        is_path = scope["raw_path"].startswith(b"/") or scope["raw_path"] == b"*"
        if len(hosts) != 1 or not is_path or not self.is_host_allowed(hosts[0].decode("latin-1")):
            raise HttpRefusal(
                403,
                "host_refused",
                "The Host header names another server.",
                "ask for localhost or 127.0.0.1 with this server's port, or start it with --allow-host NAME",
            )

    def _check_origin(self, scope: Scope) -> bytes | None:
        """Return the foreign origin that was allowed, None where the request comes from no foreign page."""
        origins: list[bytes] = [value for name, value in scope["headers"] if name == b"origin"]
        if len(origins) == 1:
            origin = origins[0].decode("latin-1")
            if origin in self._origins:
                return origins[0]
            scheme, _, host = origin.partition("://")
            is_own = scheme in ("http", "https") and host.encode("latin-1") == _one(scope, b"host")
        else:
            is_own = not origins
        if not is_own or _one(scope, b"sec-fetch-site") == b"cross-site":
            raise HttpRefusal(
                403,
                "origin_refused",
                "Pages of other origins may not use this server.",
                "start it with --allow-origin ORIGIN for a page that may",
            )
        return None

    def _verified_key(self, scope: Scope) -> bytes:
        """Return the server's key that was sent. All are compared, so that the time does not tell which is near."""
        given = _one(scope, b"authorization") or b""
        scheme, _, token = given.partition(b" ")
        equal = [key for key in self._keys if hmac.compare_digest(token.strip(), key)]
        if scheme.lower() != b"bearer" or not equal:
            raise HttpRefusal(
                401,
                "invalid_api_key",
                "The API key is missing or wrong.",
                "send Authorization: Bearer KEY",
                {"www-authenticate": "Bearer"},
            )
        return equal[0]


def _hosts(host: str, port: int, allowed: Iterable[str]) -> frozenset[str]:
    """Return the Host values that are this server: loopback's, its own address, and those allowed with a port."""
    names = {"localhost", "127.0.0.1", "[::1]"}
    if host not in ("", "0.0.0.0", "::"):
        names.add(f"[{host}]" if ":" in host else host)
    return frozenset({*names, *(f"{name}:{port}" for name in names), *filter(_has_port, map(str.lower, allowed))})


def _has_port(name: str) -> bool:
    return _without_port(name) != name.lower()


def _without_port(host: str) -> str:
    name, _, port = host.rpartition(":")
    return (name if name and port.isdigit() and not (":" in name and not name.endswith("]")) else host).lower()


def _one(scope: Scope, wanted: bytes) -> bytes | None:
    """Return the value of a header; of several, the first."""
    for name, value in scope["headers"]:
        if name == wanted:
            return bytes(value)
    return None


def _check_size(scope: Scope, limit_bytes: int) -> None:
    """Refuse headers that are too long, however they arrived."""
    n_bytes = len(scope["raw_path"]) + len(scope["query_string"])
    n_bytes += sum(len(name) + len(value) for name, value in scope["headers"])
    if n_bytes > limit_bytes or len(scope["headers"]) > _MAX_HEADERS:
        raise HttpRefusal(431, "headers_too_large", "The headers of the request are too large.", "send fewer")


def _check_framing(scope: Scope) -> None:
    """Refuse a body whose end two parties could see in different places. Source: RFC 9112, 6.1."""
    names = {name for name, _ in scope["headers"]}
    if b"transfer-encoding" in names and (b"content-length" in names or scope["http_version"] == "1.0"):
        raise HttpRefusal(400, "bad_http", "The length of the body is told in two ways.", "send one content-length")


def _check_content(scope: Scope) -> None:
    kinds = [value for name, value in scope["headers"] if name == b"content-type"]
    kind, _, parameters = kinds[0].partition(b";") if len(kinds) == 1 else (b"", b"", b"")
    charset = parameters.strip().lower().replace(b'"', b"").replace(b" ", b"")
    if kind.strip().lower() != b"application/json" or charset not in (b"", b"charset=utf-8", b"charset=utf8"):
        raise HttpRefusal(
            415, "unsupported_media_type", "The body must be JSON.", "send content-type: application/json"
        )
    encoding = _one(scope, b"content-encoding")
    if encoding is not None and encoding.strip().lower() != b"identity":
        raise HttpRefusal(415, "unsupported_encoding", "The body must not be compressed.", "send it as it is")


def _allowing(origin: bytes) -> Headers:
    return [
        (b"access-control-allow-origin", origin),
        (b"vary", b"origin"),
        (b"access-control-expose-headers", _EXPOSED),
    ]


def _preflight(scope: Scope) -> Headers:
    """Return what a page of an allowed origin may send. Cookies and other credentials are never among it."""
    asked = _one(scope, b"access-control-request-headers") or b""
    headers = [
        (b"access-control-allow-methods", b"GET, POST"),
        (b"access-control-max-age", b"600"),
    ]
    if _TOKENS.fullmatch(asked):
        headers.append((b"access-control-allow-headers", asked))
    if _one(scope, b"access-control-request-private-network") == b"true":
        headers.append((b"access-control-allow-private-network", b"true"))
    return headers
