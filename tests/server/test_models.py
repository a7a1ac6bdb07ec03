"""The list of models, one of them, and loading and unloading, through the official client where it can."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from localllm.errors import ModelRefused, NotEnoughMemory, Unavailable
from localllm.server.models import parameter_size
from localllm.server.state import ServerSettings
from localllm.worker.lifecycle import ModelState
from tests.fake_engine import fake_service
from tests.server.fakes import FakeSupervisor, FakeWorker, Running, serving, wait_until


@pytest.fixture
def running() -> Iterator[Running]:
    supervisor = FakeSupervisor(FakeWorker("fake", fake_service()), stored=["org/other:q4"], aliases=["gpt-4o"])
    with serving(supervisor) as server:
        yield server


@pytest.fixture
def client(running: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=running.url + "/v1", api_key="unused", max_retries=0) as client:
        yield client


def test_the_list_has_what_clients_of_four_servers_read(running: Running, client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["fake", "org/other:q4"]
    body = running.get("/v1/models").json
    first, second = body["data"]
    assert (first["object"], first["owned_by"], first["created"]) == ("model", "localllm", 1_700_000_000)
    assert (first["root"], first["parent"], first["max_model_len"]) == ("fake", None, 4096)
    assert first["aliases"] == ["gpt-4o"]
    assert first["meta"]["size"] == 2_000_000
    assert first["meta"].keys() == {"size", "n_vocab", "n_ctx", "n_ctx_train", "n_embd", "n_params"}
    assert first["status"] == {"value": "loaded", "state": "ready", "failed": False, "reason": None}
    assert {"completion", "chat", "embedding"} <= set(first["capabilities"])
    assert first["architecture"]["input_modalities"] == ["text"]
    assert (second["root"], second["max_model_len"], second["meta"]) == ("org/other:q4", None, {"size": 2_000_000})
    assert second["status"]["value"] == "unloaded"
    ollama = body["models"][0]
    assert (ollama["name"], ollama["model"], ollama["size"]) == ("fake", "fake", 2_000_000)
    assert ollama["modified_at"] == "2023-11-14T22:13:20+00:00"
    assert ollama["details"]["quantization_level"] == "Q8_0"
    assert ollama["details"]["parameter_size"] == "1M"


def test_no_path_of_a_file_is_told(running: Running) -> None:
    assert b".gguf" not in running.get("/v1/models").body
    assert b"/models/" not in running.get("/v1/models/fake").body


@pytest.mark.parametrize("name", ["org/other:q4", "fake", "gpt-4o"])
def test_one_model_by_its_name_or_alias(client: openai.OpenAI, name: str) -> None:
    assert client.models.retrieve(name).id == ("fake" if name == "gpt-4o" else name)


def test_names_with_slashes_are_found_plain_and_quoted(running: Running) -> None:
    for path in ("/v1/models/org/other:q4", "/v1/models/org%2Fother%3Aq4"):
        assert running.get(path).json["id"] == "org/other:q4"


@pytest.mark.parametrize("name", ["nope", "../fake", "%2e%2e/fake", "fake%00", "f" * 300, "//", "%ff"])
def test_an_unknown_name_is_a_404(running: Running, name: str) -> None:
    reply = running.get(f"/v1/models/{name}")
    assert (reply.status, reply.error["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(
    ("state", "value", "failed"),
    [
        (ModelState.READY, "loaded", False),
        (ModelState.LOADING, "loading", False),
        (ModelState.RESTARTING, "loading", False),
        (ModelState.STOPPING, "unloaded", False),
        (ModelState.UNLOADED, "unloaded", False),
        (ModelState.FAILED, "unloaded", True),
        (ModelState.REFUSED, "unloaded", True),
    ],
)
def test_every_state_is_told(running: Running, state: ModelState, value: str, failed: bool) -> None:
    running.supervisor.set_state("fake", state)
    status = running.get("/v1/models/fake").json["status"]
    assert (status["value"], status["state"], status["failed"]) == (value, state.value, failed)


def test_a_model_is_loaded_and_unloaded(running: Running) -> None:
    loaded = running.post("/v1/models/load", {"model": "org/other:q4"})
    assert (loaded.status, loaded.json["status"]["value"]) == (200, "loaded")
    assert running.post("/tokenize", {"model": "org/other:q4", "content": "a"}).status == 200
    unloaded = running.post("/v1/models/unload", {"model": "org/other:q4"})
    assert (unloaded.status, unloaded.json["status"]["value"]) == (200, "unloaded")
    assert unloaded.json["max_model_len"] is None


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ModelRefused("malformed"), 422),
        (NotEnoughMemory("too large"), 503),
        (Unavailable("again", retry_after_s=7.2), 503),
    ],
)
def test_a_load_that_fails_says_why(running: Running, error: Any, status: int) -> None:
    running.supervisor.refuses["org/other:q4"] = error
    reply = running.post("/v1/models/load", {"model": "org/other:q4"})
    assert (reply.status, reply.error["code"]) == (status, error.code)
    assert reply.headers.get("retry-after") == ("8" if isinstance(error, Unavailable) else None)
    assert running.get("/v1/models/org/other:q4").json["status"]["reason"] == error.message


@pytest.mark.parametrize("path", ["/v1/models/load", "/v1/models/unload"])
def test_loading_needs_a_post_with_json_and_a_name(running: Running, path: str) -> None:
    assert running.get(path).status == 405
    assert running.get(path).headers["allow"] == "POST"
    form = {"content-type": "application/x-www-form-urlencoded"}
    assert running.request("POST", path, b"model=fake", form).status == 415
    assert running.request("POST", path, b'{"model": "fake"}', {"content-type": "text/plain"}).status == 415
    for body in ({}, {"model": ""}, {"model": None}, {"model": 1}, []):
        assert running.post(path, body).status == 400
    assert running.post(path, {"model": "nope"}).status == 404
    assert running.get("/v1/models/fake").json["status"]["state"] == "ready"


def test_unknown_fields_are_told_or_refused(running: Running) -> None:
    reply = running.post("/v1/models/load", {"model": "fake", "extra": 1})
    assert reply.headers["x-localllm-ignored-fields"] == "extra"
    with serving(settings=ServerSettings(strict=True)) as strict:
        assert strict.post("/v1/models/unload", {"model": "fake", "extra": 1}).error["param"] == "extra"
        assert strict.get("/v1/models/fake").json["status"]["state"] == "ready"


def test_unloading_ends_requests_at_work_with_an_error(running: Running) -> None:
    replies: list[Any] = []
    body = {"prompt": "a", "max_tokens": 4000, "ignore_eos": True}
    asking = threading.Thread(target=lambda: replies.append(running.post("/v1/completions", body)))
    asking.start()
    wait_until(lambda: bool(running.worker.streams))
    assert running.post("/v1/models/unload", {"model": "fake"}).status == 200
    asking.join(20)
    assert (replies[0].status, replies[0].error["code"]) == (503, "worker_died")


@pytest.mark.parametrize(
    ("n_params", "text"),
    [(None, ""), (0, ""), (134_515_008, "134.5M"), (1_000_000, "1M"), (7_000_000_000, "7B"), (494_032_768, "494M")],
)
def test_numbers_of_parameters_read_as_in_names_of_models(n_params: int | None, text: str) -> None:
    assert parameter_size(n_params) == text
