"""One GET over the standard library: checked addresses, proxies, certificates, redirects followed by hand."""

from __future__ import annotations

import base64
import contextlib
import http.client
import ipaddress
import os
import socket
import ssl
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from urllib.parse import unquote, urljoin, urlsplit

from localllm.errors import DownloadFailed, UsageError
from localllm.models.sources.net import Destination, Policy

MAX_REDIRECTS = 8
TRY_AGAIN = frozenset({408, 425, 429, 500, 502, 503, 504})
"""Answers that another try may change."""

_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_CA_VARIABLES = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")


class Interrupted(Exception):
    """The connection broke or the server asked to wait: worth another try. `wait_s` as the server asked."""

    def __init__(self, reason: str, wait_s: float = 0.0) -> None:
        super().__init__(reason)
        self.reason = reason
        self.wait_s = wait_s


@dataclass(frozen=True, slots=True)
class Reply:
    """A response without redirects left. `hub` are the X- headers that the endpoint itself sent on the way."""

    status: int
    headers: http.client.HTTPMessage
    hub: Mapping[str, str]
    _response: http.client.HTTPResponse

    def read(self, n_bytes: int) -> bytes:
        """Return what has arrived, at most `n_bytes`; b"" at the end. Raises Interrupted."""
        with told_as_interrupted():
            return self._response.read1(n_bytes)


@contextlib.contextmanager
def told_as_interrupted() -> Iterator[None]:
    """Turn what a network throws into Interrupted; a certificate that does not verify is final."""
    try:
        yield
    except ssl.SSLCertVerificationError as error:
        raise DownloadFailed(
            f"the server's certificate is not trusted: {error.verify_message}",
            "export SSL_CERT_FILE=/path/to/your/ca.pem",
        ) from error
    except TimeoutError as error:
        raise Interrupted("nothing arrived for too long") from error
    except socket.gaierror as error:
        raise Interrupted(f"the server's name does not resolve ({error.strerror})") from error
    except (OSError, http.client.HTTPException) as error:
        raise Interrupted(f"the connection broke ({error or type(error).__name__})") from error


def certificates() -> ssl.SSLContext:
    """Return a context that trusts the system's authorities, or those that the CA variables name.

    Raises UsageError where a variable names nothing usable.
    """
    for name in _CA_VARIABLES:
        path = os.environ.get(name)
        if path:
            try:
                folder = os.path.isdir(path)
                return ssl.create_default_context(cafile=None if folder else path, capath=path if folder else None)
            except (OSError, ssl.SSLError) as error:
                raise UsageError(f"{name}={path} cannot be used: {error}", f"unset {name}") from error
    context = ssl.create_default_context()
    if not context.cert_store_stats()["x509_ca"] and not ssl.get_default_verify_paths().capath:
        import certifi  # comes with huggingface-hub; Pythons from python.org have no authorities of their own

        context.load_verify_locations(certifi.where())
    return context


class Transport:
    """Makes requests under one policy. Not for several threads."""

    def __init__(self, policy: Policy, *, token: str | None = None, connect_s: float = 15.0, stall_s: float = 30.0):
        self._policy = policy
        self._token = token
        self._connect_s = connect_s
        self._stall_s = stall_s
        self._context: ssl.SSLContext | None = None

    @contextlib.contextmanager
    def get(self, url: str, headers: Mapping[str, str]) -> Iterator[Reply]:
        """Request `url`, following redirects that the policy allows, each checked anew.

        Raises Interrupted (try again), DownloadFailed (do not).
        """
        hub: dict[str, str] = {}
        for _ in range(MAX_REDIRECTS + 1):
            with told_as_interrupted():
                connection, path = self._connect(url)
            try:
                with told_as_interrupted():
                    connection.request("GET", path, headers={**self._own_headers(url), **headers})
                    response = connection.getresponse()
                if self._policy.may_carry_token(url):
                    hub.update((k.lower(), v) for k, v in response.getheaders() if k.lower().startswith("x-"))
                location = response.getheader("Location")
                if response.status not in _REDIRECTS or not location:
                    yield Reply(response.status, response.msg, hub, response)
                    return
                url = urljoin(url, location)
            finally:
                connection.close()
        raise DownloadFailed(f"the server redirected more than {MAX_REDIRECTS} times", "localllm doctor")

    def _own_headers(self, url: str) -> dict[str, str]:
        own = {"User-Agent": "localllm", "Accept-Encoding": "identity", "Accept": "*/*"}
        if self._token and self._policy.may_carry_token(url):
            own["Authorization"] = f"Bearer {self._token}"
        proxy = proxy_for(url)
        if proxy and urlsplit(url).scheme == "http":
            own.update(_proxy_auth(proxy))
        return own

    def _connect(self, url: str) -> tuple[http.client.HTTPConnection, str]:
        proxy = proxy_for(url)
        destination = self._policy.check(url, proxied=proxy is not None)
        parts = urlsplit(url)
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        if proxy is None:
            return self._direct(destination), path
        return self._through(proxy, destination), url if destination.origin.scheme == "http" else path

    def _direct(self, destination: Destination) -> http.client.HTTPConnection:
        """Connect to an address that was checked, not to whatever the name means a moment later."""
        origin = destination.origin
        connection = self._open(origin.host, origin.port, secure=False)
        connection.sock = self._dial(destination)
        if origin.scheme == "https":
            connection.sock = self._tls().wrap_socket(connection.sock, server_hostname=origin.host)
            connection.default_port = http.client.HTTPS_PORT
        return connection

    def _dial(self, destination: Destination) -> socket.socket:
        last: OSError = socket.gaierror(socket.EAI_NONAME, "no address")
        for address in destination.addresses:
            try:
                dialled = socket.create_connection((address, destination.origin.port), self._connect_s)
                dialled.settimeout(self._stall_s)
                return dialled
            except OSError as error:
                last = error
        raise last

    def _through(self, proxy: str, destination: Destination) -> http.client.HTTPConnection:
        parts = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
        if parts.scheme != "http" or not parts.hostname:
            raise UsageError(f"the proxy on {parts.hostname or '?'} is not an http:// proxy", "unset https_proxy")
        origin = destination.origin
        secure = origin.scheme == "https"
        connection = self._open(parts.hostname, parts.port or 80, secure=secure)
        if secure:
            connection.set_tunnel(origin.host, origin.port, headers=_proxy_auth(proxy))
        return connection

    def _open(self, host: str, port: int, *, secure: bool) -> http.client.HTTPConnection:
        if secure:
            return http.client.HTTPSConnection(host, port, timeout=self._stall_s, context=self._tls())
        return http.client.HTTPConnection(host, port, timeout=self._stall_s)

    def _tls(self) -> ssl.SSLContext:
        if self._context is None:
            self._context = certificates()
        return self._context


def is_loopback(host: str) -> bool:
    """Tell whether `host` names this machine, which no proxy can reach for us."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def proxy_for(url: str) -> str | None:
    """Return the proxy that the environment names for `url`; None for this machine and where none is."""
    parts = urlsplit(url)
    if is_loopback(parts.hostname or ""):
        return None
    proxies = urllib.request.getproxies()
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    if not proxy or urllib.request.proxy_bypass(parts.netloc):
        return None
    return proxy


def _proxy_auth(proxy: str) -> dict[str, str]:
    parts = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    if not parts.username:
        return {}
    pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
    return {"Proxy-Authorization": "Basic " + base64.b64encode(pair.encode()).decode()}
