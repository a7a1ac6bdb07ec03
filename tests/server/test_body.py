"""Bodies: read within limits, scanned, decoded (T10), without a word of them in the answer or a 5xx."""

from __future__ import annotations

import contextlib
import http.client
import json
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from localllm.errors import UsageError
from localllm.server.body import _PARTS, MAX_CONTAINERS, MAX_DEPTH, decode, scan
from localllm.server.state import Limits, ServerSettings
from tests.server.fakes import Reply, Running, serving

PATH = "/v1/chat/completions"


class Thing(msgspec.Struct):
    """A body to decode."""

    a: int = 0
    b: list[dict[str, int]] = []
    c: Any = None


class Named(msgspec.Struct):
    """A body in which no name means anything."""


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with serving() as server:
        yield server


def nested(depth: int, before: bytes = b"[", after: bytes = b"]") -> bytes:
    return b'{"c":' + before * (depth - 1) + after * (depth - 1) + b"}"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b" \n ",
        b"\xef\xbb\xbf",
        b"[]",
        b"null",
        b"1",
        b'"a"',
        b"{",
        b'{"a":',
        b'{"a":1',
        b'{"a":1,}',
        b'{"a":1}x',
        b'{"a":1}{"a":1}',
        b"{'a':1}",
        b"{a:1}",
        b'{"a":01}',
        b'{"a":+1}',
        b'{"a":.5}',
        b'{"a":1.}',
        b'{"a":NaN}',
        b'{"a":Infinity}',
        b'{"a":-Infinity}',
        b'{"c":NaN}',
        b'{"z":NaN}',
        b'{"c":1e999}',
        b'{"c":-1e999}',
        b'{"z":1e999}',
        b'{"c":1180591620717411303424}',
        b'{"z":1180591620717411303424}',
        b'{"c":18446744073709551616}',
        b'{"c":-9223372036854775809}',
        b'{"c":' + b"9" * 400 + b"}",
        b'{"c":' + b"9" * 400 + b".5}",
        b'{"a":1,"a":1}',
        b'{"c":{"x":1,"x":2}}',
        b'{"z":{"x":1,"x":2}}',
        b'{"a":1,"\\u0061":1}',
        b'{"c":[{"x":1},{"x":1,"y":{"q":1,"q":1}}]}',
        b'{"c":"\xff"}',
        b'{"z":"\xff"}',
        b'{"c":"\xed\xa0\x80"}',
        b'{"c":"\xc3"}',
        b'{"c":"\\ud800"}',
        b'{"z":"\\udc00"}',
        b'{"c":"\\ud800\\ud800"}',
        b'{"c":"\\ud83d"}',
        b'{"\\ud800":1}',
        b'{"c":"\\x"}',
        b'{"c":"\\u12"}',
        b'{"c":"a\nb"}',
        b'{"c":"a\x00b"}',
        b'{"c":"abc}',
        b'{"c":"abc\\',
        b'{"c":"' + b'\\"' * 1000,
        b"\xff\xfe{\x00}\x00",
        '{"a":1}'.encode("utf-16"),
        nested(MAX_DEPTH + 1),
        nested(100_000),
        b"[" * 100_000,
        b"{" * 1000,
        b'{"c":[' + b"[]," * MAX_CONTAINERS + b"[]]}",
        b'{"b":[1]}',
        b'{"b":[{"x":"y"}]}',
        b'{"a":"x"}',
        b'{"a":true}',
        b'{"a":1.5}',
        b"/**/{}",
        b"{}//",
    ],
    ids=lambda data: repr(data[:30]),
)
def test_what_is_no_clean_json_of_this_kind_is_refused(data: bytes) -> None:
    started_s = time.perf_counter()
    with pytest.raises(UsageError) as refused:
        decode(data, Thing)
    assert time.perf_counter() - started_s < 2
    assert len(refused.value.message) < 200


def test_clean_bodies_are_decoded() -> None:
    assert decode(b'{"a":5}', Thing).value.a == 5
    assert decode(b'\xef\xbb\xbf {"a":5}\n', Thing).value.a == 5
    assert decode(b'{"c":18446744073709551615}', Thing).value.c == 2**64 - 1
    assert decode(b'{"c":-9223372036854775808}', Thing).value.c == -(2**63)
    assert decode(b'{"c":[1e300,-1.5E-10,123456789012345678.25]}', Thing).value.c[0] == 1e300
    assert decode('{"c":"\\ud83e\\udd8a 🦊 \\\\ud800"}'.encode(), Thing).value.c == "🦊 🦊 \\ud800"
    assert decode(nested(MAX_DEPTH), Thing).value.c is not None
    assert decode(b'{"c":{"x":{"x":1},"y":{"x":1}},"d":[{"x":1},{"x":1}]}', Thing).names == ("c", "d")
    assert decode(b'{"c":"{[\\"NaN 1e999 \\"a\\":1,\\"a\\":1"}', Thing).value.c.startswith("{[")


def test_errors_tell_the_place_as_a_pointer_and_as_clients_spell_it() -> None:
    for data, field, pointer in (
        (b'{"a":"x"}', "a", "/a"),
        (b'{"b":[{},3]}', "b[1]", "/b/1"),
        (b'{"b":[{"x":"y"}]}', "b[0][*]", "/b/0/*"),
    ):
        with pytest.raises(UsageError) as refused:
            decode(data, Thing)
        assert refused.value.details == {"field": field, "pointer": pointer}
        assert pointer in refused.value.message


def test_values_are_read_of_some_names_only() -> None:
    body = decode(b'{"a":1,"x":{"y":[1]},"z":null}', Thing)
    assert body.values(["x", "z", "w"]) == {"x": {"y": [1]}, "z": None}
    assert body.values(["w"]) == {}


texts = st.text(st.characters(exclude_categories=("Cs",)))
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=20,
)


@given(st.dictionaries(texts, json_values, max_size=5), st.booleans())
def test_any_clean_object_passes_the_scan_which_finds_its_names(value: dict[str, Any], is_ascii: bool) -> None:
    text = json.dumps(value, ensure_ascii=is_ascii)
    assert scan(text) == tuple(sorted(value))
    assert decode(text.encode(), Named).value == Named()


@given(st.binary(max_size=60) | st.text('{}[]":,\\ue1.d8a0-', max_size=60).map(str.encode))
def test_no_bytes_raise_anything_else(data: bytes) -> None:
    with contextlib.suppress(UsageError):
        decode(data, Thing)


@pytest.mark.parametrize(
    "text",
    [
        '{"a":"' + "\\" * 1_000_001,
        '"' + '\\"' * 1_000_000,
        '"' * 1_000_001,
        '{"a":' + "9" * 2_000_000,
        '{"a":' + "1." * 1_000_000,
        "1e" * 300_000,
        '"a"' + " " * 2_000_000,
        ('"a"' + " " * 1000) * 1000,
        "[" * 128 + "]" * 128 + "\\u" * 500_000,
        "-" * 1_000_000,
    ],
    ids=range(10),
)
def test_the_scan_is_linear(text: str) -> None:
    started_s = time.perf_counter()
    with contextlib.suppress(UsageError):
        scan(text)
    assert time.perf_counter() - started_s < 2


@given(st.text('{}[]":,\\ue1.d8a0- ', max_size=60))
def test_the_search_for_a_part_goes_over_nothing_but_what_none_begins_with(text: str) -> None:
    # The search holds the interpreter's lock: 8 MB of digits in one were a second for every other request.
    left = _PARTS.sub("", text)
    assert not set(left).intersection('{}[]"0123456789.-')


@pytest.mark.parametrize("unit", ["1,", "-", "-.", "12.5 ", "1234567890123456,"])
def test_a_row_of_numbers_is_taken_in_pieces(unit: str) -> None:
    text = unit * 100_000
    assert max(len(part[0]) for part in _PARTS.finditer(text)) < 20_000


# --- over a socket


def send(running: Running, head: str, body: bytes) -> Reply:
    """Send a head and a body as they are; return the answer."""
    with running.connect() as sock:
        lines = (
            f"POST {PATH} HTTP/1.1\r\nhost: localhost:{running.port}\r\ncontent-type: application/json\r\n{head}\r\n"
        )
        sock.sendall(lines.encode("latin-1"))
        with contextlib.suppress(OSError):
            sock.sendall(body)
        response = http.client.HTTPResponse(sock)
        response.begin()
        return Reply(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())


GOOD = b'{"messages":[{"role":"user","content":"hi"}],"max_tokens":1}'


@pytest.mark.parametrize(
    ("head", "body", "status"),
    [
        (f"content-length: {len(GOOD)}\r\nconnection: close\r\n", GOOD, 200),
        ("transfer-encoding: chunked\r\nconnection: close\r\n", b"%x\r\n%b\r\n0\r\n\r\n" % (len(GOOD), GOOD), 200),
        ("connection: close\r\n", b"", 400),
        ("content-length: 0\r\nconnection: close\r\n", b"", 400),
        ("content-length: -1\r\n", GOOD, 400),
        ("content-length: 1e3\r\n", GOOD, 400),
        ("content-length: 99999999999999999999\r\n", b"", 413),
        ("content-length: 8388609\r\n", b"", 413),
        ("content-length: 5\r\ncontent-length: 6\r\n", GOOD, 400),
        ("content-length: 5\r\ntransfer-encoding: chunked\r\nconnection: close\r\n", b"0\r\n\r\n", 400),
        ("transfer-encoding: gzip\r\n", GOOD, 415),
        ("transfer-encoding: chunked\r\n", b"zz\r\n", 400),
        ("transfer-encoding: chunked\r\n", b"5\r\nabcdefgh\r\n", 400),
        ("transfer-encoding: chunked\r\n", b"-5\r\nabc\r\n", 400),
        ("bad header\r\n", GOOD, 400),
        ("x: a\x00b\r\n", GOOD, 400),
        ("x: " + "y" * 40_000 + "\r\n", b"", 431),
    ],
)
def test_odd_framing_is_answered_with_an_error_body(running: Running, head: str, body: bytes, status: int) -> None:
    reply = send(running, head, body)
    assert reply.status == status
    assert status == 200 or set(reply.error) >= {"message", "type", "param", "code"}
    assert running.post(PATH, GOOD).status == 200


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "PATCH"])
def test_other_methods_are_405_with_what_is_allowed(running: Running, method: str) -> None:
    reply = running.request(method, PATH, GOOD if method != "GET" else None)
    assert reply.status == 405
    assert reply.headers["allow"] == "POST"
    assert reply.error["code"] == "method_not_allowed"


def test_an_endless_body_is_cut_off_and_leaves_nothing(running: Running) -> None:
    block = b"10000\r\n" + b"x" * 65536 + b"\r\n"
    with running.connect() as sock:
        head = f"POST {PATH} HTTP/1.1\r\nhost: localhost:{running.port}\r\ncontent-type: application/json\r\n"
        sock.sendall((head + "transfer-encoding: chunked\r\n\r\n").encode())
        n_sent = 0
        sock.settimeout(10)
        with contextlib.suppress(OSError):
            for _ in range(16_384):  # 1 GB
                sock.sendall(block)
                n_sent += len(block)
        assert n_sent < 100 << 20
    reply = send(running, "transfer-encoding: chunked\r\n", block * 140)
    assert reply.status == 413
    assert reply.headers["connection"] == "close"
    assert running.state.n_active == 0


def test_a_large_body_of_texts_is_taken(running: Running) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "ü\n" * 1_500_000}]}, ensure_ascii=False).encode()
    assert len(body) > 5_000_000
    reply = running.post(PATH, body)
    assert reply.error["code"] == "context_length_exceeded"


def test_a_slow_body_is_given_up() -> None:
    limits = Limits(body_s=0.3, body_rate=1e9)
    with serving(settings=ServerSettings(limits=limits)) as running:
        started_s = time.monotonic()
        assert send(running, "content-length: 100\r\n", b'{"a"').status == 408
        assert 0.2 < time.monotonic() - started_s < 5
        assert running.post(PATH, GOOD).status == 200


def test_a_body_may_take_longer_the_larger_it_is() -> None:
    limits = Limits(body_s=0.3, body_rate=10)
    with serving(settings=ServerSettings(limits=limits)) as running, running.connect() as sock:
        head = f"POST {PATH} HTTP/1.1\r\nhost: localhost:{running.port}\r\ncontent-type: application/json\r\n"
        sock.sendall(f"{head}content-length: {len(GOOD)}\r\n\r\n".encode())
        for start in range(0, len(GOOD), 10):
            time.sleep(0.1)
            sock.sendall(GOOD[start : start + 10])
        assert sock.recv(65536).startswith(b"HTTP/1.1 200")


def test_a_client_that_waits_for_leave_to_send_gets_it(running: Running) -> None:
    with running.connect() as sock:
        head = f"POST {PATH} HTTP/1.1\r\nhost: localhost:{running.port}\r\ncontent-type: application/json\r\n"
        sock.sendall(f"{head}content-length: {len(GOOD)}\r\nexpect: 100-continue\r\n\r\n".encode())
        assert sock.recv(65536).startswith(b"HTTP/1.1 100")
        sock.sendall(GOOD)
        assert sock.recv(65536).startswith(b"HTTP/1.1 200")
    with running.connect() as sock:
        head = f"POST {PATH} HTTP/1.1\r\nhost: evil.test\r\ncontent-type: application/json\r\n"
        sock.sendall(f"{head}content-length: {len(GOOD)}\r\nexpect: 100-continue\r\n\r\n".encode())
        assert sock.recv(65536).startswith(b"HTTP/1.1 403")  # at once, and without asking for the body
