"""The downloader against a server that cuts, stalls, lies, redirects and changes its mind."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from localllm.errors import DownloadFailed, HashMismatch, LocalLLMError, ModelNotFound
from localllm.models.disk import files
from localllm.models.reference import HubRef
from localllm.models.sources import download, pulling
from localllm.models.sources.download import Patience
from localllm.models.sources.hub import HubSource
from localllm.models.sources.partial import Expected, Partial
from localllm.models.sources.progress import Phase, PullProgress
from localllm.models.store import Store
from tests.failing import FailingCalls
from tests.fake_hub import FakeHub, Fault, gguf_bytes
from tests.models.sources.conftest import DATA, REPO

Make = Callable[..., HubSource]
SHA256 = hashlib.sha256(DATA).hexdigest()


def stored_bytes(store: Store) -> bytes:
    (model,) = store.list()
    assert model.problem == ""
    return model.path.read_bytes()


def leftovers(store: Store) -> list[str]:
    return sorted(path.name for path in store.partial.rglob("*") if path.is_file())


def test_a_plain_pull_fetches_every_byte_once(hub: FakeHub, store: Store, source: Make) -> None:
    model = pulling.run(source(), store, None)
    assert model.path.read_bytes() == DATA
    assert (model.sha256, model.size_bytes, model.quant) == (SHA256, len(DATA), "Q4_K_M")
    assert (model.license, model.revision, model.source) == ("apache-2.0", hub.commit(REPO), f"hf:{REPO}")
    assert hub.sent_bytes() == len(DATA)
    assert [one.path.split("?")[0] for one in hub.of("api")] == [f"/api/models/{REPO}"]


def test_a_second_pull_asks_the_hub_and_fetches_nothing(hub: FakeHub, store: Store, source: Make) -> None:
    pulling.run(source(), store, None)
    again = pulling.run(source(), store, None)
    assert again.sha256 == SHA256
    assert hub.sent_bytes() == len(DATA)


@pytest.mark.parametrize("at", [0, 1, 4096, 300_000, len(DATA) - 1])
def test_a_cut_is_resumed_where_it_was(hub: FakeHub, store: Store, source: Make, at: int) -> None:
    hub.faults["cdn"] = [Fault("cut", at=at)]
    pulling.run(source(), store, None)
    assert stored_bytes(store) == DATA
    assert hub.sent_bytes() == len(DATA)


def test_a_hundred_cuts_at_random_bytes_lose_nothing(hub: FakeHub, store: Store, source: Make) -> None:
    rng = random.Random(7)
    hub.faults["cdn"] = [Fault("cut", at=rng.randrange(1, 12_000)) for _ in range(100)]
    pulling.run(source(), store, None)
    assert stored_bytes(store) == DATA
    assert hub.sent_bytes() == len(DATA)
    assert len(hub.of("cdn")) > 50


@pytest.mark.parametrize(
    "fault",
    [
        Fault("stall", at=200_000, seconds=1.0),
        Fault("status", status=429, headers={"Retry-After": "7"}),
        Fault("status", status=503),
        Fault("status", status=500),
        Fault("long"),
    ],
    ids=lambda fault: f"{fault.kind}-{fault.status}",
)
def test_trouble_that_passes_is_waited_out(hub: FakeHub, store: Store, source: Make, fault: Fault) -> None:
    waits: list[float] = []
    hub.faults["cdn"] = [fault]
    if fault.kind == "long":
        with pytest.raises(DownloadFailed, match="bytes"):
            pulling.run(source(), store, None)
        return
    pulling.run(source(sleep=waits.append), store, None)
    assert stored_bytes(store) == DATA
    assert len(waits) == 1
    assert waits[0] >= (7 if fault.status == 429 else 0.3)


def test_trouble_that_stays_ends_with_a_sentence_and_is_resumed(hub: FakeHub, store: Store, source: Make) -> None:
    hub.faults["cdn"] = [Fault("cut", at=300_000)] + [Fault("status", status=503)] * 10
    with pytest.raises(DownloadFailed, match="503, 4 times in a row") as caught:
        pulling.run(source(), store, None)
    assert "resume" in caught.value.hint
    hub.faults["cdn"] = []
    sent = hub.sent_bytes()
    pulling.run(source(), store, None)
    assert stored_bytes(store) == DATA
    assert hub.sent_bytes() - sent == len(DATA) - 300_000


@pytest.mark.parametrize("kind", ["ignore_range", "new_etag", "wrong_etag", "wrong_range"])
def test_a_server_that_changes_its_mind_makes_it_begin_again(
    hub: FakeHub, store: Store, source: Make, kind: str
) -> None:
    hub.faults["cdn"] = [Fault("cut", at=200_000), Fault(kind)]
    pulling.run(source(), store, None)
    assert stored_bytes(store) == DATA
    assert hub.of("cdn")[1].headers["range"] == "bytes=200000-"
    assert hub.of("cdn")[1].headers["if-range"].startswith('"')


def test_a_server_that_never_keeps_to_the_range_is_given_up(hub: FakeHub, store: Store, source: Make) -> None:
    hub.faults["cdn"] = [Fault("cut", at=200_000)] + [Fault("wrong_etag"), Fault("cut", at=200_000)] * 9
    with pytest.raises(DownloadFailed, match="changed on the server"):
        pulling.run(source(), store, None)


@pytest.mark.parametrize("at", [0, 1000, len(DATA) - 1])
def test_a_flipped_byte_never_becomes_a_model(hub: FakeHub, store: Store, source: Make, at: int) -> None:
    hub.faults["cdn"] = [Fault("flip", at=at)]
    with pytest.raises(HashMismatch) as caught:
        pulling.run(source(), store, None)
    assert caught.value.exit_code == 8
    assert SHA256 in caught.value.message
    assert store.list() == []
    assert leftovers(store) == ["model-Q4_K_M.gguf.bad"]
    pulling.run(source(), store, None)
    assert stored_bytes(store) == DATA
    assert leftovers(store) == []


@pytest.mark.parametrize("kind", ["gzip", "short", "extra"])
def test_a_body_that_cannot_be_right_is_refused(hub: FakeHub, store: Store, source: Make, kind: str) -> None:
    hub.faults["cdn"] = [Fault(kind)]
    with pytest.raises(DownloadFailed):
        pulling.run(source(), store, None)
    assert store.list() == []


@pytest.mark.parametrize(("status", "error"), [(401, ModelNotFound), (404, ModelNotFound), (418, DownloadFailed)])
@pytest.mark.parametrize("place", ["api", "resolve", "cdn"])
def test_a_final_answer_is_told_and_not_tried_again(
    hub: FakeHub, store: Store, source: Make, status: int, error: type[LocalLLMError], place: str
) -> None:
    hub.faults[place] = [Fault("status", status=status)] * 9
    with pytest.raises(error) as caught:
        pulling.run(source(), store, None)
    assert len(hub.of(place)) == 1
    assert status != 401 or "HF_TOKEN" in caught.value.hint


def test_a_prefix_that_rotted_on_disk_is_fetched_again(hub: FakeHub, store: Store, source: Make) -> None:
    hub.faults["cdn"] = [Fault("cut", at=300_000)] + [Fault("status", status=503)] * 9
    with pytest.raises(DownloadFailed):
        pulling.run(source(), store, None)
    hub.faults["cdn"] = []
    (part,) = store.partial.rglob("*.part")
    rotten = bytearray(part.read_bytes())
    rotten[100] ^= 1
    part.write_bytes(rotten)
    pulling.run(source(), store, None)
    assert stored_bytes(store) == DATA


@pytest.mark.parametrize("damage", ["truncate", "garbage", "folder", "link", "other file"])
def test_a_damaged_record_of_a_partial_costs_bytes_only(
    hub: FakeHub, store: Store, source: Make, tmp_path: Path, damage: str
) -> None:
    hub.faults["cdn"] = [Fault("cut", at=300_000)] + [Fault("status", status=503)] * 9
    with pytest.raises(DownloadFailed):
        pulling.run(source(), store, None)
    hub.faults["cdn"] = []
    (record,) = store.partial.rglob("*.part.json")
    content = record.read_bytes()
    record.unlink()
    outside = tmp_path / "outside"
    outside.write_bytes(content)
    if damage == "truncate":
        record.write_bytes(content[:50])
    elif damage == "garbage":
        record.write_bytes(b"\xff\x00" * 400)
    elif damage == "folder":
        record.mkdir()
    elif damage == "link":
        record.symlink_to(outside)
    else:
        record.write_bytes(content.replace(b'"done": 300000', b'"done": 600000'))
    pulling.run(source(), store, None)
    assert stored_bytes(store) == DATA
    assert outside.read_bytes() == content


def test_a_preallocated_partial_does_not_count_as_progress(hub: FakeHub, store: Store, source: Make) -> None:
    staging = store.staging(HubRef(REPO).name)
    (staging / "model-Q4_K_M.gguf.part").write_bytes(b"\0" * len(DATA))
    (staging / "model-Q4_K_M.gguf").write_bytes(b"")
    pulling.run(source(), store, None)
    assert stored_bytes(store) == DATA


def test_a_link_planted_as_the_partial_is_not_written_through(
    hub: FakeHub, store: Store, source: Make, tmp_path: Path
) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    staging = store.staging(HubRef(REPO).name)
    (staging / "model-Q4_K_M.gguf.part").symlink_to(victim)
    (staging / "model-Q4_K_M.gguf").symlink_to(victim)
    pulling.run(source(), store, None)
    assert stored_bytes(store) == DATA
    assert victim.read_bytes() == b"precious"


def test_progress_never_goes_backwards(hub: FakeHub, store: Store, source: Make) -> None:
    seen: list[PullProgress] = []
    hub.faults["cdn"] = [Fault("cut", at=400_000), Fault("ignore_range"), Fault("cut", at=100_000)]
    pulling.run(source(), store, seen.append)
    fetching = [one.done_bytes for one in seen if one.phase in (Phase.FETCHING, Phase.RETRYING)]
    assert fetching == sorted(fetching)
    assert fetching[-1] == len(DATA)
    assert {one.total_bytes for one in seen if one.phase is Phase.FETCHING} == {len(DATA)}
    assert any(one.phase is Phase.RETRYING and one.note for one in seen)


def test_an_interrupt_leaves_what_arrived_for_the_next_pull(hub: FakeHub, store: Store, source: Make) -> None:
    def interrupt(progress: PullProgress) -> None:
        if progress.done_bytes >= 300_000:
            raise KeyboardInterrupt

    hub.bytes_per_s = 3e6
    with pytest.raises(KeyboardInterrupt):
        pulling.run(source(), store, interrupt)
    hub.bytes_per_s = 0.0
    pulling.run(source(), store, None)
    assert stored_bytes(store) == DATA
    resumed = hub.of("cdn")[-1]
    assert int(resumed.headers["range"].removeprefix("bytes=").rstrip("-")) >= 300_000


def test_a_disk_without_room_is_told_before_anything_is_fetched(
    hub: FakeHub, store: Store, source: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(download.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(DownloadFailed, match="GB are free"):
        pulling.run(source(), store, None)
    assert hub.sent_bytes() == 0


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_disk_that_fills_up_leaves_a_partial_that_is_resumed(
    hub: FakeHub, store: Store, source: Make, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    room = 300_000
    real = os.write

    def full(fd: int, data: bytes) -> int:
        nonlocal room
        if len(data) > room:
            raise OSError(code, os.strerror(code))
        room -= len(data)
        return real(fd, data)

    with monkeypatch.context() as patch:
        patch.setattr(files.os, "write", full)
        with pytest.raises(DownloadFailed, match=r"disk under .* is full"):
            pulling.run(source(), store, None)
    assert store.list() == []
    pulling.run(source(), store, None)
    assert stored_bytes(store) == DATA
    assert hub.of("cdn")[-1].headers.get("range")


def test_every_failing_write_fsync_and_rename_leaves_the_old_or_the_new(
    hub: FakeHub, store: Store, source: Make
) -> None:
    """The k-th file operation fails, for every k: nothing half-made is listed, and the next pull completes."""
    tried, calls = 0, FailingCalls()
    once = source(patience=Patience(chunk_bytes=1 << 17))  # it asks the hub once, then only fetches
    for fail_at in range(1, 200):
        with (
            calls.at(fail_at, "write", "fsync", "replace", "rename", "ftruncate"),
            contextlib.suppress(DownloadFailed),  # a sentence; anything else fails the test
        ):
            pulling.run(once, store, None)
        if calls.n_calls < fail_at:
            break
        tried += 1
        for model in store.list():
            assert model.problem == ""
            assert model.path.read_bytes() == DATA
        pulling.run(once, store, None)
        assert stored_bytes(store) == DATA
        store.remove(HubRef(REPO).name)
        assert store.list() == []
    assert tried > 15


def test_a_split_set_is_fetched_whole_and_published_at_once(hub: FakeHub, store: Store, source: Make) -> None:
    parts = {f"Q8_0/big-Q8_0-0000{n}-of-00003.gguf": gguf_bytes(100_000 * n, seed=n) for n in (1, 2, 3)}
    hub.add("org/big-GGUF", parts)
    ref = HubRef("org/big-GGUF", quant="Q8_0")
    hub.faults["cdn"] = [Fault("cut", at=10**9), Fault("status", status=418)]
    with pytest.raises(DownloadFailed):
        pulling.run(source(ref), store, None)
    assert store.list() == []
    model = pulling.run(source(ref), store, None)
    assert [path.read_bytes() for path in model.files] == list(parts.values())
    assert model.path == model.files[0]
    assert hub.sent_bytes() == sum(len(data) for data in parts.values())
    assert pulling.run(source(ref), store, None).sha256 == model.sha256


def test_a_file_outside_lfs_is_checked_by_its_git_hash(hub: FakeHub, store: Store, source: Make) -> None:
    hub.add("org/plain", {"m.gguf": DATA}, plain=True)
    pulling.run(source(HubRef("org/plain")), store, None)
    assert stored_bytes(store) == DATA
    hub.add("org/plain2", {"m.gguf": DATA}, plain=True)
    hub.faults["cdn"] = [Fault("flip", at=99)]
    with pytest.raises(HashMismatch):
        pulling.run(source(HubRef("org/plain2")), store, None)


def test_a_store_that_cannot_be_made_is_a_sentence(hub: FakeHub, tmp_path: Path, source: Make) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DownloadFailed, match="could not be written under"):
        pulling.run(source(), Store(tmp_path / "file" / "store"), None)
    assert hub.requests == []


def test_a_partial_of_another_file_is_never_continued(tmp_path: Path) -> None:
    first = Partial(tmp_path / "m.gguf", Expected(100, sha256="a" * 64), lambda _: None)
    first.write(b"x" * 50)
    first.close()
    same = Partial(tmp_path / "m.gguf", Expected(100, sha256="a" * 64), lambda _: None)
    assert same.done == 50
    same.close()
    other = Partial(tmp_path / "m.gguf", Expected(100, sha256="b" * 64), lambda _: None)
    assert other.done == 0
    other.close()
