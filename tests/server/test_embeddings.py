"""Embeddings through the official client, and what cannot be embedded, through the whole app."""

from __future__ import annotations

import asyncio
import base64
import json
import socket
import struct
import threading
import time
from typing import Any

import numpy as np
import openai
import pytest
from numpy.typing import NDArray

from localllm.errors import QueueFull, Unavailable, WorkerDied
from localllm.runtime.types import EmbeddingRequest
from localllm.server import embeddings
from localllm.server.state import Limits, ServerSettings, draining
from tests.fake_engine import BOS, N_EMBD, N_VOCAB, SPEC, FakeEngine, fake_embedding
from tests.server.fakes import Running, fake_supervisor, serving, wait_until


def expected(tokens: list[int]) -> NDArray[np.float32]:
    vector = fake_embedding(tokens).astype(np.float64)
    unit: NDArray[np.float32] = (vector / np.linalg.norm(vector)).astype(np.float32)
    return unit


def of_text(text: str) -> NDArray[np.float32]:
    return expected([BOS, *text.encode()])


def embed(running: Running, given: Any, **body: Any) -> Any:
    return running.post("/v1/embeddings", {"input": given, **body})


def test_the_client_asks_for_base64_and_gets_vectors_of_length_1(running: Running, client: openai.OpenAI) -> None:
    answer = client.embeddings.create(model="fake", input="hello")
    (entry,) = answer.data
    assert len(entry.embedding) == N_EMBD
    assert np.asarray(entry.embedding, np.float32) == pytest.approx(of_text("hello"))
    assert float(np.linalg.norm(entry.embedding)) == pytest.approx(1, abs=1e-6)
    assert (entry.index, entry.object, answer.object, answer.model) == (0, "embedding", "list", "fake")
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (6, 6)
    sent = running.worker.requests[-1]
    assert isinstance(sent, EmbeddingRequest)
    assert sent.options.client.startswith("key:")


def test_floats_and_base64_hold_the_same_bits(running: Running, client: openai.OpenAI) -> None:
    floats = client.embeddings.create(model="fake", input=["a", "bc"], encoding_format="float")
    packed = embed(running, ["a", "bc"], encoding_format="base64").json
    for entry, other in zip(floats.data, packed["data"], strict=True):
        raw = base64.b64decode(other["embedding"], validate=True)
        assert list(struct.unpack(f"<{N_EMBD}f", raw)) == entry.embedding
    assert embed(running, ["a", "bc"]).json["data"] == embed(running, ["a", "bc"], encoding_format="float").json["data"]


def test_300_inputs_keep_their_order_and_index(client: openai.OpenAI) -> None:
    texts = [f"text {i}" for i in range(300)]
    answer = client.embeddings.create(model="fake", input=texts)
    assert [entry.index for entry in answer.data] == list(range(300))
    for text, entry in zip(texts, answer.data, strict=True):
        assert np.asarray(entry.embedding, np.float32) == pytest.approx(of_text(text), abs=1e-6)
    assert answer.usage.prompt_tokens == sum(len(text) + 1 for text in texts)


@pytest.mark.parametrize(
    ("given", "tokens"),
    [
        ("ab", [[BOS, 97, 98]]),
        (["ab", "c"], [[BOS, 97, 98], [BOS, 99]]),
        ([97, 98], [[97, 98]]),
        ([[97, 98], [99]], [[97, 98], [99]]),
        (["<s>"], [[BOS, *b"<s>"]]),
        (["é\u2028\x00"], [[BOS, *"é\u2028\x00".encode()]]),
    ],
)
def test_texts_and_token_ids_of_one_or_several(running: Running, given: Any, tokens: list[list[int]]) -> None:
    answer = embed(running, given).json
    vectors = [entry["embedding"] for entry in answer["data"]]
    assert np.asarray(vectors) == pytest.approx(np.asarray([expected(ids) for ids in tokens]), abs=1e-6)
    assert answer["usage"]["prompt_tokens"] == sum(map(len, tokens))


@pytest.mark.parametrize(
    "given",
    [
        *("", [], [""], ["a", ""], [[]], [[1], []], None, 1, True, {}, {"a": "b"}),
        *(["a", 1], ["a", [1]], [1, [2]], [None], ["a", None], [[1, "a"]], [1.5], [[1.5]], [True], [-1], [[-1]]),
        *([N_VOCAB], [[97], [10**9]], [2**63], [2**64 - 1], [[["a"]]]),
    ],
)
def test_what_cannot_be_embedded_is_a_400_that_names_the_input(running: Running, given: Any) -> None:
    reply = embed(running, given)
    assert reply.status == 400
    assert reply.error["type"] == "invalid_request_error"
    assert reply.error["param"].startswith("input")


def test_a_missing_input_is_named(running: Running) -> None:
    reply = running.post("/v1/embeddings", {"model": "fake"})
    assert (reply.status, reply.error["code"]) == (400, "invalid_request")
    assert "`input`" in reply.error["message"]


def test_too_long_an_input_is_named_by_its_index_and_nothing_is_embedded(running: Running) -> None:
    n_embedded = running.worker.service.stats().n_embedded_texts
    reply = embed(running, ["ok", "x" * SPEC.max_embed_tokens, "ok"])
    assert reply.status == 400
    assert reply.error["code"] == "context_length_exceeded"
    assert reply.error["param"] == "input"
    assert reply.error["index"] == 1
    assert reply.error["n_prompt_tokens"] == SPEC.max_embed_tokens + 1
    assert running.worker.service.stats().n_embedded_texts == n_embedded


def test_the_longest_input_fits(running: Running) -> None:
    assert embed(running, "x" * (SPEC.max_embed_tokens - 1)).json["usage"]["prompt_tokens"] == SPEC.max_embed_tokens


def test_only_the_models_own_number_of_dimensions_is_taken(client: openai.OpenAI) -> None:
    assert len(client.embeddings.create(model="fake", input="a", dimensions=N_EMBD).data[0].embedding) == N_EMBD
    with pytest.raises(openai.BadRequestError) as refused:
        client.embeddings.create(model="fake", input="a", dimensions=N_EMBD - 1)
    assert refused.value.param == "dimensions"
    assert str(N_EMBD) in refused.value.message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("dimensions", 0),
        ("dimensions", "8"),
        ("encoding_format", "hex"),
        ("encoding_format", 1),
        ("model", 1),
        ("priority", "high"),
        ("truncate_prompt_tokens", 5),
        ("truncate", True),
        ("normalize", False),
        ("embd_normalize", 0),
        ("pooling", "cls"),
        ("input_type", "query"),
        ("add_special_tokens", False),
    ],
)
def test_a_field_that_cannot_be_honoured_is_named(running: Running, field: str, value: Any) -> None:
    reply = embed(running, "a", **{field: value})
    assert (reply.status, reply.error["param"]) == (400, field)


def test_fields_that_change_nothing_are_taken_and_unknown_ones_are_told(running: Running) -> None:
    reply = embed(running, "a", user="u", normalize=True, truncate=None, encoding_format=None, strange=1)
    assert reply.status == 200
    assert reply.headers["x-localllm-ignored-fields"] == "strange"
    assert "x-localllm-ignored-fields" not in embed(running, "a", user="u").headers


def test_under_strict_an_unknown_field_is_refused() -> None:
    with serving(settings=ServerSettings(strict=True)) as running:
        assert embed(running, "a", user="u", normalize=True).status == 200
        assert embed(running, "a", strange=1).error["param"] == "strange"


def test_an_unknown_model_is_a_404_that_lists_what_there_is(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.embeddings.create(model="nope", input="a")
    assert missing.value.code == "model_not_found"
    assert "fake" in missing.value.message


def test_errors_of_the_worker_have_their_codes_and_headers(running: Running) -> None:
    worker = running.worker
    for error, status in ((QueueFull("full"), 429), (WorkerDied("died"), 503), (Unavailable("gone"), 503)):
        worker.fails["submit"] = error
        try:
            reply = embed(running, "a")
        finally:
            del worker.fails["submit"]
        assert (reply.status, reply.error["code"]) == (status, error.code)
        assert int(reply.headers["retry-after"]) >= 1


def test_an_engine_that_fails_is_a_500_that_is_not_tried_again() -> None:
    with serving(fake_supervisor(FakeEngine(fail_embeds=[1]))) as running:
        reply = embed(running, "a")
        assert (reply.status, reply.error["code"]) == (500, "engine_error")
        assert reply.headers["x-should-retry"] == "false"
        assert embed(running, "a").status == 200


def test_more_than_memory_holds_is_refused_before_work(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embeddings, "MAX_ANSWER_BYTES", 5000)
    n_sent = len(running.worker.requests)
    assert embed(running, ["a"] * 15).status == 200
    reply = embed(running, ["a"] * 40)
    assert (reply.status, reply.error["param"]) == (400, "input")
    assert 0 < reply.error["limit"] < 40
    assert embed(running, ["a"] * reply.error["limit"]).status == 200
    assert embed(running, ["a"] * 40, encoding_format="base64").status == 200
    assert len(running.worker.requests) == n_sent + 3


def test_usage_and_times_reach_log_and_metrics(running: Running) -> None:
    reply = embed(running, ["abc", "d"])
    assert float(reply.headers["x-localllm-queue-ms"]) >= 0
    wait_until(lambda: reply.headers["x-request-id"] in running.log.getvalue())
    (line,) = [x for x in running.log.getvalue().splitlines() if reply.headers["x-request-id"] in x]
    assert "prompt_tokens=6" in line
    assert "inputs=2" in line
    assert "abc" not in line.replace(reply.headers["x-request-id"], "")


def slow_engine(entered: threading.Event, go_on: threading.Event) -> FakeEngine:
    class Slow(FakeEngine):
        def embed(self, chunk: Any) -> Any:
            entered.set()
            assert go_on.wait(20)
            return super().embed(chunk)

    return Slow()


def test_a_client_that_goes_ends_the_work_within_a_chunk() -> None:
    entered, go_on = threading.Event(), threading.Event()
    engine = slow_engine(entered, go_on)
    with serving(fake_supervisor(engine)) as running:
        body = json.dumps({"input": ["x" * 1000] * 20}).encode()
        sock = running.connect()
        head = f"POST /v1/embeddings HTTP/1.1\r\nhost: 127.0.0.1:{running.port}\r\ncontent-type: application/json\r\n"
        sock.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        assert entered.wait(20)
        sock.close()
        wait_until(lambda: running.worker.streams[0].n_cancels > 0)
        go_on.set()
        wait_until(lambda: "code=499" in running.log.getvalue())
        assert len(engine.embeds) < 20
        assert running.post("/v1/embeddings", {"input": "a"}).status == 200
        wait_until(lambda: running.state.n_active == 0)  # the answer is out a moment before it counts as ended
        assert not running.state.cuts


def test_a_stop_ends_it_with_503() -> None:
    entered, go_on = threading.Event(), threading.Event()
    with serving(fake_supervisor(slow_engine(entered, go_on))) as running:

        async def stop() -> None:
            for cut in list(running.state.cuts):
                cut(draining(5))

        replies: list[Any] = []
        asking = threading.Thread(target=lambda: replies.append(embed(running, "abc")))
        asking.start()
        assert entered.wait(20)
        running.run(stop())
        go_on.set()
        asking.join(20)
        assert (replies[0].status, replies[0].error["code"]) == (503, "draining")
        assert "retry-after" in replies[0].headers


def test_a_worker_that_dies_is_a_503() -> None:
    entered, go_on = threading.Event(), threading.Event()
    with serving(fake_supervisor(slow_engine(entered, go_on))) as running:

        async def die() -> None:
            running.worker.die()

        replies: list[Any] = []
        asking = threading.Thread(target=lambda: replies.append(embed(running, "abc")))
        asking.start()
        assert entered.wait(20)
        running.run(die())
        asking.join(20)
        go_on.set()
        assert (replies[0].status, replies[0].error["code"]) == (503, "worker_died")


def test_a_large_answer_reaches_a_slow_reader_whole() -> None:
    with serving(settings=ServerSettings(limits=Limits(output_bytes=160 * 1024))) as running:
        body = json.dumps({"input": ["a"] * 2000}).encode()
        sock = running.connect()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
        head = f"POST /v1/embeddings HTTP/1.1\r\nhost: 127.0.0.1:{running.port}\r\ncontent-type: application/json\r\n"
        sock.sendall(f"{head}connection: close\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
        time.sleep(2.5)  # a reader that stalls for a moment, with more than its connection's limit on the way
        data = b""
        while piece := sock.recv(65536):
            data += piece
        sock.close()
        _, _, content = data.partition(b"\r\n\r\n")
        assert len(json.loads(content)["data"]) == 2000


def test_asynchronous_clients_that_ask_at_once_each_get_their_own(running: Running) -> None:
    async def ask() -> None:
        async with openai.AsyncOpenAI(base_url=running.url + "/v1", api_key="unused", max_retries=0) as client:
            answers = await asyncio.gather(
                *(client.embeddings.create(model="fake", input=[f"{i}", f"{i}!"]) for i in range(12))
            )
        for i, answer in enumerate(answers):
            for text, entry in zip((f"{i}", f"{i}!"), answer.data, strict=True):
                assert np.asarray(entry.embedding, np.float32) == pytest.approx(of_text(text), abs=1e-6)

    asyncio.run(ask())
