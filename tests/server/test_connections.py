"""Slow, silent and broken clients (T11), over raw sockets; meanwhile a good one is answered."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from localllm.server.listener import Listener
from localllm.server.state import Limits, ServerSettings
from tests.server.fakes import Reply, Running, serving, wait_until

BODY = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


@contextlib.contextmanager
def limited(**limits: Any) -> Iterator[tuple[Running, Listener]]:
    """Serve with some limits changed; also give the listener."""
    listeners: list[Listener] = []
    made = Listener.__init__

    def remember(self: Listener, *args: Any) -> None:
        made(self, *args)
        listeners.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Listener, "__init__", remember)
        with serving(settings=ServerSettings(limits=replace(Limits(), **limits))) as running:
            yield running, listeners[0]


def n_connections(listener: Listener) -> int:
    return len(listener._connections.connections)


def n_incomplete(listener: Listener) -> int:
    return len(listener._gate._incomplete)


def answer_on(sock: socket.socket) -> Reply:
    """Return the next answer on a connection."""
    response = http.client.HTTPResponse(sock)
    response.begin()
    return Reply(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())


def is_closed(sock: socket.socket, within_s: float) -> bool:
    """Say whether the server closed a connection, whatever it sent before."""
    sock.settimeout(within_s)
    try:
        while sock.recv(65536):
            pass
    except TimeoutError:
        return False
    except OSError:
        return True
    return True


def head_of(running: Running, length: int) -> bytes:
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost:{running.port}\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {length}\r\n\r\n".encode()


def test_a_connection_that_sends_nothing_is_closed_in_time() -> None:
    with limited(header_s=0.2) as (running, listener), running.connect() as sock:
        started_s = time.monotonic()
        assert is_closed(sock, 5)
        assert 0.1 < time.monotonic() - started_s < 3
        wait_until(lambda: n_connections(listener) == 0)


@pytest.mark.parametrize("begun", [b"GET /livez HTTP/1.1\r\n", b"GET /livez HTTP/1.1\r\nhost: localhost\r\nx", b"G"])
def test_headers_that_stop_are_answered_408(begun: bytes) -> None:
    with limited(header_s=0.2) as (running, listener), running.connect() as sock:
        sock.sendall(begun)
        reply = answer_on(sock)
        assert (reply.status, reply.error["code"]) == (408, "headers_too_slow")
        assert is_closed(sock, 5)
        wait_until(lambda: n_connections(listener) == n_incomplete(listener) == 0)


def test_dripping_headers_do_not_win_time() -> None:
    with limited(header_s=0.4) as (running, _), running.connect() as sock:
        started_s = time.monotonic()
        with contextlib.suppress(OSError):
            for byte in b"GET /livez HTTP/1.1\r\nhost: localhost\r\n" + b"x-y: z\r\n" * 100:
                sock.sendall(bytes([byte]))
                time.sleep(0.02)
                if time.monotonic() - started_s > 3:
                    break
        assert is_closed(sock, 1)
        assert time.monotonic() - started_s < 3


def test_headers_of_the_next_request_on_a_kept_connection_have_their_time_too() -> None:
    with limited(header_s=0.3, idle_s=5.0) as (running, _), running.connect() as sock:
        data = json.dumps(BODY).encode()
        sock.sendall(head_of(running, len(data)) + data)
        assert answer_on(sock).status == 200
        time.sleep(0.5)  # idle is no fault
        sock.sendall(b"GET /livez HT")
        assert answer_on(sock).status == 408


def test_an_idle_connection_is_closed_after_a_while() -> None:
    with limited(idle_s=1) as (running, listener), running.connect() as sock:
        data = json.dumps(BODY).encode()
        sock.sendall(head_of(running, len(data)) + data)
        assert answer_on(sock).status == 200
        assert is_closed(sock, 5)
        wait_until(lambda: n_connections(listener) == 0)


def test_of_too_many_incomplete_connections_the_oldest_is_dropped() -> None:
    with limited(n_incomplete=5) as (running, listener):
        socks = []
        for i in range(9):
            socks.append(running.connect())
            socks[-1].sendall(b"GET /li" if i % 2 else b"")
            wait_until(lambda: n_connections(listener) == min(len(socks), 5))
        assert [is_closed(sock, 1) for sock in socks[:4]] == [True] * 4
        assert [is_closed(sock, 0.05) for sock in socks[4:]] == [False] * 5
        assert running.post("/v1/chat/completions", BODY).status == 200  # and one more had to go
        for sock in socks:
            sock.close()
        wait_until(lambda: n_connections(listener) == n_incomplete(listener) == 0)


def test_slow_and_silent_clients_do_not_hold_up_a_good_one() -> None:
    with limited() as (running, listener):
        n_fds = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0

        def answered_in_s() -> float:
            started_s = time.perf_counter()
            assert running.post("/v1/chat/completions", BODY).status == 200
            return time.perf_counter() - started_s

        alone = sorted(answered_in_s() for _ in range(20))[10]
        socks = [running.connect() for _ in range(200)]
        slow = [running.connect() for _ in range(50)]
        for sock in slow:
            sock.sendall(head_of(running, 1000))
        beside = []
        for _ in range(20):
            for sock in slow:
                with contextlib.suppress(OSError):
                    sock.sendall(b"x")
            beside.append(answered_in_s())
        assert n_incomplete(listener) <= 128
        wait_until(lambda: running.state.n_active == 0)  # none of them takes a place
        assert sorted(beside)[10] < 10 * alone + 0.05
        for sock in [*socks, *slow]:
            sock.close()
        wait_until(lambda: n_connections(listener) == n_incomplete(listener) == 0)
        if n_fds:
            assert len(os.listdir("/proc/self/fd")) <= n_fds + 2


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET\r\n\r\n",
        b"\r\n" * 50 + b"x\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n",
        b"GET /livez HTTP/1.1\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET /\x00 HTTP/1.1\r\nhost: localhost\r\n\r\n",
        "GET /é HTTP/1.1\r\nhost: localhost\r\n\r\n".encode(),
        b"GET " + b"/a" * 40_000 + b" HTTP/1.1\r\n",
    ],
    ids=lambda garbage: repr(garbage[:20]),
)
def test_what_is_no_http_gets_a_json_error_and_the_end(garbage: bytes) -> None:
    with limited() as (running, listener):
        with running.connect() as sock:
            sock.sendall(garbage)
            reply = answer_on(sock)
            assert reply.status in (400, 403, 431)
            assert set(reply.error) >= {"message", "type", "param", "code"}
            assert is_closed(sock, 5)
        wait_until(lambda: n_connections(listener) == 0)
        assert running.get("/livez").status == 200


def test_garbage_behind_a_request_ends_it_and_nothing_else() -> None:
    with limited() as (running, listener):
        data = json.dumps({**BODY, "max_tokens": 2000, "stream": True}).encode()
        with running.connect() as sock:
            sock.sendall(head_of(running, len(data)) + data + b"\x00\x00 garbage\r\n\r\n")
            assert is_closed(sock, 10)
        wait_until(lambda: running.state.n_active == n_connections(listener) == 0)
        assert running.post("/v1/chat/completions", BODY).status == 200


def test_an_upgrade_is_not_taken() -> None:
    with limited() as (running, _), running.connect() as sock:
        head = f"GET /livez HTTP/1.1\r\nhost: localhost:{running.port}\r\nconnection: upgrade\r\n"
        sock.sendall(f"{head}upgrade: websocket\r\n\r\n".encode())
        assert answer_on(sock).status == 200


def test_requests_one_behind_another_are_answered_in_order() -> None:
    with limited() as (running, _), running.connect() as sock:
        data = json.dumps(BODY).encode()
        one = head_of(running, len(data)) + data
        get = f"GET /livez HTTP/1.1\r\nhost: localhost:{running.port}\r\n\r\n".encode()
        sock.sendall(one + get + one + get.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"))
        received = b""
        sock.settimeout(10)
        while part := sock.recv(65536):
            received += part
        assert received.count(b"HTTP/1.1 200") == 4
        assert [received.index(b"chat.completion") < received.index(b'"ok"')] == [True]


def test_every_answer_has_a_date_and_names_no_server() -> None:
    with limited() as (running, _):
        headers = running.get("/livez").headers
        assert headers["date"].endswith("GMT")
        assert "server" not in headers


def test_a_head_request_has_no_body() -> None:
    with limited() as (running, _):
        for path in ("/livez", "/nowhere"):
            reply = running.request("HEAD", path)
            assert reply.body == b""
            assert reply.status in (200, 404)
