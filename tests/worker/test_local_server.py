"""The private socket: what is attached to what, what is relayed, and how every connection ends."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from localllm.errors import (
    ContextOverflow,
    LocalLLMError,
    ModelNotFound,
    ServerUnreachable,
    UsageError,
    WorkerDied,
)
from localllm.models.kv_types import KvTypes
from localllm.runtime import events
from localllm.runtime.config import LoadConfig
from localllm.runtime.stream import collect, rebuild
from localllm.runtime.types import ChatRequest, CompletionRequest, GenerationOptions
from localllm.worker import client, local_peer, local_server, registry
from localllm.worker.lifecycle import ModelState
from localllm.worker.protocol import VERSION, Attach, Call, Submit, pack, submit_frame
from tests.fake_engine import FakeEngine, fake_service
from tests.worker.local import Local, listening, supervisor_of

GREEDY = GenerationOptions(max_tokens=12, seed=1, sampling={"temperature": 0.0})


def asking(text: str = "hello", **options: object) -> CompletionRequest:
    return CompletionRequest(text, replace(GREEDY, **options))  # type: ignore[arg-type]


def eventually(holds: Callable[[], bool]) -> None:
    give_up_s = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < give_up_s, "it did not come about"
        time.sleep(0.005)


def endless() -> FakeEngine:
    return FakeEngine(script=lambda tokens: ord("x"), on_forward=lambda batch: time.sleep(0.002))


def raw(local: Local) -> socket.socket:
    """Return a connection that speaks bytes."""
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    peer.settimeout(10)
    peer.connect(str(local.record.socket))
    return peer


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "model.gguf"


def test_an_answer_is_the_same_as_in_process(file: Path) -> None:
    service = fake_service()
    wanted = collect(service.submit(asking()))
    service.close()
    with listening(supervisor_of(file)) as local, client.attach(local.record, file, LoadConfig()) as remote:
        got = collect(remote.submit(asking()))
        assert replace(got, usage=wanted.usage) == wanted
        assert got.usage.prompt_tokens == wanted.usage.prompt_tokens


def test_every_event_arrives_once_and_in_order(file: Path) -> None:
    with listening(supervisor_of(file)) as local, client.attach(local.record, file, LoadConfig()) as remote:
        kinds = [type(event).__name__ for event in remote.submit(asking())]
        assert [kinds[0], kinds[-2], kinds[-1]] == ["Queued", "Usage", "Done"]
        assert kinds.count("Done") == 1


def test_answers_share_a_connection(file: Path) -> None:
    with listening(supervisor_of(file)) as local, client.attach(local.record, file, LoadConfig()) as remote:
        streams = [remote.submit(asking(f"prompt {i}")) for i in range(4)]
        texts = [collect(stream).text for stream in streams]
        assert texts == [collect(remote.submit(asking(f"prompt {i}"))).text for i in range(4)]
        assert len(set(texts)) == 4


def test_the_model_is_described(file: Path) -> None:
    with listening(supervisor_of(file)) as local, client.attach(local.record, file, LoadConfig()) as remote:
        assert (remote.model.name, remote.model.path, remote.model.sha256) == ("fake", file, "f" * 64)
        assert (remote.model.info.architecture, remote.model.info.quant) == ("fake", "Q8_0")
        assert remote.can_chat
        assert remote.is_alive


def test_prompts_are_counted_by_the_worker(file: Path) -> None:
    chat = ChatRequest(({"role": "user", "content": "hi"},))
    with listening(supervisor_of(file)) as local, client.attach(local.record, file, LoadConfig()) as remote:
        assert remote.prompt_tokens(chat) == local.worker.service.prompt_tokens(chat)


def test_a_refusal_is_raised_as_in_process(file: Path) -> None:
    with listening(supervisor_of(file)) as local, client.attach(local.record, file, LoadConfig()) as remote:
        with pytest.raises(ContextOverflow):
            remote.submit(asking("x" * 10_000))
        with pytest.raises(UsageError):
            remote.submit(asking(stop=("",)))
        assert collect(remote.submit(asking())).text


def test_cancel_ends_the_work_and_the_stream(file: Path) -> None:
    supervisor = supervisor_of(file, endless())
    with listening(supervisor) as local, client.attach(local.record, file, LoadConfig()) as remote:
        stream = remote.submit(asking(max_tokens=4000))
        ends = []
        for event in stream:
            if isinstance(event, events.Token):
                stream.cancel()
            ends.append(event)
        assert isinstance(ends[-1], events.Done)
        assert [e.reason for e in ends if isinstance(e, events.Finished)] == ["cancelled"]
        eventually(lambda: local.call(lambda: local.server.n_streams) == 0)


@pytest.mark.parametrize("leave", ["close", "abort"])
def test_work_ends_with_its_connection(file: Path, leave: str) -> None:
    supervisor = supervisor_of(file, endless())
    with listening(supervisor) as local:
        remote = client.attach(local.record, file, LoadConfig())
        remote.submit(asking(max_tokens=4000))
        assert local.call(lambda: local.server.n_streams) == 1
        if leave == "close":
            remote.close()
        else:
            remote._exchange._connection.close()
        eventually(lambda: local.worker.streams[0].n_cancels > 0)
        eventually(lambda: local.call(lambda: local.server.n_streams) == 0)


def test_each_connection_is_a_client_of_its_own(file: Path) -> None:
    with listening(supervisor_of(file)) as local:
        for _ in range(2):
            with client.attach(local.record, file, LoadConfig()) as remote:
                collect(remote.submit(asking()))
        names = [request.options.client for request in local.worker.requests]
        assert len(set(names)) == 2
        assert all(name.startswith("local:") for name in names)


def test_the_same_file_by_another_name_is_the_same_model(file: Path, tmp_path: Path) -> None:
    (tmp_path / "link.gguf").symlink_to(file)
    with listening(supervisor_of(file)) as local:
        with client.attach(local.record, tmp_path / "link.gguf", LoadConfig()) as remote:
            assert (remote.model.name, remote.model.path) == ("fake", file)


@pytest.mark.parametrize(
    ("wished", "told"),
    [
        (LoadConfig(ctx=512), "ctx auto, not 512"),
        (LoadConfig(kv=KvTypes("q8_0", "q8_0")), "kv f16:f16, not q8_0:q8_0"),
        (LoadConfig(gpu="off", threads=3), "gpu auto, not off, threads auto, not 3"),
        (LoadConfig(flash_attn="on"), "flash_attn auto, not on"),
        (LoadConfig(template=Path("x.jinja")), "template auto, not "),
    ],
)
def test_other_load_settings_are_told_apart(file: Path, wished: LoadConfig, told: str) -> None:
    with listening(supervisor_of(file)) as local, pytest.raises(UsageError) as caught:
        client.attach(local.record, file, wished)
    assert told in caught.value.message


def test_settings_that_change_no_answer_do_not_matter(file: Path) -> None:
    held = LoadConfig(ctx=1024, parallel=8, retained=4)
    with listening(supervisor_of(file, config=held)) as local:
        with client.attach(local.record, file, LoadConfig(ctx=1024)) as remote:
            assert remote.model.name == "fake"


def test_a_template_counts_by_its_whole_path(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    held = LoadConfig(template=tmp_path / "t.jinja")
    with listening(supervisor_of(file, config=held)) as local:
        with client.attach(local.record, file, LoadConfig(template=Path("t.jinja"))) as remote:
            assert remote.model.name == "fake"


def test_a_model_that_is_not_ready_is_not_held(file: Path, tmp_path: Path) -> None:
    (tmp_path / "other.gguf").touch()
    supervisor = supervisor_of(file)
    with listening(supervisor) as local:
        with pytest.raises(ModelNotFound):
            client.attach(local.record, tmp_path / "other.gguf", LoadConfig())
        with pytest.raises(ModelNotFound):
            client.attach(local.record, tmp_path / "none.gguf", LoadConfig())
        local.call(supervisor.set_state, "fake", ModelState.LOADING)
        with pytest.raises(ModelNotFound):
            client.attach(local.record, file, LoadConfig())


def test_a_file_that_changed_since_it_was_loaded_is_another_model(file: Path) -> None:
    supervisor = supervisor_of(file)
    with listening(supervisor) as local:
        supervisor.is_changed = True
        with pytest.raises(ModelNotFound):
            client.attach(local.record, file, LoadConfig())
        assert client.call(local.record, "ps")[0]["is_changed"]


def test_a_draining_server_takes_nothing_new(file: Path) -> None:
    with listening(supervisor_of(file, endless())) as local, client.attach(local.record, file, LoadConfig()) as remote:
        at_work = remote.submit(asking(max_tokens=40))
        local.call(local.server.begin_drain)
        with pytest.raises(LocalLLMError) as refused:
            remote.submit(asking())
        assert (refused.value.code, "stopping" in refused.value.message) == ("draining", True)
        with pytest.raises(LocalLLMError, match="stopping"):
            client.attach(local.record, file, LoadConfig())
        assert collect(at_work).choices[0].finish_reason == "length"


def test_what_is_cut_ends_with_an_error_event(file: Path) -> None:
    with listening(supervisor_of(file, endless())) as local, client.attach(local.record, file, LoadConfig()) as remote:
        stream = remote.submit(asking(max_tokens=4000))
        local.run(local.server.close())
        ending = list(stream)[-1]
        assert isinstance(ending, events.Error)
        assert ending.code == "draining"
        assert local.worker.streams[0].n_cancels > 0
        eventually(lambda: not remote.is_alive)
        with pytest.raises(ServerUnreachable):
            remote.submit(asking())


def test_a_workers_death_is_an_error_event_and_the_connection_lives(file: Path) -> None:
    supervisor = supervisor_of(file, endless())
    with listening(supervisor) as local, client.attach(local.record, file, LoadConfig()) as remote:
        stream = remote.submit(asking(max_tokens=4000))
        local.call(local.worker.die)
        ending = list(stream)[-1]
        assert isinstance(ending, events.Error)
        assert isinstance(rebuild(ending), WorkerDied)
        local.worker.is_alive = True  # it was started again
        assert remote.is_alive
        assert collect(remote.submit(asking())).text


def test_a_server_that_dies_ends_every_stream_and_call(file: Path) -> None:
    with listening(supervisor_of(file, endless())) as local:
        remote = client.attach(local.record, file, LoadConfig())
        stream = remote.submit(asking(max_tokens=4000))
        local.call(lambda: [peer._writer.transport.abort() for peer in local.server._peers])
        ending = list(stream)[-1]
        assert isinstance(ending, events.Error)
        assert (ending.code, "--no-server" in ending.hint) == ("server_unreachable", True)
        for ask in (remote.submit, remote.prompt_tokens):
            with pytest.raises(ServerUnreachable):
                ask(asking())
        remote.close()


def test_a_request_that_waits_for_its_model_can_be_cancelled(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import asyncio

    supervisor = supervisor_of(file, endless())
    go = threading.Event()
    found = supervisor.worker

    async def slowly(name: str | None, wait_s: float = 15.0) -> object:
        await asyncio.to_thread(go.wait, 10)
        return await found(name)

    monkeypatch.setattr(supervisor, "worker", slowly)
    with listening(supervisor) as local:
        peer = raw(local)
        peer.sendall(pack(Attach(VERSION, str(file), local.worker.model["config"])))
        peer.sendall(pack(submit_frame(1, asking(max_tokens=4000))))
        from localllm.worker.protocol import Cancel

        peer.sendall(pack(Cancel(1)))
        eventually(lambda: local.call(lambda: any(p._cancelled for p in local.server._peers)))
        go.set()
        eventually(lambda: local.call(lambda: local.server.n_streams) == 0)
        assert local.worker.streams[0].n_cancels > 0
        peer.close()


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff\xff\xff\xff",
        b"\x05\x00\x00\x00hello",
        pack(Call(1, "ps")),
        pack(Attach(VERSION)) + b"\x05\x00\x00\x00hello",
        pack(Attach(VERSION)) + pack(Attach(VERSION)),
        pack(Attach(VERSION)) + pack(Submit(1, "nonsense", {})),
        pack(Attach(VERSION)) + pack(Submit(1, "chat", {"messages": 3})),
    ],
)
def test_what_is_no_frame_ends_the_connection_alone(file: Path, data: bytes) -> None:
    with listening(supervisor_of(file)) as local:
        with raw(local) as peer:
            peer.sendall(data)
            while peer.recv(4096):
                pass
        assert client.call(local.record, "ps")


def test_a_request_without_a_model_is_refused(file: Path) -> None:
    with listening(supervisor_of(file)) as local:
        connection, model = client.Connection.open(local.record, Attach(VERSION), 5.0)
        assert model == {}
        held = {**local.worker.model, "is_cache_shared": True}
        with client.RemoteService(local.record, connection, held) as remote:
            with pytest.raises(UsageError):
                remote.submit(asking())


def test_another_version_is_refused(file: Path) -> None:
    with listening(supervisor_of(file)) as local, pytest.raises(UsageError, match="version"):
        client.Connection.open(local.record, Attach(VERSION + 1), 5.0)


def test_who_says_nothing_is_dropped(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_peer, "ATTACH_TIMEOUT_S", 0.05)
    with listening(supervisor_of(file)) as local, raw(local) as peer:
        assert peer.recv(1) == b""


def test_who_reads_nothing_is_dropped_and_its_work_ends(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_peer, "READER_TIMEOUT_S", 0.1)
    supervisor = supervisor_of(file, FakeEngine(script=lambda tokens: ord("x")))
    with listening(supervisor) as local, raw(local) as peer:
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        peer.sendall(pack(Attach(VERSION, str(file), local.worker.model["config"])))
        for number in range(1, 9):
            peer.sendall(pack(submit_frame(number, asking(f"{number}", max_tokens=1500, logprobs=20))))
        eventually(lambda: len(local.worker.streams) == 8)
        eventually(lambda: local.call(lambda: local.server.n_streams) == 0)
        assert local.call(lambda: local.server.n_streams) == 0


def test_too_many_connections_are_turned_away(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_server, "MAX_CONNECTIONS", 1)
    with listening(supervisor_of(file)) as local, client.attach(local.record, file, LoadConfig()):
        with pytest.raises(ServerUnreachable):
            client.call(local.record, "ps")


def test_calls_are_answered(file: Path) -> None:
    supervisor = supervisor_of(file)
    with listening(supervisor) as local:
        (entry,) = client.call(local.record, "ps")
        assert (entry["name"], entry["state"], entry["path"], entry["pid"]) == ("fake", "ready", str(file), 4242)
        assert client.call(local.record, "unload", {"name": "fake"})["state"] == "unloaded"
        assert client.call(local.record, "load", {"name": "fake"})["state"] == "ready"
        assert local.stops == []
        assert client.call(local.record, "stop") == {"pid": os.getpid()}
        assert local.stops == ["stop"]


@pytest.mark.parametrize(
    ("verb", "argument", "kind"),
    [
        ("load", {"name": "none"}, ModelNotFound),
        ("load", None, UsageError),
        ("unload", {"name": 3}, UsageError),
        ("nonsense", None, UsageError),
        ("tokenize", {"text": "x"}, UsageError),
        ("suspects", {"lone": [], "refused": []}, UsageError),
    ],
)
def test_calls_that_cannot_be_answered_say_why(
    file: Path, verb: str, argument: object, kind: type[LocalLLMError]
) -> None:
    with listening(supervisor_of(file)) as local, pytest.raises(kind):
        client.call(local.record, verb, argument)


def test_a_server_that_does_not_answer_is_no_hang(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "ATTACH_TIMEOUT_S", 0.1)
    with listening(supervisor_of(file)) as local:
        go = threading.Event()
        local.loop.call_soon_threadsafe(go.wait, 10)
        try:
            with pytest.raises(LocalLLMError) as caught:
                client.attach(local.record, file, LoadConfig())
            assert caught.value.code == "timeout"
        finally:
            go.set()


def test_a_server_that_breaks_off_a_call_is_unreachable(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def break_off(self: local_peer.Peer, call: Call) -> None:
        self._writer.transport.abort()

    monkeypatch.setattr(local_peer.Peer, "_called", break_off)
    with listening(supervisor_of(file)) as local, pytest.raises(ServerUnreachable):
        client.call(local.record, "ps")


def test_nothing_is_left_where_the_start_fails(file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(url: str, path: Path) -> registry.Registration:
        raise UsageError("no")

    monkeypatch.setattr(registry, "register", refuse)
    path = tmp_path / "p.sock"
    with pytest.raises(UsageError, match="no"):
        with listening(supervisor_of(file), path):
            pass
    assert not path.exists()


def test_a_socket_that_another_server_put_in_its_place_is_left(file: Path, tmp_path: Path) -> None:
    path = tmp_path / "p.sock"
    with listening(supervisor_of(file), path) as local:
        path.unlink()
        path.write_text("another's")
        local.run(local.server.close())
        assert path.read_text() == "another's"
        path.unlink()
