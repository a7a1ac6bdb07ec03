"""Asks a server for facts, one question a connection: away from what is measured."""

from __future__ import annotations

import http.client
import socket
import ssl
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import msgspec

from localllm.bench.client.calls import Target
from localllm.errors import ServerUnreachable

MAX_BODY_BYTES = 16 << 20
CONNECT_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer, read to its end. `headers` by lower-case name."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The body as JSON; None where it is none."""
        try:
            return msgspec.json.decode(self.body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None


def ask(target: Target, path: str, fields: Mapping[str, Any] | None = None) -> Reply:
    """Return the answer to a GET, or to a POST of `fields`. Raises ServerUnreachable with a sentence and a hint."""
    connection, late = _connection(target), threading.Event()
    headers = dict(target.headers)
    body = None if fields is None else msgspec.json.encode(fields)
    if body is not None:
        headers |= {"content-type": "application/json", "content-length": str(len(body))}
    try:
        connection.connect()
        with _ended_after(connection, target.timeout_s, late):
            connection.request("GET" if body is None else "POST", target.prefix + path, body, headers)
            answer = connection.getresponse()
            told = {name.lower(): value for name, value in answer.getheaders()}
            reply = Reply(answer.status, told, answer.read(MAX_BODY_BYTES))
    except (OSError, http.client.HTTPException, UnicodeError, ValueError) as error:
        raise _failure(target, TimeoutError() if late.is_set() else error) from None
    finally:
        connection.close()
    if late.is_set():  # a body without a length ends like this too
        raise _failure(target, TimeoutError())
    return reply


@contextmanager
def _ended_after(connection: http.client.HTTPConnection, timeout_s: float, late: threading.Event) -> Iterator[None]:
    """End the connection at that time whatever comes: a timeout of its own begins anew with every byte."""
    sock = connection.sock
    assert isinstance(sock, socket.socket)
    sock.settimeout(timeout_s)

    def end() -> None:
        late.set()
        with suppress(OSError):
            socket.socket.shutdown(sock, socket.SHUT_RDWR)  # of the plain socket: TLS would wait for a farewell

    timer = threading.Timer(timeout_s, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _connection(target: Target) -> http.client.HTTPConnection:
    timeout_s = min(CONNECT_TIMEOUT_S, target.timeout_s)
    if target.tls is None:
        return http.client.HTTPConnection(target.host, target.port, timeout=timeout_s)
    return http.client.HTTPSConnection(target.host, target.port, timeout=timeout_s, context=target.tls)


def _failure(target: Target, error: Exception) -> ServerUnreachable:
    """Return why there is no answer, and what to look at."""
    host = f"[{target.host}]" if ":" in target.host else target.host
    where = f"{'http' if target.tls is None else 'https'}://{host}:{target.port}"
    match error:
        case socket.gaierror():
            return ServerUnreachable(f"There is no machine called {target.host}.", "check how the address is spelt")
        case ConnectionRefusedError():
            return ServerUnreachable(f"Nothing listens at {where}.", "start the server, or check its port")
        case ssl.SSLCertVerificationError():
            why = error.verify_message or error.reason
            return ServerUnreachable(
                f"The certificate of {where} is not trusted: {why}.", "SSL_CERT_FILE=FILE names whom to trust"
            )
        case ssl.SSLError():
            return ServerUnreachable(f"{where} does not speak TLS.", f"http://{host}:{target.port}")
        case TimeoutError():
            advice = "check the address, or a firewall between"
            return ServerUnreachable(
                f"{where} does not answer in time.",
                advice if target.tls is None else f"http://{host}:{target.port} if it does not speak TLS; {advice}",
            )
        case http.client.HTTPException() | ConnectionError() if target.tls is None:
            return ServerUnreachable(
                f"{where} does not speak HTTP: {_words(error)}.", f"https://{host}:{target.port}, or check the port"
            )
    return ServerUnreachable(f"{where} cannot be reached: {_words(error)}.", "check the address")


def _words(error: Exception) -> str:
    """Say what a failure is, quoting nothing that the other side sent."""
    if isinstance(error, http.client.BadStatusLine):
        return "no HTTP answer"
    return getattr(error, "strerror", None) or type(error).__name__
