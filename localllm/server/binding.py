"""The sockets of a server, bound before anything else is done: whoever holds the port is named."""

from __future__ import annotations

import contextlib
import errno
import socket
from typing import Final

from localllm.errors import UsageError

_BACKLOG: Final = 256
_TRIES: Final = 5
_ABSENT: Final = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.EPROTONOSUPPORT)


def bind(host: str, port: int) -> list[socket.socket]:
    """Return listening sockets for `host`, all with one port (0 = any that is free).

    Loopback means both of its addresses where there are two, so that `localhost` is this server
    however it is resolved. Raises: UsageError naming who listens there already.
    """
    for attempt in range(_TRIES):
        try:
            return _bind_all(_addresses(host), port)
        except OSError as error:
            if port != 0 or error.errno != errno.EADDRINUSE or attempt == _TRIES - 1:
                raise _refusal(host, port, error) from None
    raise AssertionError("unreachable")


def url_of(scheme: str, host: str, port: int) -> str:
    """Return the address to ask a server at."""
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def _addresses(host: str) -> list[tuple[socket.AddressFamily, str]]:
    """Return the addresses to bind; those after the first may be absent on this machine."""
    if host in ("127.0.0.1", "localhost", "::1"):
        return [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")]
    found = socket.getaddrinfo(host or None, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return list(dict.fromkeys((family, str(address[0])) for family, _, _, _, address in found))


def _bind_all(addresses: list[tuple[socket.AddressFamily, str]], port: int) -> list[socket.socket]:
    sockets: list[socket.socket] = []
    with contextlib.ExitStack() as undo:
        for family, address in addresses:
            try:
                sock = socket.create_server((address, port), family=family, backlog=_BACKLOG)
            except OSError as error:
                if sockets and error.errno in _ABSENT:
                    continue
                raise
            undo.callback(sock.close)
            sockets.append(sock)
            port = sock.getsockname()[1]
        undo.pop_all()
    return sockets


def _refusal(host: str, port: int, error: OSError) -> UsageError:
    if isinstance(error, socket.gaierror) or error.errno in _ABSENT:
        return UsageError(f"{host!r} is no address of this machine.", "localllm serve --host 127.0.0.1", field="host")
    if error.errno == errno.EADDRINUSE:
        return UsageError(
            f"Port {port} of {host} is taken by {_holder(port)}.", f"localllm serve --port {port + 1}", field="port"
        )
    if error.errno == errno.EACCES:
        return UsageError(f"Port {port} is not for this user.", "localllm serve --port 8080", field="port")
    return UsageError(f"Cannot listen on {host}, port {port}: {error.strerror}.", "try another address", field="host")


def _holder(port: int) -> str:
    """Return who listens on a port, as far as this user may know."""
    import psutil

    try:
        for found in psutil.net_connections("tcp"):
            if found.status == psutil.CONN_LISTEN and found.laddr.port == port and found.pid is not None:
                return f"{psutil.Process(found.pid).name()} (process {found.pid})"
    except (psutil.Error, OSError):
        pass
    return "another program"
