"""The network sockets of a process, and whether a port can be taken."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from typing import Any

from localllm.cli.http_client import Address


def sockets_of(process: Any) -> Iterator[tuple[str, int, str]]:
    """Yield (host, port, "listens" or "talks") of a process's network sockets; "talks": the peer's address."""
    import psutil

    with contextlib.suppress(psutil.NoSuchProcess):
        for one in process.net_connections(kind="inet"):
            if one.status == psutil.CONN_LISTEN or (one.type == socket.SOCK_DGRAM and one.laddr):
                yield one.laddr.ip, one.laddr.port, "listens"
            elif one.raddr:
                yield one.raddr.ip, one.raddr.port, "talks"


def is_free(address: Address) -> bool:
    """Say whether a port can be taken again at once."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # answers of a moment ago may linger
        try:
            probe.bind((address.host, address.port))
            probe.listen(1)
        except OSError:
            return False
    return True
