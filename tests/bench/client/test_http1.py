from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from localllm.bench.client.http1 import AnswerReader, EventSplitter, Malformed, data_of
from localllm.errors import UsageError

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def asked() -> AnswerReader:
    reader = AnswerReader()
    reader.request("GET", "/", [("host", "box")], b"")
    return reader


def read(data: bytes, piece_bytes: int) -> tuple[AnswerReader, bytes]:
    reader = asked()
    body = b""
    for start in range(0, len(data), piece_bytes):
        body += b"".join(reader.feed(data[start : start + piece_bytes]))
    return reader, body


@pytest.mark.parametrize("piece_bytes", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nX-A: b\r\n\r\nhello", b"hello"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", b""),
        (b"HTTP/1.1 204 No Content\r\n\r\n", b""),
        (CHUNKED + b"5\r\nhello\r\n6;ext=1\r\n world\r\n0\r\n\r\n", b"hello world"),
        (CHUNKED + b"5\r\nhe\r\nl\r\n0\r\nX-Trailer: 1\r\n\r\n", b"he\r\nl"),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok", b"ok"),
    ],
)
def test_an_answer_is_the_same_however_it_arrives(data: bytes, expected: bytes, piece_bytes: int) -> None:
    reader, body = read(data, piece_bytes)
    assert body == expected
    assert reader.is_complete
    assert reader.status in (200, 204)


def test_header_names_are_lower_case_and_values_stripped() -> None:
    reader, _ = read(b"HTTP/1.1 429 Too Many\r\nRetry-After:  3 \r\ncontent-length: 0\r\n\r\n", 1000)
    assert (reader.status, reader.headers["retry-after"]) == (429, "3")


def test_a_body_without_length_ends_with_the_connection() -> None:
    reader, body = read(b"HTTP/1.1 200 OK\r\n\r\nsome", 1000)
    assert (body, reader.is_complete) == (b"some", False)
    assert reader.end()
    assert not reader.keeps_alive


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"HTTP/1.1 200 OK\r\ncont",
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhell",
        CHUNKED,
        CHUNKED + b"5\r\nhello\r\n",
        CHUNKED + b"5\r\nhello\r\n0\r\n",
    ],
)
def test_an_end_within_the_answer_is_no_proper_end(data: bytes) -> None:
    reader, _ = read(data, 1000)
    assert not reader.end()
    assert reader.has_begun is bool(data)


@pytest.mark.parametrize(
    "data",
    [
        b"SMTP ready\r\n\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\nab",
        CHUNKED + b"zz\r\n",
        CHUNKED + b"1\r\nabc",
        b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 20_000,
        CHUNKED + b"1" * 70_000,
    ],
)
def test_what_is_no_answer_is_malformed(data: bytes) -> None:
    with pytest.raises(Malformed):
        asked().feed(data)


def test_what_is_malformed_is_told_without_its_bytes() -> None:
    with pytest.raises(Malformed) as told:
        asked().feed(b"HTTP/1.1 200 OK\r\nsecret words of a prompt\r\n\r\n")
    assert "secret" not in str(told.value)
    assert "header" in str(told.value)


PIECES = st.sampled_from(
    [
        *(b"HTTP/1.1 200 OK\r\n", b"HTTP/1.0 404 No\r\n", b"HTTP/1.1 100 Go\r\n\r\n", b"HTTP/1.1 101 Up\r\n\r\n"),
        *(b"content-length: 3\r\n", b"content-length: 4\r\n", b"content-length: " + b"9" * 5000 + b"\r\n"),
        *(b"transfer-encoding: chunked\r\n", b"transfer-encoding: gzip\r\n", b"connection: close\r\n", b" folded\r\n"),
        *(b"\r\n", b"\n", b"3\r\nabc\r\n", b"ffffffffffffffffffff\r\n", b"0\r\n\r\n", b"abc", b"\xff\x00", b":", b""),
    ]
)


@settings(max_examples=300, deadline=None)
@given(pieces=st.lists(PIECES, max_size=8))
@example(pieces=[b"HTTP/1.1 200 OK\r\n", b"content-length: 3\r\n", b"\r\n", b"HTTP/1.1 200 OK\r\n"])
def test_whatever_arrives_is_read_or_malformed(pieces: list[bytes]) -> None:
    reader = asked()
    try:
        for piece in pieces:
            reader.feed(piece)
    except Malformed:
        assert not reader.keeps_alive
    reader.end()
    assert reader.has_begun is any(pieces)


def test_a_request_is_written_once_and_whole() -> None:
    written = AnswerReader().request("POST", "/v1/x?y=1", [("host", "box:1"), ("content-length", "2")], b"{}")
    assert written == b"POST /v1/x?y=1 HTTP/1.1\r\nhost: box:1\r\ncontent-length: 2\r\n\r\n{}"


@pytest.mark.parametrize(
    ("path", "value"), [("/a b", "x"), ("/\u00e4", "x"), ("/", "a\r\nx: y"), ("/", "\u00e4"), ("/", "a\x00")]
)
def test_what_http_cannot_carry_is_refused(path: str, value: str) -> None:
    with pytest.raises(UsageError):
        AnswerReader().request("GET", path, [("host", "box"), ("x", value)], b"")


@pytest.mark.parametrize(
    ("connection", "kept"), [("", True), ("connection: close\r\n", False), ("connection: keep-alive\r\n", True)]
)
def test_whether_the_connection_is_kept(connection: str, kept: bool) -> None:
    reader, _ = read(f"HTTP/1.1 200 OK\r\n{connection}content-length: 1\r\n\r\na".encode(), 1000)
    assert reader.keeps_alive is kept


@pytest.mark.parametrize("piece_bytes", [1, 2, 5, 1000])
@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
def test_events_are_the_same_however_they_arrive(newline: str, piece_bytes: int) -> None:
    stream = ": ping\n\ndata: one\n\n\nevent: x\ndata: two\ndata:three\n\ndata: cut".replace("\n", newline).encode()
    splitter = EventSplitter()
    events = []
    for start in range(0, len(stream), piece_bytes):
        events += splitter.feed(stream[start : start + piece_bytes])
    assert [data_of(event) for event in events] == [None, b"one", b"two\nthree"]
    assert splitter.rest == b"data: cut"


@pytest.mark.parametrize("piece_bytes", [1, 2, 5, 1000])
def test_a_byte_order_mark_before_a_stream_is_no_part_of_its_first_event(piece_bytes: int) -> None:
    stream = "\ufeffdata: one\n\ndata: \ufeff two\n\n".encode()
    splitter = EventSplitter()
    pieces = [stream[start : start + piece_bytes] for start in range(0, len(stream), piece_bytes)]
    events = [event for piece in pieces for event in splitter.feed(piece)]
    assert [data_of(event) for event in events] == [b"one", "\ufeff two".encode()]


def test_an_event_is_complete_with_its_last_line_end_whatever_that_is() -> None:
    splitter = EventSplitter()
    assert splitter.feed(b"data: one\r\r") == [b"data: one"]
    assert splitter.feed(b"data: two\r\n\r\n") == [b"data: two"]
