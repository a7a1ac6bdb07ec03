"""What is found out about an address, and what is said where nothing can be measured there."""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from localllm.bench.client.calls import Target
from localllm.bench.serving.asking import ask
from localllm.bench.serving.endpoint import TokenCount, count_tokens, discover
from localllm.bench.serving.spec import Api
from localllm.errors import ServerUnreachable, UsageError
from tests.bench.client.stand_in import Reply, Script, Seen
from tests.bench.serving.rival import Rival, served


def test_facts_of_a_server_are_kept_as_it_tells_them() -> None:
    props = {"build_info": "b1-abc", "model_path": "/m.gguf", "secret": 1, "default_generation_settings": {"n_ctx": 8}}
    rival = Rival(models=("a", "b"), routes={"/props": props, "/version": {"version": "0.9"}})
    with served(rival) as url:
        found = discover(f"{url}/v1", api="openai-chat")
    assert (found.model, found.api) == ("a", "openai-chat")
    assert found.facts["models"] == ["a", "b"]
    assert found.facts["version"] == {"version": "0.9"}
    assert found.facts["props"]["build_info"] == "b1-abc"
    assert "secret" not in found.facts["props"]
    assert "api_version" not in found.facts  # it has no such route


def test_one_of_several_models_is_chosen() -> None:
    with served(Rival(models=("a", "b/c"))) as url:
        assert discover(f"{url}?model=b/c", api="openai-chat").model == "b/c"
        with pytest.raises(UsageError, match="has no model 'x': it lists a, b/c"):
            discover(f"{url}?model=x", api="openai-chat")


def said(url: str, key: str | None = None) -> str:
    with pytest.raises(ServerUnreachable) as failure:
        discover(url, api="openai-chat", key=key, timeout_s=5.0)
    assert failure.value.exit_code == 6
    assert failure.value.hint
    return failure.value.message


async def _page(seen: Seen, reply: Reply) -> None:
    await reply.raw(b"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\ncontent-length: 6\r\n\r\n<html>")


async def _missing(seen: Seen, reply: Reply) -> None:
    await reply.json({"detail": "Not Found"}, "404 Not Found")


async def _loading(seen: Seen, reply: Reply) -> None:
    await reply.json({"error": {"message": "Loading model"}}, "503 Service Unavailable")


async def _other_json(seen: Seen, reply: Reply) -> None:
    await reply.json(["a"])


async def _no_models(seen: Seen, reply: Reply) -> None:
    await reply.json({"data": []})


async def _odd_models(seen: Seen, reply: Reply) -> None:
    await reply.json({"data": [1, {"id": 3}, {}]})


async def _hangs_up(seen: Seen, reply: Reply) -> None:
    reply.writer.close()


async def _mutters(seen: Seen, reply: Reply) -> None:
    await reply.raw(b"SSH-2.0-OpenSSH_9\r\n")
    reply.writer.close()


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (_page, "no OpenAI endpoint: it answers /v1/models with a web page"),
        (_missing, "no OpenAI endpoint: HTTP 404"),
        (_loading, "not ready: HTTP 503"),
        (_other_json, "with something else"),
        (_no_models, "serves no model"),
        (_odd_models, "serves no model"),
        (_hangs_up, "does not speak HTTP"),
        (_mutters, "does not speak HTTP: no HTTP answer"),
    ],
)
def test_what_is_no_endpoint_is_told_in_a_sentence(script: Script, words: str) -> None:
    with served(script) as url:
        assert words in said(url)


def test_a_wrong_key_and_a_missing_one_have_sentences_of_their_own() -> None:
    with served(Rival(key="right")) as url:
        assert "asks for a key" in said(url)
        assert "does not take the key" in said(url, "wrong")
        assert discover(url, api="openai-chat", key="right").model == "small"


def test_nobody_listens() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        assert "Nothing listens at http://127.0.0.1:" in said(f"http://127.0.0.1:{held.getsockname()[1]}")


def test_there_is_no_such_machine() -> None:
    assert "There is no machine called no-such-host.invalid" in said("http://no-such-host.invalid:8080")


@pytest.mark.parametrize("url", ["ftp://127.0.0.1", "http://", "http://127.0.0.1:99999", "http://127.0.0.1:x"])
def test_what_is_no_address_is_unreachable_too(url: str) -> None:
    assert "is no address of a server" in said(url)


@contextmanager
def listener(answer: bytes) -> Iterator[int]:
    """Take one connection and answer whatever it sends."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(5)

        def serve() -> None:
            with suppress(OSError):
                connection, _ = server.accept()
                connection.recv(4096)
                connection.sendall(answer)
                connection.close()

        thread = threading.Thread(target=serve)
        thread.start()
        yield server.getsockname()[1]
        thread.join()


def test_a_plain_server_asked_for_tls() -> None:
    with listener(b"HTTP/1.1 400 Bad Request\r\n\r\n") as port:
        assert "does not speak TLS" in said(f"https://127.0.0.1:{port}")


def test_a_tls_server_asked_in_plain() -> None:
    with listener(b"\x15\x03\x01\x00\x02\x02\x46") as port:  # the alert of one
        assert "does not speak HTTP" in said(f"http://127.0.0.1:{port}")


def test_a_certificate_that_is_not_trusted_is_named_as_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    error = ssl.SSLCertVerificationError(1, "failed")
    error.verify_message = "self-signed certificate"

    def refuse(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr("http.client.HTTPSConnection.connect", refuse)
    assert "not trusted: self-signed certificate" in said("https://127.0.0.1:1")


def test_a_server_that_says_nothing_is_given_up() -> None:
    async def silent(seen: Seen, reply: Reply) -> None:
        await asyncio.sleep(30)

    with served(silent) as url, pytest.raises(ServerUnreachable, match="does not answer in time"):
        discover(url, api="openai-chat", timeout_s=0.2)


@pytest.mark.parametrize("api", ["openai-chat", "openai-completions"])
@pytest.mark.parametrize(("named", "model"), [("", "default"), ("?model=small", "small")])
def test_a_server_that_lists_no_models_is_measured_where_it_answers(api: Api, named: str, model: str) -> None:
    rival = Rival()

    async def unlisted(seen: Seen, reply: Reply) -> None:
        if "/v1/models" in seen.line:
            await reply.json({"detail": "Not Found"}, "404 Not Found")
            return
        await rival(seen, reply)

    with served(unlisted) as url:
        found = discover(f"{url}{named}", api=api)
    assert (found.model, found.facts["models"]) == (model, [])
    assert [one["model"] for one in rival.asked] == [model]


def test_tokens_are_counted_by_llama_cpp_and_by_vllm() -> None:
    llama = Rival(routes={"/tokenize": lambda fields: {"tokens": fields["content"].split()}})
    vllm = Rival(routes={"/tokenize": lambda fields: {"count": len(fields["prompt"].split())}})
    with served(llama) as url:
        assert asyncio.run(count_tokens(discover(url, api="openai-chat"), "a b c")) == TokenCount(3, "server tokenizer")
    with served(Rival()) as url:
        assert asyncio.run(count_tokens(discover(url, api="openai-chat"), "a b c")) is None

    async def refuses_content(seen: Seen, reply: Reply) -> None:
        if "/tokenize" in seen.line and "content" in seen.fields:
            await reply.json({"error": {"message": "prompt is missing"}}, "400 Bad Request")
            return
        await vllm(seen, reply)

    with served(refuses_content) as url:
        assert asyncio.run(count_tokens(discover(url, api="openai-chat"), "a b")) == TokenCount(2, "server tokenizer")


def test_a_count_that_is_no_number_is_none() -> None:
    odd = Rival(routes={"/tokenize": {"count": True, "tokens": "abc"}})
    with served(odd) as url:
        assert asyncio.run(count_tokens(discover(url, api="openai-chat"), "a b c")) is None


def test_a_body_that_is_no_json_is_none() -> None:
    with served(_page) as url:
        assert ask(Target.of_url(url), "/anything").json is None


@pytest.mark.parametrize("beginning", [b"", b"HTTP/1.1 200 OK\r\nx-y: ", b"HTTP/1.1 200 OK\r\n\r\n"])
def test_a_server_that_goes_on_byte_by_byte_is_given_up_in_time(beginning: bytes) -> None:
    async def drip(seen: Seen, reply: Reply) -> None:
        await reply.raw(beginning)
        while True:
            await reply.raw(b"x")
            await asyncio.sleep(0.02)

    began_s = time.monotonic()
    with served(drip) as url, pytest.raises(ServerUnreachable, match="does not answer in time"):
        discover(url, api="openai-chat", timeout_s=0.3)
    assert time.monotonic() - began_s < 10


def test_what_a_server_tells_at_length_is_left_out() -> None:
    long = "x" * (100 << 10)
    entries = [{"id": long}, {"id": "small", "description": long}]
    routes = {"/v1/models": {"data": entries}, "/version": {"version": long}, "/api/version": {"version": "1"}}

    async def wordy(seen: Seen, reply: Reply) -> None:
        await reply.json(routes.get(seen.line.split(" ")[1], {"error": "no"}))

    with served(wordy) as url:
        found = discover(url, api="openai-chat")
    assert found.facts == {"url": url, "models": ["small"], "model": {"id": "small"}, "api_version": {"version": "1"}}
