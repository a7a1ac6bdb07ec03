"""The examinations of `localllm doctor --server`: a running server, as anybody outside it sees it."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

from localllm.cli.checks import Finding, Row, carefully
from localllm.cli.http_client import Address, HttpClient, Reply, is_loopback
from localllm.errors import ServerUnreachable

_EVIL = "evil.example"
_OPEN_ROUTES = ("/livez", "/readyz", "/health", "/metrics", "/openapi.json", "/v1/models")
_CHAT = "/v1/chat/completions"
_CONNECT_TIMEOUT_S = 1.0
_JSON = {"Content-Type": "application/json"}


@dataclass
class Examined:
    """A server, and what several examinations ask of it, asked once."""

    client: HttpClient
    has_key: bool

    @property
    def address(self) -> Address:
        """Where it is."""
        return self.client.address

    @cached_property
    def stranger(self) -> Reply:
        """What somebody without a key gets for the list of models."""
        return self.client.ask("GET", "/v1/models", with_key=False)

    @property
    def asks_for_key(self) -> bool:
        """Say whether a stranger is turned away."""
        return self.stranger.status == 401

    @cached_property
    def other_addresses(self) -> list[str]:
        """The addresses beyond loopback that it answers at, where it is on this machine."""
        port = self.address.port
        own = own_addresses()
        if not (is_loopback(self.address.host) or self.address.host in own):
            return [self.address.host]
        return [address for address in own if _listens(address, port)]


Examination: TypeAlias = Callable[[Examined], Iterator[Row]]


def examine_server(address: Address, key: bytes | None) -> list[Finding]:
    """Run every examination. Raises ServerUnreachable where nothing answers at all."""
    server = Examined(HttpClient(address, key), key is not None)
    server.client.ask("GET", "/livez", with_key=False)
    return [finding for section, check in EXAMINATIONS for finding in carefully(section, check(server))]


def at_work(server: Examined) -> Iterator[Row]:
    """Whether it answers, and with which models."""
    for name, path in (("alive", "/livez"), ("ready", "/readyz"), ("engines", "/health")):
        reply = server.client.ask("GET", path)
        if reply.status == 200:
            yield name, "yes", "ok", ""
        else:
            yield (
                _not_told(server, name, reply)
                if reply.status == 401
                else (name, f"no: {reply.problem}", "note", "localllm ps")
            )
    reply = server.client.ask("GET", "/v1/models")
    if reply.status != 200:
        yield _not_told(server, "models", reply)
        return
    body = reply.json
    listed = body.get("data") if isinstance(body, dict) else None
    names = [str(model.get("id")) for model in listed if isinstance(model, dict)] if isinstance(listed, list) else []
    yield "models", ", ".join(names) or "none", "ok", ""


def _not_told(server: Examined, name: str, reply: Reply) -> Row:
    if reply.status == 401 and not server.has_key:
        return name, "not told without the key", "note", "--api-key-file FILE, or LOCALLLM_API_KEY"
    return name, f"not told: {reply.problem}", "note", ""


def reach(server: Examined) -> Iterator[Row]:
    """From where it can be reached, and what that asks for."""
    others = server.other_addresses
    if not others:
        yield "listens", f"on loopback only: {server.address}", "ok", ""
    else:
        told = f"others can reach it at {', '.join(others)}, port {server.address.port}"
        yield "listens", told, "note" if server.asks_for_key else "wrong", "--host 127.0.0.1 keeps it to this machine"
    if server.asks_for_key:
        yield "key", "asked for", "ok", ""
        wrong = server.client.ask(
            "GET", "/v1/models", headers={"Authorization": "Bearer no-such-key"}, with_key=False
        ).status
        yield "wrong key", f"HTTP {wrong}", "ok" if wrong == 401 else "wrong", ""
    elif server.stranger.status == 200:
        who = "whoever reaches it" if others else "every user and program of this machine"
        yield "key", f"none is asked for: {who} may use it", "wrong" if others else "ok", "--api-key-file FILE"
    else:
        yield "key", f"not known: {server.stranger.problem}", "note", ""
    yield from _encryption(server, others)


def _encryption(server: Examined, others: list[str]) -> Iterator[Row]:
    if server.address.scheme != "https":
        advice = "--tls-cert FILE --tls-key FILE"
        yield "encryption", "none", "note" if others else "ok", advice if others else ""
        return
    version, problem = _handshake(server.address)
    if problem:
        yield "encryption", f"{version}, but this machine does not trust its certificate: {problem}", "note", ""
    else:
        yield "encryption", f"{version}, its certificate is trusted here", "ok", ""


def strangers(server: Examined) -> Iterator[Row]:
    """What a web page in a browser of this machine could do."""
    origin = {"Origin": f"https://{_EVIL}"}
    preflight = {**origin, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"}
    ask = server.client.ask
    rebound = {"Host": f"{server.address.host}.{_EVIL}:{server.address.port}"}
    cross_site, form = {"Sec-Fetch-Site": "cross-site"}, {"Content-Type": "text/plain"}
    yield _refused("foreign Host", lambda: ask("GET", "/v1/models", headers={"Host": _EVIL}), 403)
    yield _refused("look-alike Host", lambda: ask("GET", "/livez", headers=rebound), 403)
    yield _refused("foreign Origin", lambda: ask("POST", _CHAT, b"{}", {**_JSON, **origin}), 403)
    yield _refused("cross-site", lambda: ask("GET", "/v1/models", headers=cross_site), 403)
    yield _refused("form post", lambda: ask("POST", _CHAT, b"a=1", form), 415)
    yield _refused("change by GET", lambda: ask("GET", "/v1/models/load"), 404, 405)
    allowed = [
        reply.headers["access-control-allow-origin"]
        for reply in (ask("OPTIONS", _CHAT, headers=preflight), ask("GET", "/v1/models", headers=origin))
        if "access-control-allow-origin" in reply.headers
    ]
    if allowed:
        yield "CORS", f"pages of {allowed[0]} may read answers", "wrong", "--allow-origin names who may, exactly"
    else:
        yield "CORS", "no foreign page may read answers", "ok", ""


def limits(server: Examined) -> Iterator[Row]:
    """What one request may cost."""
    ask = server.client.ask
    huge, packed = {**_JSON, "Content-Length": str(1 << 30)}, {**_JSON, "Content-Encoding": "gzip"}
    long = {"X-Long": "x" * (64 << 10)}
    yield _refused("1 GiB body", lambda: ask("POST", _CHAT, b"{", huge), 413)
    yield _refused("packed body", lambda: ask("POST", _CHAT, b"{}", packed), 415)
    yield _refused("deep body", lambda: ask("POST", _CHAT, b"[" * 10_000, _JSON), 400)
    yield _refused("64 KiB header", lambda: ask("GET", "/livez", headers=long), 400, 413, 431)


def exposed(server: Examined) -> Iterator[Row]:
    """What is told to somebody without a key."""
    readable = [p for p in _OPEN_ROUTES if server.client.ask("GET", p, with_key=False).status not in (401, 403, 404)]
    yield "without a key", ", ".join(readable) or "nothing", "ok", ""
    named = server.stranger.headers.get("server")
    yield "names its software", named or "no", "ok", ""


EXAMINATIONS: tuple[tuple[str, Examination], ...] = (
    ("at work", at_work),
    ("reach", reach),
    ("strangers in a browser", strangers),
    ("limits", limits),
    ("what is told", exposed),
)


def own_addresses() -> list[str]:
    """Return this machine's addresses beyond loopback and the link itself."""
    import psutil

    families = (socket.AF_INET, socket.AF_INET6)
    found = {a.address for entries in psutil.net_if_addrs().values() for a in entries if a.family in families}
    return sorted(address for address in found if "%" not in address and not is_loopback(address))


def _refused(name: str, ask: Callable[[], Reply], *wanted: int) -> Row:
    """Return the row of something that has to be refused with one of the `wanted` statuses."""
    try:
        status = ask().status
    except ServerUnreachable as error:
        return name, f"not answered: {error.message}", "note", ""
    if status == 401:  # before anything else is looked at
        return name, "refused: HTTP 401, without the key", "ok", ""
    if status in wanted:
        return name, f"refused: HTTP {status}", "ok", ""
    expected = " or ".join(map(str, wanted))
    return name, f"HTTP {status} instead of {expected}", "wrong", "put no such server where others reach it"


def _listens(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), _CONNECT_TIMEOUT_S).close()
    except OSError:
        return False
    return True


def _handshake(address: Address) -> tuple[str, str]:
    """Return the TLS version, and why the certificate is not trusted here ("" where it is)."""
    problem = ""
    context = ssl.create_default_context()
    while True:
        try:
            with socket.create_connection((address.host, address.port), 5.0) as plain:
                with context.wrap_socket(plain, server_hostname=address.host) as secure:
                    return secure.version() or "TLS", problem
        except ssl.SSLCertVerificationError as error:
            problem = error.verify_message
            context = ssl.create_default_context()
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        except OSError as error:
            raise ServerUnreachable(f"{address} does not speak TLS: {error}.", "localllm ps") from None
