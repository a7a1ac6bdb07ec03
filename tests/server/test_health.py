"""Whether the process answers, takes work, and its engines do it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import pytest

from localllm.server.state import ServerSettings
from localllm.worker.lifecycle import ModelState
from tests.fake_engine import fake_service
from tests.server.fakes import FakeSupervisor, FakeWorker, Running, serving


@pytest.fixture
def running() -> Iterator[Running]:
    with serving(FakeSupervisor(FakeWorker("fake", fake_service()), stored=["other"])) as server:
        yield server


def test_a_server_at_work_is_alive_ready_and_healthy(running: Running) -> None:
    assert running.get("/livez").json == {"status": "ok"}
    assert running.get("/readyz").json == {"status": "ok"}
    reply = running.get("/health")
    assert reply.status == 200
    assert reply.json == {
        "status": "ok",
        "models": [{"id": "fake", "state": "ready", "engine": "ok", "reason": None, "pid": 4242, "requests": 0}],
    }


def test_a_silent_engine_is_a_503_though_http_answers(running: Running) -> None:
    running.worker.answers_ping = False
    reply = running.get("/health")
    assert (reply.status, reply.json["status"], reply.error["code"]) == (503, "silent", "silent")
    assert reply.json["models"][0]["engine"] == "silent"
    assert int(reply.headers["retry-after"]) >= 1
    assert running.get("/livez").status == 200
    assert running.get("/v1/models").status == 200


def test_engines_are_asked_at_once_and_the_answer_comes_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(FakeWorker):
        async def ping(self, timeout_s: float) -> bool:
            await asyncio.sleep(timeout_s)
            return False

    with serving(FakeSupervisor(*(Slow(f"m{i}", fake_service()) for i in range(3)))) as running:
        started_s = time.monotonic()
        reply = running.get("/health")
        assert 0.9 < time.monotonic() - started_s < 2.5
        assert [model["engine"] for model in reply.json["models"]] == ["silent"] * 3


@pytest.mark.parametrize(
    ("state", "status", "word"),
    [
        (ModelState.READY, 200, "ok"),
        (ModelState.UNLOADED, 200, "ok"),  # by --keep-alive or a caller: it is loaded again on demand
        (ModelState.STOPPING, 200, "ok"),
        (ModelState.LOADING, 503, "loading"),
        (ModelState.RESTARTING, 503, "restarting"),
        (ModelState.FAILED, 503, "failed"),
        (ModelState.REFUSED, 503, "failed"),
    ],
)
def test_a_model_named_at_start_has_to_be_there(running: Running, state: ModelState, status: int, word: str) -> None:
    running.supervisor.set_state("fake", state)
    for path in ("/health", "/readyz"):
        reply = running.get(path)
        assert (reply.status, reply.json["status"]) == (status, word)
        if status == 503:
            assert reply.error["type"] == "unavailable_error"
            assert int(reply.headers["retry-after"]) >= 1
    assert running.get("/livez").status == 200


@pytest.mark.parametrize("state", [ModelState.FAILED, ModelState.REFUSED, ModelState.LOADING, ModelState.RESTARTING])
def test_models_that_nobody_named_do_not_make_the_server_ill(running: Running, state: ModelState) -> None:
    running.supervisor.set_state("other", state)
    reply = running.get("/health")
    assert (reply.status, running.get("/readyz").status) == (200, 200)
    assert [(model["id"], model["state"]) for model in reply.json["models"]][1] == ("other", state.value)


def test_a_stopping_server_is_alive_but_takes_no_work(running: Running) -> None:
    running.state.is_draining = True
    for path in ("/health", "/readyz"):
        reply = running.get(path)
        assert (reply.status, reply.json["status"], reply.error["code"]) == (503, "draining", "draining")
    assert running.get("/livez").status == 200
    running.state.is_draining = False


def test_without_a_model_named_at_start_the_server_is_ready() -> None:
    with serving(FakeSupervisor()) as running:
        assert running.get("/readyz").status == 200
        assert running.get("/health").json == {"status": "ok", "models": []}


def test_only_health_needs_the_key_and_the_others_name_no_model() -> None:
    supervisor = FakeSupervisor(FakeWorker("private-name", fake_service()))
    with serving(supervisor, ServerSettings(api_keys=(b"k",))) as running:
        supervisor.set_state("private-name", ModelState.FAILED)
        assert running.get("/health").status == 401
        assert running.get("/health", authorization="Bearer k").status == 503
        for path in ("/livez", "/readyz"):
            reply = running.get(path)
            assert reply.status == (200 if path == "/livez" else 503)
            assert b"private-name" not in reply.body


def test_other_methods_are_refused(running: Running) -> None:
    for path in ("/health", "/livez", "/readyz", "/metrics", "/v1/models", "/openapi.json"):
        reply = running.post(path, {})
        assert (reply.status, reply.error["code"]) == (405, "method_not_allowed")
        assert "GET" in reply.headers["allow"]
        assert running.request("HEAD", path).status == 200
