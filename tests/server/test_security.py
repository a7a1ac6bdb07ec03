"""Who may ask: hosts (T01), foreign pages (T02), the key; over raw sockets where clients would mend a request."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from localllm.server.state import ServerSettings
from tests.server.fakes import Reply, Running, serving

CHAT = json.dumps({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}).encode()
ROUTES = [
    ("GET", "/health"),
    ("GET", "/livez"),
    ("GET", "/readyz"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/fake"),
    ("GET", "/nowhere"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/embeddings"),
    ("POST", "/tokenize"),
    ("POST", "/v1/models/unload"),
    ("OPTIONS", "/v1/chat/completions"),
    ("HEAD", "/health"),
    ("DELETE", "/v1/models/fake"),
]


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with serving() as server:
        yield server


def raw(running: Running, data: bytes) -> bytes:
    """Send bytes, and return all that comes back until the server closes."""
    with running.connect() as sock:
        sock.sendall(data)
        received = b""
        while part := sock.recv(65536):
            received += part
        return received


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1]) if answer else 0


def with_host(method: str, path: str, host: bytes | None, http: bytes = b"1.1") -> bytes:
    line = f"{method} {path} HTTP/".encode() + http + b"\r\n"
    named = b"" if host is None else b"host: " + host + b"\r\n"
    return (
        line
        + named
        + b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(CHAT)
        + CHAT
    )


def foreign_hosts(port: int) -> list[bytes | None]:
    own = f":{port}"
    names = [
        *("evil.test", "localhost.evil.test", "127.0.0.1.nip.io", "evil.test#localhost", "localhost.", "LOCALHOST"),
        *("127.0.0.1.", "127.1", "127.0.0.2", "0.0.0.0", "0", "2130706433", "0x7f000001", "017700000001"),
        *("[::ffff:127.0.0.1]", "[0:0:0:0:0:0:0:1]", "[::]", "::1", "localhost@evil.test", "evil.test@localhost"),
        *("my_host", "xn--lcalhost-5hg", "localhost%00", "localhost/", "localhost\\", "localhost,evil.test"),
        *("*.localhost", "a.localhost", "192.168.0.1", "10.0.0.1", "host.internal", "printer.local", ""),
    ]
    wrong_port = ["localhost:1", "127.0.0.1:0", "[::1]:99999", f"localhost:{port}1", f"localhost:0{port}", "localhost:"]
    both = [name + suffix for name in names for suffix in ("", own)]
    return [None, *(text.encode() for text in [*both, *wrong_port]), b"a" * 20_000, b"localhost\xff"]


def test_only_this_servers_names_are_answered(running: Running) -> None:
    accepted = []
    n_tokens = running.worker.service.stats().n_generated_tokens
    for host in foreign_hosts(running.port):
        for method, path in ROUTES:
            answer = raw(running, with_host(method, path, host))
            if status_of(answer) not in (400, 403, 431):
                accepted.append((method, path, host, answer[:80]))
            assert b"access-control" not in answer.lower()
    assert not accepted
    assert running.worker.service.stats().n_generated_tokens == n_tokens


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1", "[::1]"])
def test_this_servers_names_are_answered_with_its_port_or_without(running: Running, name: str) -> None:
    for host in (name, f"{name}:{running.port}"):
        assert status_of(raw(running, with_host("POST", "/v1/completions", host.encode()))) == 400  # no prompt
        assert status_of(raw(running, with_host("POST", "/v1/chat/completions", host.encode()))) == 200


def test_targets_that_name_a_host_and_doubled_hosts_are_refused(running: Running) -> None:
    own = f"localhost:{running.port}"
    assert status_of(raw(running, with_host("GET", f"http://{own}/health", own.encode()))) == 403
    assert status_of(raw(running, with_host("GET", "http://evil.test/health", own.encode()))) == 403
    doubled = f"GET /health HTTP/1.1\r\nhost: {own}\r\nhost: evil.test\r\nconnection: close\r\n\r\n"
    assert status_of(raw(running, doubled.encode())) == 400
    assert status_of(raw(running, with_host("GET", "/livez", None, b"1.0"))) == 403
    assert status_of(raw(running, with_host("GET", "/livez", own.encode(), b"1.0"))) == 200


def test_further_names_are_those_that_were_given() -> None:
    with serving(settings=ServerSettings(allow_hosts=("box.lan", "gate.lan:9000"))) as running:
        for host, status in (
            ("box.lan", 200),
            (f"box.lan:{running.port}", 200),
            ("box.lan:9999", 200),
            ("gate.lan:9000", 200),
            ("gate.lan", 403),
            (f"gate.lan:{running.port}", 403),
            ("a.box.lan", 403),
            ("box.lan.evil.test", 403),
            (f"localhost:{running.port}", 200),
        ):
            assert status_of(raw(running, with_host("GET", "/livez", host.encode()))) == status, host


@pytest.mark.parametrize(
    ("http", "length"), [(b"1.1", b"content-length: 4\r\n"), (b"1.0", b"connection: keep-alive\r\n")]
)
def test_a_body_whose_length_is_told_in_two_ways_ends_the_connection(
    running: Running, http: bytes, length: bytes
) -> None:
    host = b"host: localhost:%d\r\n" % running.port
    line = b"POST /v1/chat/completions HTTP/" + http + b"\r\ncontent-type: application/json\r\n"
    body = b"transfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(CHAT), CHAT)
    hidden = b"GET /livez HTTP/1.1\r\n" + host + b"connection: close\r\n\r\n"
    answer = raw(running, line + host + length + body + hidden)
    assert status_of(answer) == 400
    assert answer.count(b"HTTP/1.1 ") == 1


def test_an_own_origin_is_not_believed_where_the_browser_says_cross_site(running: Running) -> None:
    own = {"origin": f"http://localhost:{running.port}", "host": f"localhost:{running.port}"}
    assert running.post("/v1/chat/completions", CHAT, own).status == 200
    assert running.post("/v1/chat/completions", CHAT, {**own, "sec-fetch-site": "cross-site"}).status == 403


FORGED = [
    {"origin": "https://evil.test"},
    {"origin": "null"},
    {"origin": ""},
    {"origin": "http://localhost"},
    {"origin": "http://localhost:3000"},
    {"origin": "file://"},
    {"origin": "chrome-extension://abcdef"},
    {"origin": "vscode-webview://abc"},
    {"origin": "app://local"},
    {"origin": "http://localhost.evil.test"},
    {"sec-fetch-site": "cross-site"},
    {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"},
    {"origin": "https://evil.test", "sec-fetch-site": "same-origin"},
]
SIMPLE = ["application/x-www-form-urlencoded", "text/plain", "multipart/form-data; boundary=x", "text/plain;json", ""]


def test_foreign_pages_start_no_work(running: Running) -> None:
    n_tokens = running.worker.service.stats().n_generated_tokens
    n_requests = len(running.worker.requests)
    for headers in FORGED:
        for kind in [*SIMPLE, "application/json"]:
            for path in ("/v1/chat/completions", "/v1/models/unload"):
                reply = running.post(path, CHAT, {**headers, "content-type": kind})
                assert reply.status == 403, (headers, kind)
                assert "access-control-allow-origin" not in reply.headers
        assert running.request("GET", "/v1/models", headers=headers).status == 403
        preflight = running.request("OPTIONS", "/v1/chat/completions", headers={**headers, **PREFLIGHT})
        assert preflight.status == 403
    assert running.worker.service.stats().n_generated_tokens == n_tokens
    assert len(running.worker.requests) == n_requests
    assert running.worker.is_alive


def test_two_origins_are_none_of_ours(running: Running) -> None:
    own = f"http://localhost:{running.port}"
    head = f"GET /livez HTTP/1.1\r\nhost: localhost:{running.port}\r\nconnection: close\r\n"
    assert status_of(raw(running, f"{head}origin: {own}\r\n\r\n".encode())) == 200
    assert status_of(raw(running, f"{head}origin: {own}\r\norigin: {own}\r\n\r\n".encode())) == 403


@pytest.mark.parametrize("kind", SIMPLE)
def test_bodies_that_a_form_can_send_are_refused(running: Running, kind: str) -> None:
    reply = running.post("/v1/chat/completions", CHAT, {"content-type": kind})
    assert (reply.status, reply.error["code"]) == (415, "unsupported_media_type")


@pytest.mark.parametrize(
    "kind", ["application/json", "application/json; charset=utf-8", "Application/JSON;charset=UTF-8"]
)
def test_json_may_tell_its_charset(running: Running, kind: str) -> None:
    assert running.post("/v1/chat/completions", CHAT, {"content-type": kind}).status == 200


def test_other_charsets_and_compressed_bodies_are_refused(running: Running) -> None:
    latin = {"content-type": "application/json; charset=latin-1"}
    assert running.post("/v1/chat/completions", CHAT, latin).status == 415
    for encoding in ("gzip", "zstd", "br", "deflate"):
        assert running.post("/v1/chat/completions", CHAT, {"content-encoding": encoding}).status == 415
    assert running.post("/v1/chat/completions", CHAT, {"content-encoding": "identity"}).status == 200


PREFLIGHT = {"access-control-request-method": "POST", "access-control-request-headers": "content-type,x-stainless-os"}


def test_an_allowed_origin_may_ask_and_no_other() -> None:
    origin = "https://app.example"
    with serving(settings=ServerSettings(allow_origins=(origin,))) as running:
        preflight = running.request("OPTIONS", "/v1/chat/completions", headers={"origin": origin, **PREFLIGHT})
        assert preflight.status == 204
        assert preflight.headers["access-control-allow-origin"] == origin
        assert preflight.headers["access-control-allow-headers"] == "content-type,x-stainless-os"
        assert "POST" in preflight.headers["access-control-allow-methods"]
        assert not any("credentials" in name for name in preflight.headers)
        reply = running.post("/v1/chat/completions", CHAT, {"origin": origin, "sec-fetch-site": "cross-site"})
        assert reply.status == 200
        assert reply.headers["access-control-allow-origin"] == origin
        assert reply.headers["vary"] == "origin"
        refused = running.post("/v1/chat/completions", b"{}", {"origin": origin})
        assert refused.status == 400
        assert refused.headers["access-control-allow-origin"] == origin  # so that the page can read why
        for other in ("https://app.example.evil.test", "http://app.example", "https://APP.example", origin + "/"):
            assert running.post("/v1/chat/completions", CHAT, {"origin": other}).status == 403


KEY = b"sk-secret-key"


def ask(running: Running, authorization: str | None, path: str = "/v1/models") -> Reply:
    headers = {} if authorization is None else {"authorization": authorization}
    return running.request("GET", path, headers=headers)


def test_every_route_but_two_wants_the_key() -> None:
    with serving(settings=ServerSettings(api_keys=(KEY,))) as running:
        for path in ("/v1/models", "/health", "/nowhere", "/metrics"):
            assert ask(running, None, path).status == 401
        refused = running.post("/v1/chat/completions", CHAT)
        assert (refused.status, refused.error["type"]) == (401, "authentication_error")
        assert refused.headers["www-authenticate"] == "Bearer"
        for path in ("/livez", "/readyz"):
            assert ask(running, None, path).status == 200
        for given in (
            "",
            "Bearer",
            "Bearer ",
            "Bearer x",
            "Basic sk-secret-key",
            "sk-secret-key",
            "Bearer sk-secret-key2",
        ):
            assert ask(running, given).status == 401, given
        assert ask(running, "Bearer sk-secret-key").status == 200
        assert ask(running, "bearer sk-secret-key").status == 200
        assert not running.worker.requests
    assert "sk-secret" not in running.log.getvalue()
    assert "sk-secret" not in repr(running.state.settings)


def test_any_of_several_keys_lets_in_and_all_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    import hmac

    compared: list[tuple[bytes, bytes]] = []

    def compare(given: bytes, key: bytes) -> bool:
        compared.append((given, key))
        return given == key

    monkeypatch.setattr(hmac, "compare_digest", compare)
    keys = (KEY, b"sk-other-key", b"sk-third-key")
    with serving(settings=ServerSettings(api_keys=keys)) as running:
        for given in (*keys, b"sk-fourth-key", b""):
            expected = 200 if given in keys else 401
            assert ask(running, f"Bearer {given.decode()}").status == expected
            assert compared == [(given, key) for key in keys]
            compared.clear()
        assert "sk-other" not in repr(running.state.settings)


def test_the_key_is_the_client_that_is_treated_fairly(running: Running) -> None:
    def client_of(headers: dict[str, str]) -> str:
        assert running.post("/v1/chat/completions", CHAT, headers).status == 200
        return running.worker.requests[-1].options.client

    assert client_of({"authorization": "Bearer a"}) == client_of({"authorization": "Bearer a"})
    assert client_of({"authorization": "Bearer a"}) != client_of({"authorization": "Bearer b"})
    assert re.fullmatch(r"key:[0-9a-f]{8}", client_of({"authorization": "Bearer a"}))
    assert client_of({}).startswith("conn:")


def test_tls_serves_https(tmp_path: Path) -> None:
    import ssl
    import subprocess
    import urllib.request

    command = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -keyout key.pem -out cert.pem "
        "-days 2 -subj /CN=localhost -addext subjectAltName=DNS:localhost"
    )
    made = subprocess.run(command.split(), cwd=tmp_path, capture_output=True, check=False)
    if made.returncode:
        pytest.skip("needs openssl to make a certificate")
    settings = ServerSettings(tls_cert=tmp_path / "cert.pem", tls_key=tmp_path / "key.pem")
    with serving(settings=settings) as running:
        context = ssl.create_default_context(cafile=str(tmp_path / "cert.pem"))
        request = urllib.request.Request(
            f"https://localhost:{running.port}/v1/chat/completions",
            json.dumps({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 50, "stream": True}).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, context=context, timeout=20) as answer:
            assert answer.read().endswith(b"data: [DONE]\n\n")
