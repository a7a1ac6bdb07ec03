"""What waits to be written: all that RAM holds, what memory allows beside it, and never what follows a gap."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from localllm.runtime.config import RuntimeConfig, TierConfig
from localllm.runtime.kv import disk_queue
from localllm.runtime.kv.blocks import NO_ROOT, Block
from localllm.runtime.kv.disk_queue import Write, WriteQueue
from localllm.runtime.kv.survey import kept_tokens
from localllm.runtime.kv.tiers import Note, Tiers
from localllm.runtime.types import CompletionRequest
from tests.fake_engine import SPEC, fake_service
from tests.runtime.kv.disk_blocks import LONG_TOKENS, blob_of, block_of, chain_of, files_in, settle, tier, write
from tests.runtime.kv.memory_disk import MemoryDisk

N_BYTES = 4096
TOKENS = list(range(25 * 64))
PIN = Note(len(TOKENS), is_pinned=True)


@pytest.fixture(autouse=True)
def small_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_queue, "QUEUE_BYTES", 10_000)  # two blocks and a half


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Hold every write up until it is set."""
    gate, real = threading.Event(), os.fsync

    def slow(fd: int) -> None:
        if threading.current_thread().name == "localllm-kv-write":
            gate.wait(10)
        real(fd)

    monkeypatch.setattr(os, "fsync", slow)
    yield gate
    gate.set()


def _tiers(folder: Path, ram_bytes: int, disk: MemoryDisk | None = None) -> Tiers:
    config = TierConfig(ram_bytes=ram_bytes, disk_dir=str(folder), disk_bytes=1 << 30, flush_s=20)
    return Tiers(config, spec=SPEC, can_write_disk=True, disk=None if disk is None else disk.as_tier)


def _put(tiers: Tiers, note: Note = PIN) -> list[Block]:
    chain = tiers.blank(NO_ROOT).chain
    blocks = [chain.block(TOKENS, start, start + 64) for start in range(0, len(TOKENS), 64)]
    for block in blocks:
        tiers.put(block, blob_of(block), note)
    return blocks


def _n_written(folder: Path, blocks: list[Block]) -> int:
    """Return how many blocks lie on disk, all of which must be those of a beginning."""
    names = {path.name.partition(".")[0] for path in files_in(folder)}
    held = [block.key.hex() in names for block in blocks]
    assert held == sorted(held, reverse=True), "there is a gap"
    return sum(held)


def test_a_document_ten_times_the_queue_is_written_whole(tmp_path: Path, gate: threading.Event) -> None:
    tiers = _tiers(tmp_path / "kv", 1 << 20)
    blocks = _put(tiers)
    gate.set()
    tiers.close()
    assert _n_written(tmp_path / "kv", blocks) == len(blocks) == 25
    assert len(files_in(tmp_path, "*.pin.kv")) == 25
    assert kept_tokens(tiers, NO_ROOT, TOKENS)["disk"] == len(TOKENS)


@pytest.mark.parametrize(("n_ram_blocks", "n_least"), [(0, 2), (5, 5), (24, 24)])
def test_where_ram_is_too_small_a_beginning_is_written_and_nothing_behind_a_gap(
    tmp_path: Path, gate: threading.Event, n_ram_blocks: int, n_least: int
) -> None:
    tiers = _tiers(tmp_path / "kv", n_ram_blocks * N_BYTES)
    blocks = _put(tiers)
    gate.set()
    assert tiers.disk is not None
    settle(tiers.disk)
    for block in blocks[20:]:  # there is room for them now
        tiers.put(block, blob_of(block), PIN)
    tiers.close()
    assert n_least <= _n_written(tmp_path / "kv", blocks) < 25 or n_ram_blocks == 24


def test_what_ram_lets_go_of_waits_on_as_far_as_there_is_memory(tmp_path: Path, gate: threading.Event) -> None:
    tiers = _tiers(tmp_path / "kv", 1 << 20)
    blocks = _put(tiers, Note(LONG_TOKENS))
    disk = tiers.disk
    assert disk is not None
    assert disk.stats().waiting_bytes == 25 * N_BYTES
    tiers.limit_ram(10 * N_BYTES)
    assert disk.stats().waiting_bytes <= 13 * N_BYTES
    gate.set()
    tiers.close()
    assert _n_written(tmp_path / "kv", blocks) >= 10


def test_ram_gives_nothing_up_because_it_waits_to_be_written(tmp_path: Path, gate: threading.Event) -> None:
    """What only RAM holds is lost where it goes: it is no better lost for waiting."""
    disk = tier(tmp_path / "kv")
    block = block_of(1)
    disk.write(block, blob_of(block), prefix_tokens=LONG_TOKENS, is_second_use=True, is_shared=True)
    assert (disk.holds(block.key), disk.has_written(block.key)) == (True, False)
    gate.set()
    settle(disk)
    assert disk.has_written(block.key)
    disk.close(flush_s=1)


def test_a_block_larger_than_the_queue_waits_alone(tmp_path: Path) -> None:
    disk, (first, second) = tier(tmp_path / "kv"), (block_of(1), block_of(2))
    write(disk, first, n_bytes=50_000)
    write(disk, second, n_bytes=50_000)
    assert [disk.read(block) for block in (first, second)] == [blob_of(b, 50_000) for b in (first, second)]
    disk.close(flush_s=1)


def test_what_follows_a_block_that_was_not_taken_is_not_written(tmp_path: Path) -> None:
    disk, chain = tier(tmp_path / "kv"), chain_of(1, 4)
    write(disk, chain[0], *chain[2:])
    assert len(files_in(tmp_path)) == 1
    assert disk.stats().n_dropped == 2
    write(disk, *chain[1:])
    assert len(files_in(tmp_path)) == 4
    disk.close(flush_s=1)


def test_a_pin_keeps_the_place_of_what_waits_already(tmp_path: Path, gate: threading.Event) -> None:
    tiers = _tiers(tmp_path / "kv", 1 << 20)
    _put(tiers, Note(LONG_TOKENS))
    blocks = _put(tiers, PIN)
    gate.set()
    tiers.close()
    assert _n_written(tmp_path / "kv", blocks) == 25
    assert len(files_in(tmp_path, "*.pin.kv")) == 25
    assert len(files_in(tmp_path)) == 25


def test_pins_that_the_disk_did_not_take_are_offered_again(tmp_path: Path) -> None:
    for how in ("while it is waited for", "at the end"):
        disk = MemoryDisk()
        disk.takes = lambda block, is_second_use: False
        tiers = _tiers(tmp_path, 1 << 20, disk)
        blocks = _put(tiers)
        disk.takes = lambda block, is_second_use: True
        if how == "at the end":
            tiers.close()
        else:
            tiers.write_pins(float("inf"))
        assert [key for key, _, _ in disk.writes] == [block.key for block in blocks], how
        assert all(is_pinned for _, _, is_pinned in disk.writes)


def _write_of(number: int, *, is_shared: bool = False, is_pinned: bool = False, n_bytes: int = N_BYTES) -> Write:
    block = block_of(number)
    return Write(block, blob_of(block, n_bytes), LONG_TOKENS, is_pinned, is_shared=is_shared)


def test_bytes_are_counted_once_and_none_are_left() -> None:
    queue, shared, own = WriteQueue(), _write_of(1, is_shared=True), _write_of(2)
    for one in (shared, own, _write_of(3), _write_of(2, is_pinned=True)):
        queue.add(one)
    assert (len(queue), queue.waiting_bytes) == (3, 3 * N_BYTES)
    assert queue.has_room(_write_of(9, is_shared=True))
    assert not queue.has_room(_write_of(9))
    assert queue.unshare([shared.block.key]) == 1
    assert (shared.blob, queue.get(shared.block.key)) == (None, None)
    assert queue.take() is shared
    queue.done(shared)
    assert queue.take() is own
    assert own.is_pinned
    assert queue.drop(own.block.key)
    assert own.blob is not None, "it is being written"
    queue.done(own)
    assert queue.clear() == 1
    assert queue.take() is None
    assert queue.waiting_bytes == queue._own_bytes == 0


def test_a_document_is_warmed_whole_although_the_queue_holds_little_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_queue, "QUEUE_BYTES", 300)  # the fake engine's blocks are small
    tiers = TierConfig(ram_bytes=1 << 24, disk_dir=str(tmp_path / "kv"), disk_bytes=1 << 30, block_tokens=16)
    with fake_service(config=RuntimeConfig(tiers=tiers)) as service:
        warmed = service.warm(CompletionRequest("The harbour opens at nine and closes at six. " * 20))
        assert warmed.kept_tokens["disk"] == warmed.n_tokens > 400
        assert sum(path.stat().st_size for path in files_in(tmp_path, "*.pin.kv")) > 10 * 300


def test_what_is_to_be_pinned_while_it_is_written_comes_before_what_follows_it() -> None:
    queue, at_work, after, pinned = WriteQueue(), _write_of(1), _write_of(2), _write_of(1, is_pinned=True)
    queue.add(at_work)
    queue.add(after)
    assert queue.take() is at_work
    queue.add(pinned)
    queue.done(at_work)
    assert [queue.take(), queue.take()] == [pinned, after]
