"""The caches of a model in another process: asked over a worker's socket and over the private one, as in process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from localllm.errors import ServerUnreachable, UsageError
from localllm.runtime import events
from localllm.runtime.config import LoadConfig, RuntimeConfig, TierConfig
from localllm.runtime.kv.explain import Explanation
from localllm.runtime.stream import collect
from localllm.runtime.types import CompletionRequest, EmbeddingRequest, GenerationOptions
from localllm.worker import client
from localllm.worker.client import RemoteService
from localllm.worker.protocol import Call, Failed, Result, submit_frame
from tests.fake_engine import FakeEngine, fake_service
from tests.worker.local import listening, supervisor_of
from tests.worker.test_desk import Linked

CONFIG = RuntimeConfig(tiers=TierConfig(ram_bytes=1 << 20))
DOCUMENT = "Article 7: the harbour opens at nine. " * 4
QUESTION = CompletionRequest(DOCUMENT + "When?", GenerationOptions(max_tokens=4))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "model.gguf"


@pytest.fixture
def remote(file: Path) -> Iterator[RemoteService]:
    with listening(supervisor_of(file)) as local:
        service = client.attach(local.record, file, None)
        yield service
        service.close()


@pytest.fixture
def linked() -> Iterator[Callable[..., Linked]]:
    made: list[Linked] = []

    def make(*args: object, **settings: object) -> Linked:
        made.append(Linked(*args, **settings))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for each in made:
        each.close()


def argument(request: CompletionRequest | EmbeddingRequest) -> dict[str, object]:
    frame = submit_frame(0, request)
    return {"kind": frame.kind, "request": frame.request}


def test_whatever_a_model_is_loaded_with_its_caches_can_be_asked(file: Path) -> None:
    held = LoadConfig(ctx=1024, threads=3)
    with listening(supervisor_of(file, config=held)) as local:
        with pytest.raises(UsageError):
            client.attach(local.record, file, LoadConfig())
        with client.attach(local.record, file, None) as service:
            assert service.cache_stats().used_cells == 0


def test_an_explanation_is_that_of_the_service_itself(remote: RemoteService) -> None:
    with fake_service() as alone:
        for service in (alone, remote):
            assert service.explain(QUESTION).reason == "never_seen"
            collect(service.submit(QUESTION))
        told, wanted = remote.explain(QUESTION), alone.explain(QUESTION)
    assert isinstance(told, Explanation)
    assert told.known_tokens == wanted.known_tokens != {}
    assert (told.reason, told.message, told.diverges_at) == (wanted.reason, wanted.message, wanted.diverges_at)


def test_warming_tells_its_progress_and_serves_what_comes_after(remote: RemoteService) -> None:
    seen: list[events.Event] = []
    warmed = remote.warm(CompletionRequest(DOCUMENT), seen.append)
    assert any(isinstance(event, events.Admitted) for event in seen)
    assert warmed.n_computed_tokens == warmed.n_tokens == warmed.kept_tokens["device"]
    assert collect(remote.submit(QUESTION)).usage.cached_tokens["device"] == warmed.n_tokens


def test_counters_and_clearing_are_those_of_the_server(remote: RemoteService) -> None:
    collect(remote.submit(QUESTION))
    stats = remote.cache_stats()
    assert stats.retained_cells > 0
    assert stats.prompt_tokens["computed"] == len(remote.prompt_tokens(QUESTION))
    assert remote.clear_cache().n_device_cells == stats.retained_cells
    assert remote.cache_stats().retained_cells == 0
    assert remote.explain(QUESTION).n_held_tokens == 0


def test_what_refuses_a_prompt_refuses_its_explanation(remote: RemoteService) -> None:
    with pytest.raises(UsageError):
        remote.explain(EmbeddingRequest(("text",)))
    with pytest.raises(UsageError):
        remote.document(CompletionRequest("before", suffix="after"))


def test_a_server_that_is_gone_is_no_hang(remote: RemoteService) -> None:
    remote.close()
    with pytest.raises(ServerUnreachable):
        remote.explain(QUESTION)


@pytest.mark.parametrize("verb", ["explain", "document", "kept"])
def test_what_is_no_request_is_refused_by_name(verb: str, linked: Callable[..., Linked]) -> None:
    answer = linked().call(1, verb, {"kind": "chat", "request": {"messages": 5}})
    assert isinstance(answer, Failed)
    assert answer.code == "invalid_request"


def test_texts_to_embed_are_in_no_cache(linked: Callable[..., Linked]) -> None:
    for number, verb in enumerate(("explain", "document", "kept"), start=1):
        answer = linked().call(number, verb, argument(EmbeddingRequest(("text",))))
        assert isinstance(answer, Failed)
        assert answer.code == "invalid_request"


def test_who_asks_about_caches_delays_no_request_no_limit_and_no_counter(linked: Callable[..., Linked]) -> None:
    """The engine's thread is in a step that does not end: others are prepared and asked all the same."""
    goes_on = threading.Event()
    desk = linked(FakeEngine(on_forward=lambda batch: goes_on.wait(20)), config=CONFIG)
    try:
        desk.submit(1, CompletionRequest("first"))
        desk.wait(lambda: any(isinstance(event, events.Queued) for event in desk.events.get(1, [])))
        for number, verb in enumerate(("kept", *["explain"] * 5), start=2):
            desk.desk.take(Call(number, verb, argument(QUESTION)))
        assert desk.call(20, "limit_ram", {"limit_bytes": 1000}) == Result(20, None)
        told = desk.call(21, "cache_stats")
        assert isinstance(told, Result)
        assert told.value["ram_limit_bytes"] == 1000
        assert isinstance(desk.call(8, "tokenize", {"text": "hello"}), Result)
        assert isinstance(desk.call(9, "prompt_tokens", argument(QUESTION)), Result)
    finally:
        goes_on.set()
    assert isinstance(desk.call(10, "explain", argument(QUESTION)), Result)


def test_clearing_does_not_wait_behind_those_who_wait_for_the_disk(
    linked: Callable[..., Linked], monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on, desk = threading.Event(), linked(config=CONFIG)
    monkeypatch.setattr(desk.service, "kept", lambda request, wait_s: {"disk": int(goes_on.wait(20))})
    desk.desk.take(Call(1, "kept", argument(QUESTION)))
    desk.desk.take(Call(2, "kept", argument(QUESTION)))
    try:
        assert isinstance(desk.call(3, "clear_cache"), Result)
    finally:
        goes_on.set()
    assert isinstance(desk.call(4, "kept", argument(QUESTION)), Result)
