"""The disk tier: what is written is read again, by anyone; what is wrong is never believed and never an error."""

from __future__ import annotations

import errno
import os
import stat
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from localllm.runtime.kv import disk_files, disk_queue, disk_writer
from localllm.runtime.kv.blocks import Block
from localllm.runtime.kv.disk import DiskTier
from localllm.runtime.kv.disk_index import Found
from localllm.runtime.kv.disk_room import Deleted
from tests.runtime.kv.disk_blocks import LONG_TOKENS, ROOT, blob_of, block_of, chain_of, files_in, settle, tier, write


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kv"


@pytest.fixture
def disk(folder: Path) -> Iterator[DiskTier]:
    disk = tier(folder)
    yield disk
    disk.close(flush_s=1)


def read_anew(folder: Path, block: Block) -> bytes | None:
    """Read a block as another process would."""
    other = tier(folder)
    try:
        found = other.find(block.parent, block.key)
        return None if found is None else other.read(found)
    finally:
        other.close(flush_s=0)


def test_a_block_comes_back_as_it_was_also_after_a_restart(folder: Path, disk: DiskTier) -> None:
    first = block_of(0)
    block = replace(block_of(1, first.key, 640), is_bare=True)
    write(disk, first, block)
    other = tier(folder)
    assert list(other.children(first.key)) == [block]
    assert other.read(block) == blob_of(block)
    assert other.secret == disk.secret
    other.close(flush_s=0)


def test_what_waits_to_be_written_is_held_already(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, block, gate = tier(folder), block_of(1), threading.Event()
    monkeypatch.setattr(os, "fsync", lambda fd: gate.wait(10))
    assert disk.write(block, blob_of(block), prefix_tokens=LONG_TOKENS, is_second_use=False)
    assert disk.holds(block.key)
    assert disk.read(block) == blob_of(block)
    gate.set()
    disk.close(flush_s=5)
    assert read_anew(folder, block) == blob_of(block)


def test_other_processes_files_are_seen_and_those_they_delete_are_missed(folder: Path, disk: DiskTier) -> None:
    first, second, other = block_of(1), block_of(2), tier(folder)
    write(disk, first)
    assert set(other.children(ROOT)) == {first}
    write(disk, second)
    assert set(other.children(ROOT)) == {first, second}
    disk.clear()
    assert not other.children(ROOT)
    assert other.find(ROOT, first.key) is None
    assert other.read(first) is None
    other.close(flush_s=0)


def test_two_engines_in_one_folder_do_not_see_each_other(folder: Path, disk: DiskTier) -> None:
    write(disk, block_of(1))
    other = tier(folder, "another engine")
    assert not other.children(ROOT)
    assert other.find(ROOT, block_of(1).key) is None
    assert other.clear() == (0, 0)
    assert disk.read(block_of(1)) == blob_of(block_of(1))
    other.close(flush_s=0)


def test_nothing_wrong_is_ever_believed(folder: Path, disk: DiskTier) -> None:
    block = block_of(1)
    write(disk, block, n_bytes=300)
    (path,) = files_in(folder)
    whole = path.read_bytes()
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :])
        assert read_anew(folder, block) is None, at
    for n_bytes in (*range(0, len(whole), 7), len(whole) - 1):
        path.write_bytes(whole[:n_bytes])
        assert read_anew(folder, block) is None, n_bytes
    path.write_bytes(whole + b"\0")
    assert read_anew(folder, block) is None


def test_a_bad_file_is_set_aside_counted_and_its_block_written_again(folder: Path, disk: DiskTier) -> None:
    block = block_of(1)
    write(disk, block)
    (path,) = files_in(folder)
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert disk.read(block) is None
    assert disk.stats().n_bad == 1
    assert files_in(folder, "*.bad")
    assert not files_in(folder)
    assert not disk.holds(block.key)
    write(disk, block)
    assert read_anew(folder, block) == blob_of(block)


def test_a_file_of_an_older_version_is_set_aside_and_of_a_newer_one_left_alone(folder: Path, disk: DiskTier) -> None:
    block = block_of(1)
    write(disk, block)
    (path,) = files_in(folder)
    whole = path.read_bytes()
    path.write_bytes(whole[:4] + b"\x63\x00" + whole[6:])
    assert read_anew(folder, block) is None
    assert path.exists()
    path.write_bytes(whole[:4] + b"\x00\x00" + whole[6:])
    assert read_anew(folder, block) is None
    assert not path.exists()


def test_a_file_under_another_blocks_name_is_set_aside(folder: Path, disk: DiskTier) -> None:
    first, second = block_of(1), block_of(2)
    write(disk, first, second)
    at = disk._index.place
    os.replace(at(first, is_pinned=False), at(second, is_pinned=False))
    assert disk.read(second) is None
    assert read_anew(folder, second) is None
    assert files_in(folder, "*.bad")


def test_links_pipes_and_folders_in_the_way_hold_nobody_up(folder: Path, disk: DiskTier, tmp_path: Path) -> None:
    block = block_of(1)
    write(disk, block)
    (path,) = files_in(folder)
    elsewhere = tmp_path / "elsewhere"
    os.replace(path, elsewhere)
    path.symlink_to(elsewhere)
    assert read_anew(folder, block) is None
    path.unlink()
    os.mkfifo(path)
    assert read_anew(folder, block) is None
    for left in path.parent.iterdir():
        left.unlink()
    path.mkdir()
    assert read_anew(folder, block) is None


def test_a_linked_subfolder_is_neither_read_nor_written(folder: Path, disk: DiskTier, tmp_path: Path) -> None:
    block = block_of(1)
    write(disk, block)
    part = files_in(folder)[0].parent
    os.replace(part, tmp_path / "elsewhere")
    part.symlink_to(tmp_path / "elsewhere")
    assert read_anew(folder, block) is None
    before = sorted(os.listdir(tmp_path / "elsewhere"))
    other = tier(folder)
    write(other, block_of(2))
    assert other.stats().n_failed
    assert sorted(os.listdir(tmp_path / "elsewhere")) == before
    other.close(flush_s=0)


@pytest.mark.parametrize("how", ["link", "file", "others may write", "others own it"])
def test_a_folder_that_is_not_the_users_own_is_not_used(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    if how == "file":
        folder.write_text("")
    elif how == "link":
        (tmp_path / "target").mkdir(mode=0o700)
        folder.symlink_to(tmp_path / "target")
    else:
        folder.mkdir(mode=0o700)
    if how == "others may write":
        folder.chmod(0o777)
    if how == "others own it":
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    disk = tier(folder)
    assert not disk.write(block_of(1), b"x", prefix_tokens=LONG_TOKENS, is_second_use=True)
    disk.used([block_of(1).key])
    assert disk.stats().failure
    assert len(disk.secret) == 32
    assert not disk.children(ROOT)
    assert disk.read(block_of(1)) is None
    assert disk.clear() == (0, 0)
    disk.close(flush_s=1)
    if folder.is_dir():
        assert not list(folder.iterdir())


def test_everything_is_the_users_alone(folder: Path, disk: DiskTier) -> None:
    old = os.umask(0)
    try:
        write(disk, block_of(1))
    finally:
        os.umask(old)
    disk.close(flush_s=1)
    assert stat.S_IMODE(folder.lstat().st_mode) == 0o700
    assert files_in(folder, "daily.lock")
    for path in folder.rglob("*"):
        assert stat.S_IMODE(path.lstat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_the_disk_being_full_costs_no_more_than_the_block_and_ends(
    folder: Path, disk: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(disk, block_of(1))

    def full(fd: int, data: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("localllm.models.disk.files.write_all", full)
    write(disk, block_of(2))
    stats = disk.stats()
    assert stats.n_failed == 1
    assert stats.failure == "No space left on device"
    assert not disk.write(block_of(3), b"x", prefix_tokens=LONG_TOKENS, is_second_use=True)
    assert disk.read(block_of(1)) == blob_of(block_of(1))
    assert not files_in(folder, "*.tmp")
    assert not disk.holds(block_of(2).key)
    monkeypatch.undo()
    disk._writer._rest_until_s = 0.0
    write(disk, block_of(2))
    assert not disk.stats().failure
    assert read_anew(folder, block_of(2)) == blob_of(block_of(2))


def test_what_always_stays_free_is_left_to_others_and_said(
    folder: Path, disk: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.statvfs(folder)
    small = os.statvfs_result((4096, 4096, 15000, 14648, 14648, *real[5:]))
    monkeypatch.setattr(os, "statvfs", lambda path: small)
    write(disk, block_of(1))
    assert disk.stats().n_failed == 1
    assert disk.stats().failure == "60 MB are free there, and 67 MB always stay free"
    assert not files_in(folder)


def test_a_failed_write_is_told_once_and_again_after_one_that_went_well(
    folder: Path, disk: DiskTier, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def too_large(path: Path, parts: tuple[bytes, ...], used_s: float) -> None:
        raise OSError(errno.EFBIG, "File too large")

    told = f"what is kept of prompts could not be written to disk: {folder}: File too large"
    for number in (1, 2):
        with monkeypatch.context() as patch:
            patch.setattr(disk_files, "write_file", too_large)
            write(disk, *chain_of(number, 2), *chain_of(number + 4, 2))  # of each, the second finds no first there
        assert caplog.messages == [told] * number
        write(disk, block_of(number))
    assert disk.stats().n_failed == 4


@pytest.mark.parametrize("call", ["open", "fsync", "utime", "replace", "write"])
def test_a_failing_call_leaves_no_half_file(
    folder: Path, disk: DiskTier, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    write(disk, block_of(1))
    real = getattr(os, call)

    def fails(*args: object, **named: object) -> object:
        if threading.current_thread().name == "localllm-kv-write" and disk.holds(block_of(2).key):
            raise OSError(errno.EIO, "Input/output error")
        return real(*args, **named)

    monkeypatch.setattr(os, call, fails)
    write(disk, block_of(2))
    monkeypatch.undo()
    assert disk.stats().n_failed == 1
    assert len(files_in(folder, "*"))
    assert not files_in(folder, "*.tmp")
    assert read_anew(folder, block_of(2)) is None
    assert read_anew(folder, block_of(1)) is not None
    write(disk, block_of(2))  # one accident does not end it
    assert read_anew(folder, block_of(2)) == blob_of(block_of(2))


def test_an_error_nobody_thought_of_does_not_end_the_writer(
    folder: Path, disk: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_files, "file_parts", lambda *args: 1 / 0)
    write(disk, block_of(1))
    monkeypatch.undo()
    write(disk, block_of(2))
    assert disk.stats().n_failed == 1
    assert read_anew(folder, block_of(2)) == blob_of(block_of(2))


def test_a_failing_look_at_the_folder_costs_no_block(
    folder: Path, disk: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails() -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(disk._writer, "_chores", fails)
    write(disk, block_of(1))
    assert disk.stats().n_failed
    assert read_anew(folder, block_of(1)) == blob_of(block_of(1))


def test_a_folder_deleted_under_it_is_made_again_with_its_secret(folder: Path, disk: DiskTier) -> None:
    import shutil

    write(disk, block_of(1))
    secret = disk.secret
    shutil.rmtree(folder)
    assert disk.read(block_of(1)) is None
    assert not disk.children(ROOT)
    write(disk, block_of(2))
    assert read_anew(folder, block_of(2)) == blob_of(block_of(2))
    other = tier(folder)
    assert other.secret == secret
    assert stat.S_IMODE(folder.lstat().st_mode) == 0o700
    other.close(flush_s=0)


def test_a_bare_block_is_replaced_by_a_whole_one_and_never_taken_for_it(folder: Path, disk: DiskTier) -> None:
    whole = block_of(1)
    bare, other = replace(whole, is_bare=True), tier(folder)
    write(disk, bare)
    assert list(other.children(ROOT)) == [bare]
    assert other.read(whole) is None
    write(disk, whole)
    assert other.read(bare) == blob_of(whole)
    assert read_anew(folder, whole) == blob_of(whole)
    other.close(flush_s=0)


def test_the_queue_is_bounded_and_says_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, gate = tier(folder), threading.Event()
    monkeypatch.setattr(os, "fsync", lambda fd: gate.wait(10))
    monkeypatch.setattr(disk_queue, "QUEUE_BYTES", 10_000)
    taken = [disk.write(b, blob_of(b), prefix_tokens=LONG_TOKENS, is_second_use=True) for b in map(block_of, range(4))]
    assert taken == [True, True, False, False]
    assert disk.stats().n_dropped == 2
    gate.set()
    settle(disk)
    assert disk.write(block_of(9), b"x", prefix_tokens=LONG_TOKENS, is_second_use=True)
    disk.close(flush_s=5)
    assert len(files_in(folder)) == 3


@pytest.mark.parametrize(("flush_s", "n_written"), [(10.0, 6), (0.0, 1)])
def test_closing_writes_what_waits_for_as_long_as_it_may(
    folder: Path, monkeypatch: pytest.MonkeyPatch, flush_s: float, n_written: int
) -> None:
    begun, gate, real = threading.Event(), threading.Event(), os.fsync

    def slow(fd: int) -> None:
        if threading.current_thread().name == "localllm-kv-write":
            begun.set()
            gate.wait(10)
        real(fd)

    disk = tier(folder)
    write(disk, block_of(100))
    monkeypatch.setattr(os, "fsync", slow)
    for block in map(block_of, range(6)):
        disk.write(block, blob_of(block), prefix_tokens=LONG_TOKENS, is_second_use=True)
    assert begun.wait(10)
    threading.Timer(0.1, gate.set).start()
    disk.close(flush_s=flush_s)
    disk.close(flush_s=flush_s)
    assert len(files_in(folder)) == n_written + 1
    assert not disk.write(block_of(50), b"x", prefix_tokens=LONG_TOKENS, is_second_use=True)


def test_closing_does_not_wait_for_a_disk_that_hangs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    monkeypatch.setattr(disk_writer, "_LAST_WRITE_S", 0.1)
    monkeypatch.setattr(os, "utime", lambda *args, **named: gate.wait(10))
    disk = tier(folder)
    disk.write(block_of(1), b"x", prefix_tokens=LONG_TOKENS, is_second_use=True)
    begun_s = time.monotonic()
    disk.close(flush_s=0.1)
    assert time.monotonic() - begun_s < 5
    gate.set()


def test_a_pin_replaces_the_file_that_can_go(folder: Path, disk: DiskTier) -> None:
    block = block_of(1)
    write(disk, block)
    write(disk, block, is_pinned=True)
    assert [path.name for path in files_in(folder)] == [f"{block.key.hex()}.pin.kv"]
    write(disk, block)
    assert len(files_in(folder)) == 1
    assert read_anew(folder, block) == blob_of(block)


def test_clear_deletes_all_that_lies_there_and_what_is_being_written(
    folder: Path, disk: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(disk, block_of(1))
    write(disk, block_of(2), is_pinned=True)
    files_in(folder)[0].with_name(f"{16 * 'ab'}.kv.bad").write_text("bad")
    begun, gate = threading.Event(), threading.Event()

    def slow(fd: int) -> None:
        begun.set()
        gate.wait(10)

    monkeypatch.setattr(os, "fsync", slow)
    for block in map(block_of, range(3, 6)):
        disk.write(block, blob_of(block), prefix_tokens=LONG_TOKENS, is_second_use=True)
    assert begun.wait(10)
    n_files, n_bytes = disk.clear()
    gate.set()
    settle(disk)
    assert n_files == 3
    assert n_bytes > 2 * 4096
    assert not files_in(folder)
    assert not files_in(folder, "*.bad")
    assert not disk.children(ROOT)
    assert not any(disk.holds(block_of(n).key) for n in range(6))


def test_what_is_written_while_all_is_cleared_does_not_stay(
    folder: Path, disk: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, gate, real = threading.Event(), threading.Event(), disk._index.add

    def slow(found: Found) -> None:
        real(found)
        begun.set()
        gate.wait(10)

    monkeypatch.setattr(disk._index, "add", slow)
    monkeypatch.setattr("localllm.runtime.kv.disk.delete_blocks", lambda folder: Deleted())  # it looked just before
    disk.write(block_of(1), b"x", prefix_tokens=LONG_TOKENS, is_second_use=True)
    assert begun.wait(10)
    disk.clear()
    gate.set()
    settle(disk)
    assert not files_in(folder)
    assert not disk.holds(block_of(1).key)
    assert disk.stats().used_bytes == 0


def test_nobody_waits_while_a_file_is_taken_back(folder: Path, disk: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, gate, real = threading.Event(), threading.Event(), Path.unlink

    def hangs(path: Path, missing_ok: bool = False) -> None:
        begun.set()
        assert gate.wait(10)
        real(path, missing_ok)

    at_fsync, may_end, real_fsync = threading.Event(), threading.Event(), os.fsync

    def slow(fd: int) -> None:
        at_fsync.set()
        may_end.wait(10)
        real_fsync(fd)

    write(disk, block_of(9))
    monkeypatch.setattr(os, "fsync", slow)
    disk.write(block_of(1), b"x", prefix_tokens=LONG_TOKENS, is_second_use=True)
    assert at_fsync.wait(10)
    disk.set_aside(block_of(1).key)
    monkeypatch.setattr(Path, "unlink", hangs)
    may_end.set()
    assert begun.wait(10)
    done = threading.Event()

    def engine() -> None:
        disk.write(block_of(2), b"x", prefix_tokens=LONG_TOKENS, is_second_use=True)
        disk.used([block_of(9).key])
        done.set()

    threading.Thread(target=engine, daemon=True).start()
    is_done = done.wait(5)
    gate.set()
    settle(disk)
    assert is_done
    assert len(files_in(folder)) == 2


def test_what_was_cleared_is_counted_no_more(folder: Path, disk: DiskTier) -> None:
    write(disk, block_of(1), block_of(2))
    assert disk.stats().used_bytes
    disk.clear()
    assert disk.stats().used_bytes == 0


def test_nothing_in_a_file_tells_text_or_token_ids(folder: Path, disk: DiskTier) -> None:
    from array import array

    from localllm.runtime.kv.blocks import Chain, KeyMaker

    tokens = [1000 + 7 * n for n in range(64)]
    block = Chain(KeyMaker("engine", disk.secret), ("", "")).block(tokens, 0, 64)
    write(disk, block)
    (path,) = files_in(folder)
    data = path.read_bytes()
    for kind in "ihq":
        packed = array(kind, tokens).tobytes()
        assert not any(packed[at : at + 12] in data for at in range(len(packed) - 11))
    unkeyed = Chain(KeyMaker("engine", bytes(32)), ("", "")).block(tokens, 0, 64)
    assert unkeyed.key not in data
    assert not any(mark in data for mark in (unkeyed.marks[:8], unkeyed.marks[8:16]))


def test_many_threads_and_two_tiers_at_once_agree(folder: Path, disk: DiskTier) -> None:
    other, wrong = tier(folder), list[int]()

    def work(one: DiskTier, seed: int) -> None:
        for n in range(40):
            block = block_of(n)
            one.write(block, blob_of(block), prefix_tokens=LONG_TOKENS, is_second_use=True, wait_s=5)
            found = one.find(ROOT, block_of((n * 7 + seed) % 40).key)
            blob = None if found is None else one.read(found)
            if found is not None and blob is not None and blob != blob_of(found):
                wrong.append(n)
            if n % 10 == seed:
                one.set_aside(block.key)

    threads = [threading.Thread(target=work, args=(one, at)) for at, one in enumerate((disk, other, disk, other))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    settle(disk)
    settle(other)
    assert not wrong
    for block in disk.children(ROOT):
        assert disk.read(block) in (None, blob_of(block))
    other.close(flush_s=1)


def test_the_secret_is_made_once_by_however_many(folder: Path) -> None:
    from localllm.runtime.kv.disk_secret import open_folder

    found = list[bytes]()
    threads = [threading.Thread(target=lambda: found.append(open_folder(folder))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(found)) == 1
    (folder / "secret").write_bytes(b"short")
    assert len(open_folder(folder)) == 32


def test_a_chain_is_found_block_by_block(folder: Path, disk: DiskTier) -> None:
    chain = chain_of(1, 5)
    write(disk, *chain)
    other, parent = tier(folder), ROOT
    for block in chain:
        assert list(other.children(parent)) == [block]
        parent = block.key
    assert not other.children(parent)
    other.close(flush_s=0)


def test_writing_leaves_the_cores_to_those_who_compute(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worked = iter(range(1000))
    monkeypatch.setattr(disk_writer.time, "thread_time", lambda: 0.005 * next(worked))  # each block takes that long
    disk, blocks, began_s = tier(folder), chain_of(1, 4), time.monotonic()
    for block in blocks:
        disk.write(block, blob_of(block), prefix_tokens=LONG_TOKENS, is_second_use=True)
    settle(disk)
    assert time.monotonic() - began_s > 3 * 0.005 * 15
    disk.close(flush_s=0)


def test_nobody_waits_for_a_pinned_block_or_for_the_end_longer_than_writing_takes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_writer, "_MOST_PAUSE_S", 60.0)
    monkeypatch.setattr(disk_writer, "_SHARE_OF_A_CORE", 1e-9)
    disk, blocks, began_s = tier(folder), chain_of(1, 4), time.monotonic()
    write(disk, *blocks, is_pinned=True)
    for block in chain_of(2, 4):
        disk.write(block, blob_of(block), prefix_tokens=LONG_TOKENS, is_second_use=True)
    disk.close(flush_s=10)
    assert time.monotonic() - began_s < 10
    assert len(files_in(folder)) == 8


def test_what_follows_a_bad_file_is_trusted_again_once_somebody_looks_for_it(folder: Path, disk: DiskTier) -> None:
    blocks = chain_of(8, 4)
    write(disk, *blocks)
    assert disk.children(blocks[2].key)  # its sub-folder was looked into
    (path,) = files_in(folder, f"{blocks[1].key.hex()}*")
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert disk.read(blocks[1]) is None
    assert [disk.holds(block.key) for block in blocks] == [True, False, False, False]
    before = disk.version
    assert disk.children(blocks[2].key) == [blocks[3]]
    assert disk.holds(blocks[3].key)
    assert disk.version != before
    assert disk.find(blocks[1].key, blocks[2].key) == blocks[2]
