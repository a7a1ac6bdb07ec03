"""The trace file: private, whole lines at once, and none of what was written in it."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from localllm.bench.record.keeper import Keeper, Seen
from localllm.bench.workloads.replay import replay
from localllm.bench.workloads.trace import read_trace
from localllm.errors import UsageError
from tests.bench.client.stand_in import Reply
from tests.bench.client.stand_in import Seen as Asked
from tests.bench.record.recording import CHAT, TEXT, Recording, record
from tests.bench.workloads.test_filler_body import Canaries, canary_body


def seen(body: bytes = b'{"messages": [{"role": "user", "content": "A secret"}]}') -> Seen:
    answer = (
        b'{"choices":[{"index":0,"message":{"content":"x"},"finish_reason":"stop"}],"usage":{"completion_tokens":4}}'
    )
    return Seen(1.0, CHAT, body, 200, answer=[answer], is_whole=True, ended="answer", ended_s=2.5)


def test_the_file_is_private_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        Keeper(tmp_path / "trace").close()
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "trace").stat().st_mode) == 0o600


@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_what_is_there_is_not_written_over(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "trace"
    if kind == "file":
        path.write_text("mine")
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(tmp_path / "else")
    with pytest.raises(UsageError, match="is there already"):
        Keeper(path)
    assert not (tmp_path / "else").exists()


def test_a_place_that_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="There is no folder") as missing:
        Keeper(tmp_path / "none" / "trace")
    assert missing.value.hint == f"mkdir -p {tmp_path / 'none'}"
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be written: Not a directory"):
        Keeper(tmp_path / "file" / "trace")


def test_lines_are_there_as_soon_as_they_are_kept(tmp_path: Path) -> None:
    counts: list[int] = []
    keeper = Keeper(tmp_path / "trace", on_kept=counts.append)
    assert read_trace(tmp_path / "trace").requests == ()
    keeper.keep(seen())
    keeper.close()
    keeper.close()
    (kept,) = read_trace(tmp_path / "trace").requests
    assert (kept.at_s, kept.duration_s, kept.completion_tokens, kept.ended) == (1.0, 1.5, 4, "answer")
    assert counts == [1]
    assert b"secret" not in (tmp_path / "trace").read_bytes()


def test_keep_text_keeps_the_body_as_it_was(tmp_path: Path) -> None:
    keeper = Keeper(tmp_path / "trace", keeps_text=True)
    keeper.keep(seen(b'{"messages": [{"role": "user", "content": "A secret"}], "model": "m", "own": 1}'))
    keeper.close()
    trace = read_trace(tmp_path / "trace")
    assert trace.header.texts == "kept"
    assert trace.requests[0].body == {
        "messages": [{"role": "user", "content": "A secret"}],
        "model": "m",
        "own": 1,
    }


def test_a_full_disk_stops_the_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keeper = Keeper(tmp_path / "trace")

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    keeper.keep(seen())
    keeper.keep(seen())
    keeper.close()
    assert (keeper.failure, keeper.n_kept) == ("No space left on device", 0)


def test_two_recordings_share_no_filler(tmp_path: Path) -> None:
    bodies = []
    for name in ("one", "two"):
        keeper = Keeper(tmp_path / name)
        keeper.keep(seen(json.dumps({"prompt": "the lantern of the harbour stood in the fog all night"}).encode()))
        keeper.close()
        bodies.append(read_trace(tmp_path / name).requests[0].body["prompt"])
    assert bodies[0] != bodies[1]


def test_no_canary_of_requests_and_answers_reaches_the_file(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    new = Canaries()

    async def script(asked: Asked, reply: Reply) -> None:
        own = f"x-own: {new()}"
        if b'"refuse"' in asked.body:
            await reply.json({"error": {"message": new(), "code": new()}}, "400 Bad", [own])
        elif b'"cut"' in asked.body:
            await reply.begin_stream()
            await reply.text(new())
            reply.writer.close()
        elif b'"stream": true' in asked.body:
            await reply.begin_stream()
            await reply.event({"id": new(), "choices": [{"delta": {"content": new(), "reasoning": new()}}]})
            await reply.event({"choices": [{"delta": {"tool_calls": [{"function": {"name": new()}}]}}], new(): new()})
            await reply.finish(new())
            await reply.end_stream(usage={"prompt_tokens": 3, "completion_tokens": 2, new(): new()})
        else:
            message = {"content": new(), "reasoning_content": new()}
            choice = {"index": 0, "message": message, "finish_reason": new(), "text": new()}
            await reply.json({"id": new(), "choices": [choice], "model": new()}, "200 OK", [own])

    async def work(running: Recording) -> None:
        n_sent = 0
        for more in ({}, {"stream": False}, {"user": "refuse"}, {"user": "cut"}):
            for path in (CHAT, TEXT):
                headers = (f"authorization: Bearer {new()}", f"x-own: {new()}", f"cookie: {new()}")
                request = running.request({**canary_body(new), **more}, f"{path}?{new()}={new()}", *headers)
                await running.exchange(request)
                n_sent += 1
        await running.exchange(running.request(f'{{"prompt": "{new()}'.encode(), TEXT))
        await running.exchange(running.get(f"/v1/models/{new()}"))
        await running.exchange(running.request({"prompt": new()}, f"/v1/embeddings/{new()}"))
        assert len(await running.kept(n_sent)) == n_sent

    record(tmp_path / "trace", script, work)
    out, err = capfd.readouterr()
    assert len(new.words) > 500
    assert new.found_in((tmp_path / "trace").read_text() + out + err) == []
    assert list(temporary.iterdir()) == []


def test_what_was_recorded_can_be_replayed(tmp_path: Path) -> None:
    async def script(asked: Asked, reply: Reply) -> None:
        await reply.begin_stream()
        await reply.text("a")
        await reply.text("b")
        await reply.finish()
        await reply.end_stream()

    async def work(running: Recording) -> None:
        system = {"role": "system", "content": "You are a keeper of harbours."}
        for question in ("First question", "Second question"):
            body = {"messages": [system, {"role": "user", "content": question}], "stream": True}
            await running.exchange(running.request(body))
        await running.kept(2)

    record(tmp_path / "trace", script, work)
    workload = replay(tmp_path / "trace")
    first, second = [session[0] for session in workload.sessions(1)]
    assert first.messages[0] == second.messages[0]
    assert first.messages[1] != second.messages[1]
    assert first.max_tokens == 2
    assert second.at_s is not None
    assert second.at_s > 0
    assert workload.facts["shared_prefix_share"] > 0.25
