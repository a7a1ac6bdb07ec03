"""Clients that never end their TLS handshake (T11), and those that end it with a request in the same packet."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from localllm.server.state import Limits, ServerSettings
from tests.server.fakes import Running, serving


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with cert.pem and key.pem for localhost."""
    folder = tmp_path_factory.mktemp("tls")
    command = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -keyout key.pem -out cert.pem "
        "-days 2 -subj /CN=localhost -addext subjectAltName=DNS:localhost"
    )
    if subprocess.run(command.split(), cwd=folder, capture_output=True, check=False).returncode:
        pytest.skip("needs openssl to make a certificate")
    return folder


@contextlib.contextmanager
def secure(certificate: Path, **limits: Any) -> Iterator[tuple[Running, ssl.SSLContext]]:
    """Serve over TLS with some limits changed; also give a context that trusts the server."""
    settings = ServerSettings(
        tls_cert=certificate / "cert.pem", tls_key=certificate / "key.pem", limits=replace(Limits(), **limits)
    )
    with serving(settings=settings) as running:
        yield running, ssl.create_default_context(cafile=str(certificate / "cert.pem"))


def livez(running: Running) -> bytes:
    return f"GET /livez HTTP/1.1\r\nhost: localhost:{running.port}\r\nconnection: close\r\n\r\n".encode()


def ask(running: Running, context: ssl.SSLContext) -> bytes:
    """Return the answer of a client that does all in time."""
    with context.wrap_socket(running.connect(), server_hostname="localhost") as sock:
        sock.settimeout(20)
        sock.sendall(livez(running))
        return b"".join(iter(lambda: sock.recv(65536), b""))


def n_closed(socks: list[socket.socket], within_s: float) -> int:
    """Count the connections that the server has closed, as soon as all are, or after a time."""
    end_s = time.monotonic() + within_s
    while True:
        n_open = 0
        for sock in socks:
            sock.setblocking(False)
            try:
                n_open += bool(sock.recv(65536))
            except BlockingIOError:
                n_open += 1
            except OSError:
                continue
        if not n_open or time.monotonic() > end_s:
            return len(socks) - n_open
        time.sleep(0.02)


@pytest.mark.parametrize("sent", [b"", b"\x16\x03\x01"])
def test_a_handshake_that_does_not_go_on_is_closed_in_time(certificate: Path, sent: bytes) -> None:
    with secure(certificate, header_s=0.3) as (running, context), running.connect() as sock:
        sock.sendall(sent)
        assert n_closed([sock], 5) == 1
        assert ask(running, context).startswith(b"HTTP/1.1 200")


def test_beyond_the_limit_the_oldest_handshakes_are_dropped(certificate: Path) -> None:
    with secure(certificate, n_incomplete=4) as (running, context), contextlib.ExitStack() as closing:
        socks = [closing.enter_context(running.connect()) for _ in range(10)]
        assert n_closed(socks[:6], 5) == 6
        assert n_closed(socks[6:], 0) == 0
        assert ask(running, context).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("sent", [b"", b"no HTTP\r\n\r\n"])
def test_a_client_that_does_not_answer_the_end_is_closed_all_the_same(certificate: Path, sent: bytes) -> None:
    with secure(certificate, header_s=0.3) as (running, context):
        with context.wrap_socket(running.connect(), server_hostname="localhost") as sock:
            sock.sendall(sent)
            with socket.socket(fileno=os.dup(sock.fileno())) as beneath:
                assert n_closed([beneath], 5) == 1


def test_what_is_no_tls_is_closed_and_hurts_no_one(certificate: Path) -> None:
    with secure(certificate) as (running, context), contextlib.ExitStack() as closing:
        socks = [closing.enter_context(running.connect()) for _ in range(3)]
        for sock, data in zip(socks, (livez(running), b"\x00" * 500, b"\x16\x03\x01\x00\x05hello"), strict=True):
            sock.sendall(data)
        for sock in socks:
            sock.settimeout(5)
            with contextlib.suppress(OSError):
                while sock.recv(1000):
                    pass
        assert ask(running, context).startswith(b"HTTP/1.1 200")


def test_a_request_may_come_in_the_packet_that_ends_the_handshake(certificate: Path) -> None:
    with secure(certificate) as (running, context):
        for _ in range(5):
            with running.connect() as sock:
                sock.settimeout(20)
                incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
                client = context.wrap_bio(incoming, outgoing, server_hostname="localhost")
                while True:
                    try:
                        client.do_handshake()
                        break
                    except ssl.SSLWantReadError:
                        sock.sendall(outgoing.read())
                        incoming.write(sock.recv(65536))
                client.write(livez(running))
                sock.sendall(outgoing.read())
                answer = b""
                while b'"ok"' not in answer:
                    try:
                        answer += client.read(65536)
                    except ssl.SSLWantReadError:
                        data = sock.recv(65536)
                        assert data, answer
                        incoming.write(data)
                assert answer.startswith(b"HTTP/1.1 200")
