"""Clients that are isolated: nothing that a request is told depends on what another key, or nobody's, had computed."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import pytest

from localllm.server.isolation import CONNECTION, KEY, kept_apart, sharing_of
from localllm.server.state import ServerSettings
from tests.fake_engine import FakeEngine, endless_token
from tests.server.fakes import Reply, Running, fake_supervisor, serving

PROMPT = "One long prompt that both of them send. " * 8
ISOLATED = ServerSettings(is_cache_shared=False)


@pytest.fixture
def isolated() -> Iterator[Running]:
    with serving(fake_supervisor(FakeEngine(script=endless_token)), ISOLATED) as running:
        yield running


def ask(
    running: Running, key: str | None, text: str = PROMPT, path: str = "/v1/chat/completions", **body: Any
) -> Reply:
    what = {"prompt": text} if path == "/v1/completions" else {"messages": [{"role": "user", "content": text}]}
    headers = {} if key is None else {"authorization": key}
    reply = running.post(path, {**what, "max_tokens": 4, **body}, headers)
    assert reply.status == 200
    return reply


def told(reply: Reply) -> dict[str, Any]:
    """Return all that a client is told of the cost, but for times."""
    body = reply.json
    timings = {name: value for name, value in body["timings"].items() if name.endswith("_n")}
    headers = {name: value for name, value in reply.headers.items() if "cached" in name}
    return {"usage": body["usage"], "timings": timings, "headers": headers, "text": body["choices"]}


def n_cached(reply: Reply) -> int:
    return int(reply.headers["x-localllm-cached-tokens"])


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_another_keys_prompt_costs_what_a_new_one_costs(isolated: Running, path: str) -> None:
    first = ask(isolated, "Bearer alice", path=path)
    n_computed = isolated.worker.service.stats().n_prompt_tokens_computed
    assert n_cached(ask(isolated, "Bearer alice", path=path)) > 0
    before = isolated.worker.service.stats().n_prompt_tokens_computed
    other = ask(isolated, "Bearer bob", path=path)
    assert told(other) == told(first)
    assert n_cached(other) == 0
    assert isolated.worker.service.stats().n_prompt_tokens_computed - before == n_computed
    assert n_cached(ask(isolated, "Bearer bob", path=path)) > 0


def test_neither_waits_for_the_others_prefix_nor_gets_it(isolated: Running) -> None:
    replies: dict[str, Reply] = {}
    keys = [f"Bearer client {i}" for i in range(6)]
    threads = [threading.Thread(target=lambda key=key: replies.update({key: ask(isolated, key)})) for key in keys]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [n_cached(replies[key]) for key in keys] == [0] * 6
    n_prompt = told(replies[keys[0]])["usage"]["prompt_tokens"]
    assert isolated.worker.service.stats().n_prompt_tokens_computed == 6 * n_prompt
    assert len({json.dumps(told(reply), sort_keys=True) for reply in replies.values()}) == 1


def test_nor_is_one_told_of_the_others_prompts_where_caches_are_explained(isolated: Running) -> None:
    sent = {"messages": [{"role": "user", "content": PROMPT}]}

    def explained(key: str) -> dict[str, Any]:
        told: dict[str, Any] = isolated.post("/v1/cache/explain", sent, {"authorization": key}).json
        return told

    new = explained("Bearer alice")
    ask(isolated, "Bearer alice")
    assert explained("Bearer alice")["n_known_tokens"] > 0
    assert explained("Bearer bob") == new


def test_without_a_key_only_one_connection_finds_its_own_again(isolated: Running) -> None:
    assert [n_cached(ask(isolated, key)) for key in (None, None, "", "Bearer", "Bearer ", None)] == [0] * 6
    connection = http.client.HTTPConnection(isolated.host, isolated.port, timeout=20)
    try:
        for is_first in (True, False):
            body = json.dumps({"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 2})
            connection.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
            response = connection.getresponse()
            response.read()
            assert (int(response.getheader("x-localllm-cached-tokens") or -1) == 0) is is_first
    finally:
        connection.close()
    requests = isolated.worker.requests
    assert all(request.options.is_private for request in requests)  # nobody would find it on disk again
    assert len({request.options.salt for request in requests}) == 7


def test_a_key_is_the_same_however_its_header_is_written(isolated: Running) -> None:
    ask(isolated, "Bearer alice")
    assert n_cached(ask(isolated, "bearer  alice")) > 0
    salts = {request.options.salt for request in isolated.worker.requests}
    assert len(salts) == 1
    assert "alice" not in salts.pop()
    assert not isolated.worker.requests[0].options.is_private


def test_a_shared_cache_is_shared_by_all_keys() -> None:
    with serving(fake_supervisor(FakeEngine(script=endless_token))) as running:
        ask(running, "Bearer alice")
        assert n_cached(ask(running, "Bearer bob")) > 0
        assert n_cached(ask(running, None)) > 0
        assert {request.options.salt for request in running.worker.requests} == {""}


def test_salts_are_the_same_after_a_restart_and_no_two_alike() -> None:
    def salt(headers: Mapping[bytes, bytes], connection: str) -> str:
        return sharing_of({"headers": list(headers.items()), "state": {CONNECTION: connection}}, ISOLATED).salt

    keys = [b"Bearer a", b"Bearer b", b"Bearer a b", b"Bearer connection:1", "Bearer ü".encode()]
    salts = [salt({b"authorization": key}, "1") for key in keys] + [salt({}, "1"), salt({}, "2")]
    assert len(set(salts)) == len(salts)
    assert salt({b"authorization": b"Bearer a"}, "9") == salts[0]
    assert sharing_of({"headers": [], "state": {}}, ISOLATED) != sharing_of({"headers": [], "state": {}}, ISOLATED)


KEYS = (b"the-key-of-alice", b"the-key-of-bob", b"the-key-of-carol")


def bearer(key: bytes) -> str:
    return f"Bearer {key.decode()}"


def test_the_keys_of_a_server_are_kept_apart() -> None:
    settings = ServerSettings(is_cache_shared=False, api_keys=KEYS)
    with serving(fake_supervisor(FakeEngine(script=endless_token)), settings) as running:
        for key in KEYS:
            assert n_cached(ask(running, bearer(key))) == 0
            assert n_cached(ask(running, bearer(key))) > 0
        assert running.post("/v1/chat/completions", {"messages": []}, {"authorization": "Bearer x"}).status == 401
        assert not any(request.options.is_private for request in running.worker.requests)


def test_it_is_the_verified_key_that_counts_and_it_is_the_same_as_where_none_is_asked_for() -> None:
    scope = {"headers": [(b"authorization", b"Bearer another")], "state": {KEY: KEYS[0]}}
    verified = sharing_of(scope, ServerSettings(is_cache_shared=False, api_keys=KEYS))
    sent = sharing_of({"headers": [(b"authorization", b"Bearer " + KEYS[0])], "state": {}}, ISOLATED)
    assert verified == sent != sharing_of(scope, ISOLATED)


def test_a_line_says_whom_it_keeps_apart() -> None:
    assert "by connection" in kept_apart(0)
    assert "send the same share" in kept_apart(0)
    assert "all clients with this key share" in kept_apart(1)
    assert "3 keys are kept apart" in kept_apart(3)
    assert all("\n" not in kept_apart(n) for n in range(4))


CHAT = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 2}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": PROMPT, "max_tokens": 2},
    "/v1/embeddings": {"input": "one text"},
    "/v1/cache/explain": CHAT,
    "/apply-template": {"messages": CHAT["messages"]},
}
"""The routes that make a request of their body."""

WITHOUT = {"/tokenize", "/detokenize", "/v1/models/load", "/v1/models/unload"}
"""Those that make none: what they tell depends on nothing that was computed."""


def test_each_route_is_known_here(isolated: Running) -> None:
    document = isolated.get("/openapi.json").json
    assert {path for path, methods in document["paths"].items() if "post" in methods} == BODIES.keys() | WITHOUT


@pytest.mark.parametrize("path", BODIES)
def test_every_route_renders_and_looks_up_with_what_is_the_senders(isolated: Running, path: str) -> None:
    assert isolated.post(path, BODIES[path], {"authorization": "Bearer alice"}).status == 200
    worker = isolated.worker
    made = [msgspec.to_builtins(request.options) for request in worker.requests]
    made += [argument["request"]["options"] for _, argument in worker.calls if "request" in (argument or {})]
    scope = {"headers": [(b"authorization", b"Bearer alice")], "state": {}}
    assert [options["salt"] for options in made] == [sharing_of(scope, ISOLATED).salt]
    assert made[0]["client"].startswith("key:")
