"""`localllm doctor --server`: what is told of a sound server, and of one that lets everybody do everything."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from localllm.cli import server_checks
from localllm.cli.http_client import Address, is_loopback
from localllm.errors import UsageError
from localllm.server.state import ServerSettings
from tests.cli.conftest import Result
from tests.conftest import PROJECT
from tests.server.fakes import fake_supervisor, serving

Cli = Callable[..., Result]
KEY = b"0123456789abcdef"


@contextmanager
def bad_server(fault: str, folder: Path) -> Iterator[str]:
    """A server that lets everybody do everything; yields its port."""
    command = [sys.executable, "-m", "tests.cli.bad_server", fault, "--socket", str(folder / "s")]
    with subprocess.Popen(command, cwd=PROJECT, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            yield process.stderr.readline().strip().rpartition(":")[2]
        finally:
            process.kill()


def rows(result: Result) -> dict[str, tuple[str, str]]:
    return {row["name"]: (row["state"], row["value"]) for row in result.json()["findings"]}


def test_a_sound_server_has_nothing_wrong(cli: Cli) -> None:
    with serving() as running:
        result = cli("doctor", "--server", running.url, "--json")
        n_requests = len(running.worker.requests)
    found = rows(result)
    assert (result.code, result.json()["ok"]) == (0, True), result.out
    assert found["models"] == ("ok", "fake")
    assert found["listens"][1].startswith("on loopback only")
    assert "none is asked for" in found["key"][1]
    assert {state for state, _ in found.values()} == {"ok"}
    assert n_requests == 0


def test_a_key_is_asked_for_and_used(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(KEY)
    (tmp_path / "key").chmod(0o600)
    with serving(settings=replace(ServerSettings(), api_keys=(KEY, b"another-key"))) as running:
        with_key = rows(cli("doctor", "--server", running.url, "--api-key-file", str(tmp_path / "key"), "--json"))
        without = rows(cli("doctor", "--server", running.url, "--json"))
    assert with_key["models"] == ("ok", "fake")
    assert (with_key["key"], with_key["wrong key"]) == (("ok", "asked for"), ("ok", "HTTP 401"))
    assert without["models"] == without["engines"] == ("note", "not told without the key")
    assert without["key"] == ("ok", "asked for")
    assert without["deep body"] == ("ok", "refused: HTTP 401, without the key")
    assert "wrong" not in {state for state, _ in (*with_key.values(), *without.values())}
    assert "/v1/models" not in with_key["without a key"][1]


def test_what_a_careless_server_lets_through_is_wrong(cli: Cli, tmp_path: Path) -> None:
    with bad_server("", tmp_path) as port:
        result = cli("doctor", "--server", f"127.0.0.1:{port}", "--json")
        text = cli("doctor", "--server", f"http://127.0.0.1:{port}/v1")
    found = rows(result)
    wrong = {name for name, (state, _) in found.items() if state == "wrong"}
    assert (result.code, text.code) == (1, 1)
    assert wrong >= {
        *("foreign Host", "look-alike Host", "foreign Origin", "cross-site", "form post", "change by GET", "CORS"),
        *("1 GiB body", "packed body", "deep body"),
    }
    assert found["CORS"][1] == "pages of https://evil.example may read answers"
    assert "<- WRONG" in text.out
    assert text.out.endswith("of these are wrong\n")


def test_a_server_that_others_reach_without_a_key_is_wrong(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_checks, "own_addresses", lambda: ["127.0.0.7"])
    with bad_server("open to all", tmp_path) as port:
        found = rows(cli("doctor", "--server", f"127.0.0.1:{port}", "--json"))
    assert found["listens"] == ("wrong", f"others can reach it at 127.0.0.7, port {port}")
    assert found["key"][0] == "wrong"
    assert found["encryption"][0] == "note"


def test_nobody_there_is_unreachable(cli: Cli) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        result = cli("doctor", "--server", f"http://127.0.0.1:{free.getsockname()[1]}")
    assert (result.code, result.out) == (6, "")
    assert "does not answer" in result.err


def test_a_server_that_dies_meanwhile_is_told_and_no_traceback(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving() as running:
        monkeypatch.setattr(server_checks.Examined, "stranger", property(lambda self: 1 / 0))
        found = rows(cli("doctor", "--server", running.url, "--json"))
    assert found["not known"][0] == "note"


@pytest.mark.parametrize("text", ["", "ftp://x", "http://", "http://x:99999", "http://[::1", "://", "http://:80"])
def test_what_is_no_address_is_refused(cli: Cli, text: str) -> None:
    with pytest.raises(UsageError, match="no address"):
        Address.parse(text)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("127.0.0.1:8080", "http://127.0.0.1:8080"),
        ("localhost", "http://localhost:80"),
        ("https://box.local/v1/", "https://box.local:443"),
        ("http://[::1]:9", "http://[::1]:9"),
    ],
)
def test_addresses(text: str, shown: str) -> None:
    assert str(Address.parse(text)) == shown


@pytest.mark.parametrize(
    ("host", "is_local"),
    [("::1", True), ("[::1]", True), ("::ffff:127.0.0.1", True), ("::ffff:10.0.0.1", False), ("localhost.", False)],
)
def test_what_is_loopback_for_certain(host: str, is_local: bool) -> None:
    assert is_loopback(host) is is_local


def test_own_addresses_are_beyond_loopback() -> None:
    assert not [address for address in server_checks.own_addresses() if is_loopback(address)]


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate that nobody trusts, and its key."""
    folder = tmp_path_factory.mktemp("tls")
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost"]
    try:
        subprocess.run(
            [*command, "-keyout", str(folder / "k.pem"), "-out", str(folder / "c.pem")],
            check=True,
            capture_output=True,
            timeout=60,
        )
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs openssl to make a certificate")
    return folder / "c.pem", folder / "k.pem"


def test_encryption_and_trust_are_told(cli: Cli, certificate: tuple[Path, Path]) -> None:
    cert, key = certificate
    settings = ServerSettings(tls_cert=cert, tls_key=key)
    with serving(fake_supervisor(), settings) as running:
        found = rows(cli("doctor", "--server", f"https://127.0.0.1:{running.port}", "--json"))
    assert found["encryption"][0] == "note"
    assert found["encryption"][1].startswith("TLSv1.")
    assert "does not trust" in found["encryption"][1]
    assert found["foreign Host"] == ("ok", "refused: HTTP 403")
