"""Sockets: loopback's both addresses on one port, and who holds a port that is taken."""

from __future__ import annotations

import os
import socket

import pytest

from localllm.errors import UsageError
from localllm.server.binding import bind, url_of


def close(sockets: list[socket.socket]) -> None:
    for sock in sockets:
        sock.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_loopback_is_both_its_addresses_on_one_port_and_nothing_else(host: str) -> None:
    sockets = bind(host, 0)
    try:
        names = [sock.getsockname()[:2] for sock in sockets]
        assert {name[0] for name in names} <= {"127.0.0.1", "::1"}
        assert names[0][0] == "127.0.0.1"
        assert len({name[1] for name in names}) == 1
        assert not any(sock.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT) for sock in sockets)
    finally:
        close(sockets)


def test_a_port_can_be_bound_again_at_once() -> None:
    sockets = bind("127.0.0.1", 0)
    port = sockets[0].getsockname()[1]
    client = socket.create_connection(("127.0.0.1", port))
    served, _ = sockets[0].accept()
    served.close()  # by the server: it is left in TIME_WAIT
    client.close()
    close(sockets)
    close(bind("127.0.0.1", port))


def test_whoever_holds_the_port_is_named() -> None:
    holder = socket.create_server(("127.0.0.1", 0))
    port = holder.getsockname()[1]
    try:
        with pytest.raises(UsageError) as refused:
            bind("127.0.0.1", port)
        assert f"(process {os.getpid()})" in refused.value.message
        assert str(port) in refused.value.message
        assert "--port" in refused.value.hint
    finally:
        holder.close()


def test_a_port_taken_on_one_of_the_addresses_only_is_taken() -> None:
    try:
        holder = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError:
        pytest.skip("needs IPv6 loopback")
    port = holder.getsockname()[1]
    try:
        with pytest.raises(UsageError):
            bind("127.0.0.1", port)
    finally:
        holder.close()
    close(bind("127.0.0.1", port))  # and what was bound meanwhile was closed


@pytest.mark.parametrize("host", ["192.0.2.1", "no.such.host.invalid"])
def test_an_address_of_another_machine_is_refused(host: str) -> None:
    with pytest.raises(UsageError) as refused:
        bind(host, 0)
    assert host in refused.value.message


def test_addresses_are_spelled_as_clients_need_them() -> None:
    assert url_of("http", "127.0.0.1", 80) == "http://127.0.0.1:80"
    assert url_of("https", "::1", 8080) == "https://[::1]:8080"
