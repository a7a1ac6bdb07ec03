"""The routes beside generation on SmolLM2, through `localllm serve` and a worker with native code."""

from __future__ import annotations

import itertools
import json
import os
import signal
import threading
import time
from typing import Any

import numpy as np
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.server.fakes import Reply, wait_until
from tests.server.test_serving import Server

pytestmark = pytest.mark.real

N_EMBD = 576
HELLO: Any = [{"role": "user", "content": "Name three colours."}]


@pytest.fixture
def base_url(server: Server) -> str:
    return f"http://127.0.0.1:{server.port}/v1"


def get(server: Server, path: str) -> Reply:
    connection = server.connection()
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return Reply(response.status, dict(response.getheaders()), response.read())
    finally:
        connection.close()


def post(server: Server, path: str, body: Any) -> Reply:
    connection = server.connection()
    try:
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        return Reply(response.status, dict(response.getheaders()), response.read())
    finally:
        connection.close()


def vectors(client: openai.OpenAI, given: Any, **settings: Any) -> Any:
    answer = client.embeddings.create(model="smol", input=given, **settings)
    assert [entry.index for entry in answer.data] == list(range(len(answer.data)))
    return np.asarray([entry.embedding for entry in answer.data])


def test_300_texts_are_embedded_in_order_as_each_alone(client: openai.OpenAI) -> None:
    texts = [f"{word} {i}" for i in range(75) for word in ("cat", "tax", "river", "Zürich")]
    all_at_once = vectors(client, texts)
    assert all_at_once.shape == (300, N_EMBD)
    assert np.linalg.norm(all_at_once, axis=1) == pytest.approx(1, abs=1e-5)
    for i in (0, 1, 150, 299):
        (alone,) = vectors(client, texts[i])
        assert float(alone @ all_at_once[i]) > 0.999
    assert float(np.max(all_at_once[0] @ all_at_once[1:].T)) < 0.99999


def test_texts_that_mean_the_same_are_nearer(client: openai.OpenAI) -> None:
    a, b, c = vectors(client, ["The cat sleeps on the sofa.", "A cat is sleeping on a couch.", "def f(x): return x**2"])
    assert float(a @ b) > float(a @ c)


def test_ids_and_text_give_the_same_vector(server: Server, client: openai.OpenAI) -> None:
    ids = post(server, "/tokenize", {"prompt": "hello world"}).json["tokens"]
    assert float(vectors(client, "hello world")[0] @ vectors(client, [ids])[0]) > 0.9999
    assert vectors(client, ids, encoding_format="float")[0] == pytest.approx(vectors(client, [ids])[0], abs=1e-6)


@pytest.mark.parametrize("n_tokens", [513, 700])
def test_long_texts_are_embedded_in_chunks(server: Server, client: openai.OpenAI, n_tokens: int) -> None:
    ids = (post(server, "/tokenize", {"content": "one two three four five six "}).json["tokens"] * n_tokens)[:n_tokens]
    (vector,) = vectors(client, ids)
    assert float(np.linalg.norm(vector)) == pytest.approx(1, abs=1e-5)


def test_a_text_beyond_the_context_is_a_400(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.embeddings.create(model="smol", input=["ok", [7] * 2049])  # type: ignore[list-item]
    assert refused.value.param == "input"
    with pytest.raises(openai.BadRequestError) as refused:
        client.embeddings.create(model="smol", input=[[7], [7] * 2049])
    assert (refused.value.code, refused.value.body["index"]) == ("context_length_exceeded", 1)  # type: ignore[index]


def test_streams_go_on_beside_embeddings(client: openai.OpenAI) -> None:
    texts = ["the quick brown fox jumps over the lazy dog " * 8] * 4
    embedded: list[Any] = []
    beside = threading.Thread(target=lambda: embedded.append(vectors(client, texts)))
    stamps = []
    for chunk in client.chat.completions.create(
        model="smol", messages=HELLO, max_tokens=25, temperature=0, stream=True, extra_body={"ignore_eos": True}
    ):
        if chunk.choices and chunk.choices[0].delta.content:
            stamps.append(time.monotonic())
        if len(stamps) == 5 and not beside.ident:
            beside.start()
    beside.join(60)
    assert embedded[0].shape == (4, N_EMBD)
    assert max(b - a for a, b in itertools.pairwise(stamps)) < 5


def test_tokens_and_template_agree_with_what_a_request_counts(server: Server, client: openai.OpenAI) -> None:
    told = post(server, "/apply-template", {"messages": HELLO}).json
    answer = client.chat.completions.create(model="smol", messages=HELLO, max_tokens=1)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == told["n_tokens"]
    ids = post(server, "/tokenize", {"content": told["prompt"]}).json["tokens"]
    assert len(ids) == told["n_tokens"]
    assert post(server, "/detokenize", {"tokens": ids}).json["content"] == told["prompt"]
    pieces = post(server, "/tokenize", {"content": "naïve 🦊", "with_pieces": True}).json["tokens"]
    raw = b"".join(p["piece"].encode() if isinstance(p["piece"], str) else bytes(p["piece"]) for p in pieces)
    assert raw.decode() == "naïve 🦊"


def test_the_model_is_listed_with_its_facts(server: Server, client: openai.OpenAI) -> None:
    (model,) = get(server, "/v1/models").json["data"]
    assert model["meta"]["n_embd"] == N_EMBD
    assert model["meta"]["n_params"] == pytest.approx(134_515_008, rel=0.01)
    assert model["max_model_len"] == 2048
    assert client.models.retrieve("smol").id == model["id"]


def test_metrics_have_the_workers_counters(server: Server, client: openai.OpenAI) -> None:
    def read() -> dict[str, float]:
        families = text_string_to_metric_families(get(server, "/metrics").body.decode())
        return {s.name: s.value for f in families for s in f.samples if s.labels.keys() == {"model"}}

    before = read()
    client.chat.completions.create(model="smol", messages=HELLO, max_tokens=5, extra_body={"ignore_eos": True})
    vectors(client, ["a", "b"])
    after = read()
    assert after["localllm_generation_tokens_total"] - before["localllm_generation_tokens_total"] == 5
    assert after["localllm_embedded_texts_total"] - before["localllm_embedded_texts_total"] == 2
    assert 0 <= after["localllm_kv_cache_usage_ratio"] <= 1
    assert after["localllm_ipc_seconds_count"] > before["localllm_ipc_seconds_count"]


def test_a_stopped_worker_turns_health_red_and_a_killed_one_comes_back(server: Server) -> None:
    assert get(server, "/health").status == 200
    (model,) = get(server, "/health").json["models"]
    os.kill(model["pid"], signal.SIGSTOP)
    started_s = time.monotonic()
    reply = get(server, "/health")
    assert (reply.status, reply.json["status"]) == (503, "silent")
    assert time.monotonic() - started_s < 4
    page = get(server, "/metrics").body.decode()
    assert "localllm_worker_answered{" in page
    assert "localllm_generation_tokens_total{" not in page
    assert get(server, "/livez").status == 200
    os.kill(model["pid"], signal.SIGKILL)
    wait_until(lambda: get(server, "/health").status == 200 and _pid(server) != model["pid"], 30)
    assert post(server, "/v1/embeddings", {"input": "again"}).status == 200


def _pid(server: Server) -> int:
    pid: int = get(server, "/health").json["models"][0]["pid"]
    return pid


def test_unloading_ends_the_process_and_the_next_request_loads_again(server: Server) -> None:
    pid, name = _pid(server), get(server, "/v1/models").json["data"][0]["id"]
    assert post(server, "/v1/models/unload", {"model": name}).json["status"]["state"] == "unloaded"
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert get(server, "/readyz").status == 200
    assert post(server, "/tokenize", {"content": "a"}).status == 200
    assert _pid(server) != pid
    assert post(server, "/v1/models/load", {"model": "smol"}).json["status"]["value"] == "loaded"
