"""Where a download may go: https to public addresses, and whatever HF_ENDPOINT itself names. Pure rules."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias
from urllib.parse import urlsplit

from localllm.errors import DownloadFailed, UsageError

Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
Resolver: TypeAlias = Callable[[str, int], Sequence[str]]
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_MIRROR_HINT = "for a mirror on your own network: export HF_ENDPOINT=http://its-address"
_PORTS = {"https": 443, "http": 80}


class Refused(DownloadFailed):
    """This address is not one that a download may go to."""

    code = "address_refused"


@dataclass(frozen=True, slots=True)
class Origin:
    """Scheme, host (lower case, without a final dot) and port of an address."""

    scheme: str
    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}"


def origin_of(url: str) -> Origin:
    """Return the origin of an http or https address. Raises Refused for anything else."""
    try:
        parts = urlsplit(url)
        host, port = (parts.hostname or "").rstrip("."), parts.port
    except ValueError as error:
        raise Refused(f"the address {url[:200]!r} is malformed: {error}") from error
    if parts.scheme not in _PORTS or not host:
        raise Refused(f"a download may not go to {url[:200]!r}: only https addresses are followed", _MIRROR_HINT)
    if parts.username is not None or parts.password is not None or "\\" in url or any(c <= " " for c in url):
        raise Refused(f"the address on {host} holds a user name or forbidden characters", _MIRROR_HINT)
    return Origin(parts.scheme, host, _PORTS[parts.scheme] if port is None else port)


def system_resolve(host: str, port: int) -> Sequence[str]:
    """Return the addresses of `host` as the system resolves them. Raises OSError."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def is_public(address: str) -> bool:
    """Tell whether an IP address is on the public internet, also inside its IPv6 disguises."""
    try:
        found: Address = ipaddress.ip_address(address)
    except ValueError:
        return False
    if isinstance(found, ipaddress.IPv6Address):
        inner = found.ipv4_mapped or found.sixtofour
        if inner is None and found in _NAT64:
            inner = ipaddress.IPv4Address(int(found) & 0xFFFFFFFF)
        found = inner or found
    return found.is_global and not found.is_multicast


@dataclass(frozen=True, slots=True)
class Destination:
    """An address that passed: connect to one of `addresses` (empty: a proxy resolves the name)."""

    origin: Origin
    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Policy:
    """The rules for one pull. `named`: the user chose this endpoint, so it may be http or local."""

    endpoint: Origin
    named: bool
    resolve: Resolver = system_resolve

    def check(self, url: str, *, proxied: bool = False) -> Destination:
        """Return where to connect for `url`, checked before every request and redirect.

        Raises Refused (scheme or address), OSError (the name does not resolve).
        """
        origin = origin_of(url)
        own = self.named and self._is_endpoint(origin)
        if origin.scheme != "https" and not own:
            raise Refused(f"the download was sent to {origin}, which is not https", _MIRROR_HINT)
        if proxied:
            literal = _literal(origin.host)
            bad = (
                origin.host == "localhost" or origin.host.endswith(".localhost") or (literal and not is_public(literal))
            )
            if bad and not own:
                raise Refused(f"the download was sent to {origin}, an address of the local network", _MIRROR_HINT)
            return Destination(origin, ())
        addresses = tuple(self.resolve(origin.host, origin.port))
        local = [address for address in addresses if not is_public(address)]
        if local and not own:
            raise Refused(
                f"the download was sent to {origin} at {local[0]}, an address of the local network", _MIRROR_HINT
            )
        return Destination(origin, addresses)

    def may_carry_token(self, url: str) -> bool:
        """Tell whether the token may go to `url`: to the endpoint itself, never less protected."""
        origin = origin_of(url)
        return origin == self.endpoint or (origin.scheme == "https" and self._is_endpoint(origin))

    def _is_endpoint(self, origin: Origin) -> bool:
        if origin.host != self.endpoint.host:
            return False
        return origin == self.endpoint or (origin.scheme == "https" and origin.port == 443)


def _literal(host: str) -> str | None:
    """Return the IP address that `host` spells, odd spellings included; None for a name."""
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        pass
    try:
        return socket.inet_ntoa(socket.inet_aton(host))
    except OSError:
        return None


def policy_for(endpoint: str, *, named: bool, resolve: Resolver = system_resolve) -> Policy:
    """Return the policy of an endpoint's address. Raises UsageError where it is not an http(s) address."""
    try:
        return Policy(origin_of(endpoint), named, resolve)
    except Refused as error:
        raise UsageError(f"HF_ENDPOINT: {error.message}", "export HF_ENDPOINT=https://huggingface.co") from error
