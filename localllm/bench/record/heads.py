"""Who may ask the proxy, and which headers go through it. No input or output here."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import h11
import msgspec

from localllm.errors import LocalLLMError

MAX_HEAD_BYTES: Final = 64 << 10
Headers = list[tuple[bytes, bytes]]

# Of one connection, not of the request (RFC 9110, 7.6.1); framing and Expect are told anew on the other side.
_OF_THE_HOP: Final = frozenset(
    (
        *(b"connection", b"proxy-connection", b"keep-alive", b"te", b"trailer", b"transfer-encoding", b"upgrade"),
        *(b"proxy-authenticate", b"proxy-authorization", b"host", b"expect", b"content-length"),
    )
)


class Refused(LocalLLMError):
    """A request that the proxy does not pass on."""

    def __init__(self, status: int, code: str, message: str, hint: str = "") -> None:
        super().__init__(message, hint)
        self.http_status = status
        self.code = code


def check(request: h11.Request, port: int) -> None:
    """Refuse what names another host or comes from a foreign page, before anything of it is passed on.

    Raises Refused (403). The same rule as `localllm serve` has: a page that found the port must not
    reach the server behind it, which cannot tell the page's requests from ours.
    """
    hosts, origins = _values(request, b"host"), _values(request, b"origin")
    names = (b"127.0.0.1", b"localhost", b"[::1]")
    own = {*names, *(name + b":%d" % port for name in names)}
    is_path = request.target.startswith(b"/") or request.target == b"*"
    if len(hosts) != 1 or hosts[0].lower() not in own or not is_path:
        raise Refused(403, "host_refused", "The Host header names another server.", f"ask 127.0.0.1:{port}")
    is_own = not origins or origins == [b"http://" + hosts[0]]
    if not is_own or b"cross-site" in _values(request, b"sec-fetch-site"):
        raise Refused(403, "origin_refused", "Pages of other origins may not use this server.")


def to_upstream(request: h11.Request, host: str, n_body_bytes: int, *, is_recorded: bool) -> Headers:
    """Return the headers of the request for the server behind.

    An answer that is recorded must come uncompressed: its tokens are counted. An Origin is our own
    here, and would be a foreign one there.
    """
    left_out = {*_OF_THE_HOP, *_named_by_connection(request.headers), b"origin"}
    if is_recorded:
        left_out.add(b"accept-encoding")
    headers = [(b"host", host.encode()), *_kept(request.headers.raw_items(), left_out), (b"connection", b"close")]
    if is_recorded:
        headers.append((b"accept-encoding", b"identity"))
    if n_body_bytes or request.method not in (b"GET", b"HEAD", b"OPTIONS", b"DELETE"):
        headers.append((b"content-length", b"%d" % n_body_bytes))
    return headers


def to_client(response: h11.Response) -> Headers:
    """Return the headers of an answer for who asked; its length is told where the server told it."""
    left_out = (_OF_THE_HOP | _named_by_connection(response.headers)) - {b"content-length"}
    return _kept(response.headers.raw_items(), left_out)


def refusal(error: LocalLLMError) -> tuple[h11.Response, bytes]:
    """Return the answer that tells of an error, in OpenAI's form; the connection ends with it."""
    message = f"{error.message.rstrip('.')}. Hint: {error.hint}" if error.hint else error.message
    kind = "permission_error" if error.http_status == 403 else "invalid_request_error"
    kind = "server_error" if error.http_status >= 500 else kind
    body = msgspec.json.encode({"error": {"message": message, "type": kind, "param": None, "code": error.code}})
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        (b"connection", b"close"),
    ]
    return h11.Response(status_code=error.http_status, headers=headers), body


def _kept(items: Iterable[tuple[bytes, bytes]], left_out: Iterable[bytes]) -> Headers:
    return [(name, value) for name, value in items if name.lower() not in left_out]


def _named_by_connection(headers: Iterable[tuple[bytes, bytes]]) -> frozenset[bytes]:
    named = (value for name, value in headers if name == b"connection")
    return frozenset(part.strip().lower() for value in named for part in value.split(b","))


def _values(request: h11.Request, wanted: bytes) -> list[bytes]:
    return [value for name, value in request.headers if name == wanted]
