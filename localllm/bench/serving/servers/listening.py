"""Ports of this machine: a free one, and who listens on one."""

from __future__ import annotations

import socket
from contextlib import suppress

import psutil

FORWARDERS = ("ssh", "sshd", "docker-proxy", "com.docker.backend", "kubectl", "rootlessport", "socat")
"""Programs that listen for a server elsewhere: their memory is not its memory."""


def free_port() -> int:
    """Return a port of loopback that is free now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def listeners(port: int) -> list[psutil.Process]:
    """Return the servers that listen on a port of this machine, as far as they are ours to see; no forwarders."""
    found: dict[int, psutil.Process] = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            for connection in process.net_connections(kind="tcp"):
                if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port:
                    found[process.pid] = process
    return [process for process in found.values() if _name(process) not in FORWARDERS]


def _name(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return str(process.name())
    return ""
