"""Asks an HTTP server one thing at a time, as a stranger or as a client: for checks, not for speed."""

from __future__ import annotations

import http.client
import ipaddress
import json
import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from localllm.errors import ServerUnreachable, UsageError

MAX_BODY_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server is: `http://host:port`, or https."""

    scheme: str
    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """Read a URL, or `host:port`; a path is ignored. Raises UsageError."""
        try:
            parts = urlsplit(text if "://" in text else f"http://{text}")
            port = parts.port
        except ValueError:
            parts, port = urlsplit(""), None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(f"{text!r} is no address of a server.", "http://127.0.0.1:8080")
        return cls(parts.scheme, parts.hostname, port or (443 if parts.scheme == "https" else 80))

    @property
    def netloc(self) -> str:
        """`host:port`, as the Host header has it."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.netloc}"


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
            return json.loads(self.body)
        except (ValueError, RecursionError):
            return None

    @property
    def problem(self) -> str:
        """The message of an error body, else the status."""
        body = self.json
        error = body.get("error") if isinstance(body, dict) else None
        message = error.get("message") if isinstance(error, dict) else None
        return message if isinstance(message, str) else f"HTTP {self.status}"


class HttpClient:
    """Asks one server; every question has a connection of its own. `key`: sent unless told otherwise.

    TLS certificates are not checked: what is found out is what the server does, not who it is.
    """

    def __init__(self, address: Address, key: bytes | None = None, timeout_s: float = 10.0) -> None:
        self.address = address
        self._key = key
        self._timeout_s = timeout_s

    def ask(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        *,
        with_key: bool = True,
    ) -> Reply:
        """Return the answer. `headers` replace what would be sent (Host, Content-Length). Raises ServerUnreachable."""
        with self._asked(method, path, body, headers or {}, with_key) as response:
            told = {name.lower(): value for name, value in response.getheaders()}
            return Reply(response.status, told, response.read(MAX_BODY_BYTES))

    @contextmanager
    def stream(self, path: str, value: Any) -> Iterator[http.client.HTTPResponse]:
        """Send a JSON document; give the answer to be read line by line. Raises ServerUnreachable."""
        data = json.dumps(value).encode()
        with self._asked("POST", path, data, {"Content-Type": "application/json"}, True) as response:
            yield response

    @contextmanager
    def _asked(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str], with_key: bool
    ) -> Iterator[http.client.HTTPResponse]:
        connection = self._connection()
        sent = {"Host": self.address.netloc, "User-Agent": "localllm", **headers}
        if body is not None:
            sent.setdefault("Content-Length", str(len(body)))
        if with_key and self._key is not None:
            sent.setdefault("Authorization", f"Bearer {self._key.decode('ascii')}")
        try:
            connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
            for name, text in sent.items():
                connection.putheader(name, text)
            connection.endheaders(body or None)
            yield connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            why = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise ServerUnreachable(f"{self.address} does not answer: {why}.", "localllm serve MODEL") from None
        finally:
            connection.close()

    def _connection(self) -> http.client.HTTPConnection:
        if self.address.scheme == "http":
            return http.client.HTTPConnection(self.address.host, self.address.port, timeout=self._timeout_s)
        context = ssl.create_default_context()
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        return http.client.HTTPSConnection(
            self.address.host, self.address.port, timeout=self._timeout_s, context=context
        )


def is_loopback(host: str) -> bool:
    """Say whether only this machine can reach an address; a name other than localhost may be anything."""
    if host.lower() == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback
