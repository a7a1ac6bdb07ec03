"""The proxy: what passes through is unchanged, what is kept holds none of it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from localllm.bench.record import client_side
from localllm.bench.record import proxy as proxying
from tests.bench.client.stand_in import Reply, Seen
from tests.bench.client.talking import USAGE, story
from tests.bench.record.recording import CHAT, CLOSED_PORT, TEXT, Recording, record, split

ASKED = {"model": "m", "messages": [{"role": "user", "content": "Tell a story"}], "stream": True, "max_tokens": 9}
WHOLE = {"choices": [{"index": 0, "message": {"content": "Yes."}, "finish_reason": "stop"}], "usage": USAGE}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "trace.jsonl"


async def whole(seen: Seen, reply: Reply) -> None:
    await reply.json(WHOLE)


def test_a_stream_passes_byte_for_byte_and_is_kept(file: Path) -> None:
    odd = (
        b': a comment\r\n\r\ndata: {"choices":[{"delta":{"content":"x"}}]}\r\n\r\nevent: e\ndata: {"own": [1,  2]}\n\n'
    )

    async def script(seen: Seen, reply: Reply) -> None:
        await reply.begin_stream()
        for at in range(0, len(odd), 7):
            await reply.chunk(odd[at : at + 7])
        await reply.finish("length")
        await reply.end_stream(usage=USAGE)

    async def work(running: Recording) -> None:
        status, headers, body = split(await running.exchange(running.request(ASKED)))
        assert status == 200
        assert headers["content-type"] == "text/event-stream"
        assert body.startswith(odd)
        assert body.endswith(b"data: [DONE]\n\n")
        (kept,) = await running.kept(1)
        assert (kept.path, kept.status, kept.ended) == (CHAT, 200, "answer")
        assert (kept.prompt_tokens, kept.completion_tokens, kept.cached_tokens) == (7, 3, 2)
        assert kept.n_pieces == 1
        assert kept.body["max_tokens"] == 9
        assert kept.at_s >= 0
        assert kept.first_s is not None
        assert 0 < kept.first_s <= kept.duration_s

    record(file, script, work)


def test_events_pass_as_they_come(file: Path) -> None:
    async def work(running: Recording) -> None:
        may_go_on = asyncio.Event()
        gates.append(may_go_on)
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        writer.write(running.request(ASKED))
        first = await reader.readuntil(b"first")  # nothing more is sent until it has arrived here
        may_go_on.set()
        await reader.readuntil(b"second")
        assert b"200" in first
        writer.close()

    gates: list[asyncio.Event] = []

    async def script(seen: Seen, reply: Reply) -> None:
        await reply.begin_stream()
        await reply.text("first")
        await gates[0].wait()
        await reply.text("second")
        await reply.finish()
        await reply.end_stream()

    record(file, script, work)


def test_many_at_once_do_not_wait_for_each_other(file: Path) -> None:
    n_clients = 24
    arrived: list[asyncio.Event] = []

    async def script(seen: Seen, reply: Reply) -> None:
        arrived.append(asyncio.Event())
        if len(arrived) == n_clients:
            for event in arrived:
                event.set()
        await arrived[-1].wait()
        await reply.json(WHOLE)

    async def work(running: Recording) -> None:
        answers = await asyncio.gather(*(running.exchange(running.request(ASKED)) for _ in range(n_clients)))
        assert all(split(answer)[2] == json.dumps(WHOLE).encode() for answer in answers)
        assert len(await running.kept(n_clients)) == n_clients

    record(file, script, work)


def test_method_path_headers_and_body_go_to_the_server(file: Path) -> None:
    async def work(running: Recording) -> None:
        body = b'{ "messages" :[] , "odd": 1.50}'
        await running.exchange(running.request(body, CHAT, "authorization: Bearer sk-secret", "X-Own: a b"))
        await running.exchange(running.request(b"", "/v1/models/load?x=1"))
        await running.exchange(running.get("/v1/models?y=%20", "accept-encoding: gzip"))
        posted, loaded, listed = running.behind.seen
        assert posted.line == f"POST /base{CHAT} HTTP/1.1"
        assert posted.body == body
        assert posted.headers["authorization"] == "Bearer sk-secret"
        assert posted.headers["X-Own"] == "a b"
        assert posted.headers["host"] == f"127.0.0.1:{running.behind.port}"
        assert posted.headers["accept-encoding"] == "identity"
        assert posted.headers["connection"] == "close"
        assert loaded.line == "POST /base/v1/models/load?x=1 HTTP/1.1"
        assert listed.line == "GET /base/v1/models?y=%20 HTTP/1.1"
        assert listed.headers["accept-encoding"] == "gzip"
        assert len(await running.kept(1)) == 1  # what is no completion is not kept

    record(file, whole, work)


def test_a_connection_serves_one_request_after_another(file: Path) -> None:
    async def work(running: Recording) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        writer.write(running.request(ASKED) + running.get("/v1/models"))  # the second before the first is answered
        for _ in range(2):
            await reader.readuntil(json.dumps(WHOLE).encode())
        writer.write(running.request({"prompt": "Hello there"}, TEXT))
        await reader.readuntil(json.dumps(WHOLE).encode())
        writer.close()
        assert [kept.path for kept in await running.kept(2)] == [CHAT, TEXT]

    record(file, whole, work)


def test_a_refusal_passes_and_is_kept_as_one(file: Path) -> None:
    async def script(seen: Seen, reply: Reply) -> None:
        await reply.json({"error": {"message": "full", "code": "queue_full"}}, "429 Too Many", ["retry-after: 3"])

    async def work(running: Recording) -> None:
        status, headers, body = split(await running.exchange(running.request(ASKED)))
        assert (status, headers["retry-after"]) == (429, "3")
        assert json.loads(body)["error"]["code"] == "queue_full"
        (kept,) = await running.kept(1)
        assert (kept.status, kept.ended) == (429, "refused")

    record(file, script, work)


def test_a_client_that_goes_takes_its_request_along(file: Path) -> None:
    gone = asyncio.Event()

    async def script(seen: Seen, reply: Reply) -> None:
        await reply.begin_stream()
        await reply.text("one")
        try:
            while True:
                await asyncio.sleep(0.005)
                await reply.chunk(b": still there\n\n")
        except ConnectionError:
            gone.set()
            raise

    async def work(running: Recording) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        writer.write(running.request(ASKED))
        await reader.readuntil(b"one")
        writer.transport.abort()
        await asyncio.wait_for(gone.wait(), 10)
        (kept,) = await running.kept(1)
        assert (kept.ended, kept.n_pieces, kept.completion_tokens) == ("cancelled", 1, None)

    record(file, script, work)


def test_a_client_that_goes_before_the_answer_begins_is_noticed(file: Path) -> None:
    async def script(seen: Seen, reply: Reply) -> None:
        await asyncio.sleep(30)

    async def work(running: Recording) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", running.port)
        writer.write(running.request(ASKED))
        while not running.behind.seen:
            await asyncio.sleep(0.005)
        writer.close()
        (kept,) = await running.kept(1)
        assert (kept.status, kept.ended) == (None, "cancelled")

    record(file, script, work)


def test_who_hangs_up_at_done_was_answered(file: Path) -> None:
    async def script(seen: Seen, reply: Reply) -> None:
        await reply.begin_stream()
        await reply.text("x")
        await reply.finish()
        await reply.event("[DONE]")
        await asyncio.sleep(30)

    async def work(running: Recording) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        writer.write(running.request(ASKED))
        await reader.readuntil(b"[DONE]")
        writer.close()
        (kept,) = await running.kept(1)
        assert kept.ended == "answer"

    record(file, script, work)


async def cut(seen: Seen, reply: Reply) -> None:
    await reply.begin_stream()
    await reply.text("x")
    reply.writer.transport.abort()


async def closed(seen: Seen, reply: Reply) -> None:
    reply.writer.close()


async def gibberish(seen: Seen, reply: Reply) -> None:
    await reply.raw(b"SMTP ready\r\n\r\n")
    reply.writer.close()


@pytest.mark.parametrize("script", [closed, gibberish])
def test_a_server_that_gives_no_answer_is_a_502(file: Path, script: Any) -> None:
    async def work(running: Recording) -> None:
        status, _, body = split(await running.exchange(running.request(ASKED)))
        assert status == 502
        error = json.loads(body)["error"]
        assert (error["code"], error["type"], error["param"]) == ("server_unreachable", "server_error", None)
        (kept,) = await running.kept(1)
        assert (kept.status, kept.ended) == (502, "refused")

    record(file, script, work)


def test_a_server_that_is_not_there_is_a_502(file: Path) -> None:
    async def work(running: Recording) -> None:
        assert split(await running.exchange(running.get("/v1/models")))[0] == 502

    record(file, whole, work, port=CLOSED_PORT)


def test_an_answer_that_is_cut_is_cut_for_the_client_too(file: Path) -> None:
    async def work(running: Recording) -> None:
        answer = await running.exchange(running.request(ASKED))
        assert not answer.endswith(b"0\r\n\r\n")
        (kept,) = await running.kept(1)
        assert (kept.ended, kept.n_pieces) == ("broken", 1)

    record(file, cut, work)


@pytest.mark.parametrize(
    ("lines", "code"),
    [
        (["host: example.com"], "host_refused"),
        (["host: 127.0.0.1:1"], "host_refused"),
        (["host: 127.0.0.1.example.com:{port}"], "host_refused"),
        (["host: 127.0.0.1:{port}", "origin: http://example.com"], "origin_refused"),
        (["host: 127.0.0.1:{port}", "origin: null"], "origin_refused"),
        (["host: 127.0.0.1:{port}", "origin: http://127.0.0.1:1"], "origin_refused"),
        (["host: 127.0.0.1:{port}", "sec-fetch-site: cross-site"], "origin_refused"),
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS"])
def test_foreign_hosts_and_pages_reach_nothing(file: Path, method: str, lines: list[str], code: str) -> None:
    async def work(running: Recording) -> None:
        told = [line.format(port=running.port) for line in lines]
        request = "\r\n".join([f"{method} /v1/models HTTP/1.1", *told, "content-length: 0", "", ""]).encode()
        status, headers, body = split(await running.exchange(request))
        assert (status, json.loads(body)["error"]["code"]) == (403, code)
        assert not any(name.startswith("access-control") for name in headers)
        assert not running.behind.seen

    record(file, whole, work)


def test_a_page_of_the_server_itself_may_ask(file: Path) -> None:
    async def work(running: Recording) -> None:
        origin = f"origin: http://127.0.0.1:{running.port}"
        assert split(await running.exchange(running.get("/v1/models", origin)))[0] == 200
        assert "origin" not in running.behind.seen[0].headers

    record(file, whole, work)


@pytest.mark.parametrize(
    "request_",
    [
        b"GET http://example.com/ HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n",
        b"CONNECT example.com:443 HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n",
        b"GET /v1/models HTTP/1.0\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01 what\r\n\r\n",
        b"POST /x HTTP/1.1\r\nhost: 127.0.0.1\r\ntransfer-encoding: gzip\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: 127.0.0.1\r\nx: " + b"a" * 100_000 + b"\r\n\r\n",
    ],
)
def test_what_is_no_request_of_ours_is_refused(file: Path, request_: bytes) -> None:
    async def work(running: Recording) -> None:
        status = split(await running.exchange(request_))[0]
        assert 400 <= status < 600
        assert not running.behind.seen

    record(file, whole, work)


def test_a_body_that_is_too_large_is_refused_while_it_comes(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_side, "MAX_BODY_BYTES", 1000)

    async def work(running: Recording) -> None:
        status, _, body = split(await running.exchange(running.request(b"x" * 200_000)))
        assert (status, json.loads(body)["error"]["code"]) == (413, "body_too_large")
        assert not running.behind.seen

    record(file, whole, work)


def test_a_body_that_does_not_come_is_refused(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_side, "BODY_TIMEOUT_S", 0.05)

    async def work(running: Recording) -> None:
        request = running.request(b"x" * 100)[:-50]
        assert split(await running.exchange(request))[0] == 408

    record(file, whole, work)


def test_a_client_that_waits_for_100_gets_it(file: Path) -> None:
    async def work(running: Recording) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        head, _, body = running.request(ASKED, CHAT, "expect: 100-continue").partition(b"\r\n\r\n")
        writer.write(head + b"\r\n\r\n")
        assert b"100" in await reader.readline()
        writer.write(body)
        await reader.readuntil(json.dumps(WHOLE).encode())
        writer.close()

    record(file, whole, work)


def test_connections_are_limited(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxying, "MAX_CONNECTIONS", 2)

    async def work(running: Recording) -> None:
        idle = [await asyncio.open_connection("127.0.0.1", running.port) for _ in range(2)]
        await asyncio.sleep(0.05)
        assert await running.exchange(running.get("/v1/models")) == b""
        for _, writer in idle:
            writer.close()

    record(file, whole, work)


def test_what_is_no_json_passes_and_is_not_kept(file: Path) -> None:
    async def work(running: Recording) -> None:
        for body in (b"not json", b"[1]", b"\xff", b""):
            assert split(await running.exchange(running.request(body)))[0] == 200
        assert [seen.body for seen in running.behind.seen] == [b"not json", b"[1]", b"\xff", b""]
        running.keeper.close()
        assert (running.keeper.n_kept, running.keeper.n_passed_over) == (0, 4)

    record(file, whole, work)


def test_the_end_cuts_what_is_under_way_and_keeps_it_as_broken(file: Path) -> None:
    async def script(seen: Seen, reply: Reply) -> None:
        await reply.begin_stream()
        await reply.text("one")
        await asyncio.sleep(30)

    async def work(running: Recording) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        writer.write(running.request(ASKED))
        await reader.readuntil(b"one")
        await running.proxy.close()
        (kept,) = await running.kept(1)
        assert kept.ended == "broken"
        writer.close()

    record(file, script, work)


def test_both_loopback_addresses_answer_where_there_are_two(file: Path) -> None:
    async def work(running: Recording) -> None:
        try:
            reader, writer = await asyncio.open_connection("::1", running.port)
        except OSError:
            pytest.skip("there is no IPv6 here")
        request = running.get("/v1/models").replace(b"127.0.0.1", b"[::1]")
        writer.write(request)
        assert b"200" in await reader.readline()
        writer.close()

    record(file, whole, work)


def test_a_slow_reader_slows_the_server_and_nobody_else(file: Path) -> None:
    sent = 0

    async def script(seen: Seen, reply: Reply) -> None:
        nonlocal sent
        if "GET" in seen.line:
            await reply.json({})
            return
        await reply.begin_stream()
        while True:
            await reply.chunk(b": " + b"x" * 65536 + b"\n\n")
            sent += 65536

    async def work(running: Recording) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port, limit=1024)
        writer.write(running.request(ASKED))
        await reader.readline()
        before = -1
        while before != sent:  # until the server is held back
            before = sent
            await asyncio.sleep(0.2)
        assert sent < 40 << 20
        assert split(await running.exchange(running.get("/v1/models")))[0] == 200
        writer.transport.abort()

    record(file, script, work)


def test_a_story_is_kept_whole(file: Path) -> None:
    async def work(running: Recording) -> None:
        await running.exchange(running.request({**ASKED, "stream_options": {"include_usage": True}}))
        (kept,) = await running.kept(1)
        assert (kept.n_pieces, kept.completion_tokens, kept.n_left_out) == (3, 3, 1)

    record(file, story, work)
