"""What may lie in the folder and be written a day: over all processes, the least useful first."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from localllm.runtime.kv import disk_files, disk_room, disk_writer
from localllm.runtime.kv.disk import DiskTier
from localllm.runtime.kv.disk_list import delete_all, total
from localllm.runtime.kv.disk_room import DayBudget, FolderRoom
from tests.runtime.kv.disk_blocks import LONG_TOKENS, ROOT, blob_of, block_of, chain_of, files_in, settle, tier, write

DAY_S = 86_400.0
N_BYTES = 10_000


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kv"


@pytest.fixture
def disk(folder: Path) -> Iterator[DiskTier]:
    disk = tier(folder, disk_bytes=12 * N_BYTES)
    yield disk
    disk.close(flush_s=1)


def age(folder: Path, by_s: float) -> None:
    """Make every block of a folder as if it was used that long ago."""
    for path in files_in(folder):
        os.utime(path, (0, path.stat().st_mtime - by_s))


def test_the_budget_holds_and_the_least_recently_used_goes(folder: Path, disk: DiskTier) -> None:
    for number in range(11):
        write(disk, block_of(number), n_bytes=N_BYTES)
        age(folder, 10)
    disk.used([block_of(0).key])
    write(disk, block_of(20), n_bytes=N_BYTES)
    assert total(folder)["bytes"] <= 12 * N_BYTES
    assert disk.stats().n_evicted
    assert disk.find(ROOT, block_of(0).key) is not None, "it was used a moment ago"
    assert disk.find(ROOT, block_of(1).key) is None
    assert not disk.holds(block_of(1).key), "what was evicted is not held any more"
    assert disk.stats().used_bytes == total(folder)["bytes"]


def test_room_is_made_although_nothing_can_be_counted(
    folder: Path, disk: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(disk, block_of(1))
    age(folder, 8 * DAY_S)

    def full(self: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(DayBudget, "refresh", full)
    other = tier(folder)
    write(other, block_of(2))
    assert other.stats().n_failed == 1
    assert not files_in(folder)
    other.close(flush_s=1)


def test_two_tiers_share_one_budget(folder: Path, disk: DiskTier) -> None:
    other = tier(folder, "another engine", disk_bytes=12 * N_BYTES)
    most_bytes = 0
    for number in range(20):
        write((disk, other)[number % 2], block_of(number), n_bytes=N_BYTES)
        most_bytes = max(most_bytes, total(folder)["bytes"])
    assert most_bytes <= 12 * N_BYTES * 1.1
    other.close(flush_s=0)


def test_what_follows_goes_before_what_it_follows(folder: Path, disk: DiskTier) -> None:
    chain = chain_of(1, 6)
    for block in chain:
        write(disk, block, n_bytes=N_BYTES)
    age(folder, 100)
    write(disk, block_of(1_000_000, chain[2].key, 192), n_bytes=N_BYTES)  # a branch makes what it follows as new
    for number in range(8):
        write(disk, block_of(2000 + number), n_bytes=N_BYTES)
    held = [disk.find(block.parent, block.key) is not None for block in chain]
    assert held == sorted(held, reverse=True)
    assert held[:3] == [True] * 3
    assert not all(held)


def test_a_block_larger_than_the_budget_costs_nobody_his_place(folder: Path, disk: DiskTier) -> None:
    write(disk, *map(block_of, range(5)), n_bytes=N_BYTES)
    write(disk, block_of(9), n_bytes=20 * N_BYTES)
    assert len(files_in(folder)) == 5
    assert disk.stats().n_dropped == 1


def test_pins_stay_whatever_comes_and_however_old_they_are(folder: Path, disk: DiskTier) -> None:
    write(disk, *map(block_of, range(4)), n_bytes=N_BYTES, is_pinned=True)
    age(folder, 30 * DAY_S)
    for number in range(10, 30):
        write(disk, block_of(number), n_bytes=N_BYTES)
    assert len(files_in(folder, "*.pin.kv")) == 4
    write(disk, *map(block_of, range(40, 52)), n_bytes=N_BYTES, is_pinned=True)
    assert total(folder)["bytes"] <= 12 * N_BYTES
    assert total(folder)["pinned_bytes"] >= 10 * N_BYTES
    assert delete_all(folder).n_blocks >= 10
    assert not files_in(folder)


def test_what_was_not_used_for_long_goes_also_while_nothing_is_written(
    folder: Path, disk: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(disk, block_of(1), block_of(2))
    os.utime(files_in(folder)[0], (0, time.time() - 8 * DAY_S))
    disk.close(flush_s=1)
    for module in (disk_files, disk_writer):
        monkeypatch.setattr(module, "SWEEP_S", 0.05)
    idle = tier(folder)
    end_s = time.monotonic() + 10
    while len(files_in(folder)) == 2 and time.monotonic() < end_s:
        time.sleep(0.01)
    assert len(files_in(folder)) == 1
    idle.close(flush_s=0)


def test_a_clock_that_jumped_ahead_costs_at_most_a_quarter_a_look(
    folder: Path, disk: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(disk, *map(block_of, range(8)))
    write(disk, block_of(20), is_pinned=True)
    now_s = time.time()
    room = FolderRoom(folder, 1 << 30, 7 * DAY_S)
    monkeypatch.setattr(time, "time", lambda: now_s + 365 * DAY_S)
    n_left = []
    for _ in range(5):
        room.sweep()
        n_left.append(len(files_in(folder)))
    assert n_left == [7, 5, 4, 3, 2]
    assert room.used_bytes == total(folder)["bytes"]
    monkeypatch.setattr(time, "time", lambda: now_s)
    room.sweep()
    assert len(files_in(folder)) == 2


def test_by_itself_it_takes_a_tenth_of_the_disk_that_is_free_without_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free_bytes = [60 * N_BYTES]
    monkeypatch.setattr(disk_room, "_free_bytes", lambda at: free_bytes[0])
    disk = tier(folder, disk_bytes=None)
    assert disk.stats().limit_bytes == 6 * N_BYTES
    write(disk, *map(block_of, range(5)), n_bytes=N_BYTES)
    held_bytes = total(folder)["bytes"]
    room = FolderRoom(folder, None, 7 * DAY_S)
    room.sweep()
    assert room.limit_bytes == (60 * N_BYTES + held_bytes) // 10
    assert len(files_in(folder)) == 5
    free_bytes[0] = 0  # others filled the disk
    room.sweep()
    assert files_in(folder) == []
    disk.close(flush_s=0)


def test_a_clock_that_was_set_back_makes_nothing_stay_for_ever(folder: Path) -> None:
    disk = tier(folder)
    write(disk, *map(block_of, range(3)))
    for ahead_s, path in zip((900, 500, 100), sorted(files_in(folder)), strict=True):
        os.utime(path, (0, time.time() + 365 * DAY_S + ahead_s))
    order = sorted(files_in(folder), key=lambda path: path.stat().st_mtime)
    FolderRoom(folder, 1 << 30, 7 * DAY_S).sweep()
    assert sorted(files_in(folder), key=lambda path: path.stat().st_mtime) == order
    assert all(abs(path.stat().st_mtime - time.time()) < 1000 for path in order)
    disk.close(flush_s=0)


def test_bad_files_count_and_go_first(folder: Path, disk: DiskTier) -> None:
    write(disk, *map(block_of, range(5)), n_bytes=N_BYTES)
    bad = files_in(folder)[0].with_name(f"{16 * 'ab'}.kv.bad")
    bad.write_bytes(bytes(6 * N_BYTES))
    write(disk, block_of(9), block_of(10), n_bytes=N_BYTES)
    assert not bad.exists()
    assert len(files_in(folder)) == 7
    bad.write_bytes(b"1")
    os.utime(bad, (0, time.time() - 2 * DAY_S))
    FolderRoom(folder, 1 << 30, 7 * DAY_S).sweep()
    assert not bad.exists()


def test_what_dead_writers_left_is_swept_and_what_is_being_written_is_not(folder: Path, disk: DiskTier) -> None:
    import fcntl

    write(disk, block_of(1))
    part = files_in(folder)[0].parent
    aa, bb, cc, dd = (f".{8 * letters}" for letters in ("aa", "bb", "cc", "dd"))
    dead, alive, old, new = (
        part / f"{aa}.kv.tmp",
        part / f"{bb}.kv.tmp",
        folder / f"{cc}.tmp",
        part.parent / f"{dd}.tmp",
    )
    for path in (dead, alive, old, new):
        path.write_bytes(b"half")
    os.utime(old, (0, time.time() - 7200))
    with open(alive, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        FolderRoom(folder, 1 << 30, DAY_S).sweep()
        assert [path.exists() for path in (dead, alive, old, new)] == [False, True, False, True]


def test_nothing_but_its_own_files_is_ever_deleted(folder: Path, disk: DiskTier, tmp_path: Path) -> None:
    write(disk, block_of(1))
    part, name = files_in(folder)[0].parent, files_in(folder)[0].name
    others, ours = folder / "app" / "ui", folder / ("0" * 24) / "ui"
    for place in (others, others.parent / "ab", ours):
        place.mkdir(parents=True)
    names = ["main.kv", name, f"{name}.bad", "notes.pin.kv", ".x.kv.tmp", ".x.tmp", "old.bad"]
    kept = [place / name for place in (others, others.parent / "ab", ours) for name in names]
    kept += [place / name for place in (part, part.parent, folder) for name in (*names[:1], *names[3:], "notes.txt")]
    kept += [tmp_path / "z.kv", part.parent / name, folder / name]
    for path in kept:
        path.write_text("mine")
        os.utime(path, (0, 0))
    (part / f"{16 * '00'}.kv").symlink_to(tmp_path / "z.kv")
    (folder / ("1" * 24)).symlink_to(others.parent)
    FolderRoom(folder, 1, 1.0).sweep()
    assert total(folder)["n_blocks"] == 0
    disk.children(ROOT)
    disk.clear()
    delete_all(folder)
    assert all(path.exists() for path in kept)


def test_every_name_that_is_written_is_known(folder: Path, disk: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    from localllm.models.disk import files
    from localllm.runtime.kv.disk_names import file_kind, is_engine_folder, is_part

    seen, real = list[str](), os.open

    def opened(path: str | Path, flags: int, *args: Any, **named: Any) -> int:
        if flags & os.O_CREAT and Path(path).is_relative_to(folder):
            seen.append(Path(path).name)
        return real(path, flags, *args, **named)

    monkeypatch.setattr(os, "open", opened)
    write(disk, block_of(1))
    write(disk, block_of(2), is_pinned=True)
    assert {file_kind(name) for name in seen if not name.startswith("daily.lock")} == {"partial", "temporary"}
    paths = files_in(folder)
    assert {file_kind(path.name) for path in paths} == {"block", "pinned"}
    assert all(is_part(path.parent.name) and is_engine_folder(path.parent.parent.name) for path in paths)
    for path in paths:
        first = files.set_aside(path)
        path.write_text("again")
        assert first is not None
        first.rename(first.with_name(f"{path.name}.{files.token()}.bad"))
    assert {file_kind(path.name) for path in files_in(folder, "*.bad")} == {"bad"}


def test_what_cannot_be_deleted_is_counted(folder: Path, disk: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    write(disk, block_of(1))

    def refuses(path: Path) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(Path, "unlink", refuses)
    assert (delete_all(folder).n_blocks, delete_all(folder).n_left) == (0, 1)


@pytest.mark.parametrize("number", [errno.EACCES, errno.ESTALE, errno.ENOTCONN, errno.EIO])
def test_a_folder_that_cannot_be_looked_at_raises_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    folder.mkdir()
    real = os.stat

    def fails(path: str | Path, *args: Any, **named: Any) -> os.stat_result:
        if Path(str(path)).is_relative_to(folder):
            raise OSError(number, os.strerror(number))
        return real(path, *args, **named)

    monkeypatch.setattr(os, "stat", fails)
    monkeypatch.setattr(os, "lstat", fails)
    disk = tier(folder, disk_bytes=None)
    assert disk.stats().failure == f"{folder} cannot be used: {os.strerror(number)}"
    assert FolderRoom(folder, None, 1.0).limit_bytes > 0
    assert not disk.write(block_of(1), b"x", prefix_tokens=LONG_TOKENS, is_second_use=True)
    assert disk.clear() == (0, 0)
    disk.close(flush_s=1)


# --- a day's writing


def test_short_prefixes_are_written_on_second_use(folder: Path, disk: DiskTier) -> None:
    block = block_of(1)
    assert not disk.write(block, b"x", prefix_tokens=1023, is_second_use=False)
    assert disk.write(block_of(2), b"x", prefix_tokens=1024, is_second_use=False)
    assert disk.write(block, b"x", prefix_tokens=64, is_second_use=True)
    settle(disk)
    assert len(files_in(folder)) == 2


def test_a_days_budget_is_half_for_what_is_used_again_and_pins_go_beyond(folder: Path) -> None:
    disk = tier(folder, disk_daily_bytes=10 * N_BYTES)

    def wants(number: int, *, is_second_use: bool, is_pinned: bool = False) -> bool:
        block = block_of(number)
        is_taken = disk.write(
            block,
            blob_of(block, N_BYTES),
            prefix_tokens=LONG_TOKENS,
            is_second_use=is_second_use,
            is_pinned=is_pinned,
        )
        settle(disk)
        return is_taken

    once = [wants(number, is_second_use=False) for number in range(8)]
    assert once == [True] * 5 + [False] * 3
    again = [wants(number, is_second_use=True) for number in range(10, 20)]
    assert again == [True] * 5 + [False] * 5
    assert wants(30, is_second_use=False, is_pinned=True)
    disk.close(flush_s=1)
    told = json.loads((folder / "daily.json").read_text())
    assert told["bytes"] == disk.stats().spent_today_bytes >= 11 * N_BYTES


def test_a_days_budget_is_shared_and_known_before_much_is_written(folder: Path) -> None:
    first = tier(folder, disk_daily_bytes=5 * N_BYTES)
    write(first, *map(block_of, range(5)), n_bytes=N_BYTES)
    first.close(flush_s=1)
    second = tier(folder, disk_daily_bytes=5 * N_BYTES)
    write(second, *map(block_of, range(10, 15)), n_bytes=N_BYTES)
    assert second.stats().n_written == 0
    assert second.stats().n_dropped
    assert second.stats().spent_today_bytes >= 5 * N_BYTES
    second.close(flush_s=1)


def test_what_a_short_process_writes_first_keeps_to_the_half_day_too(folder: Path) -> None:
    first = tier(folder, disk_daily_bytes=10 * N_BYTES)
    write(first, *map(block_of, range(6)), n_bytes=N_BYTES)
    first.close(flush_s=1)
    second = tier(folder, disk_daily_bytes=10 * N_BYTES)
    once, again = block_of(20), block_of(21)
    second.write(once, blob_of(once, N_BYTES), prefix_tokens=LONG_TOKENS, is_second_use=False)
    second.write(again, blob_of(again, N_BYTES), prefix_tokens=LONG_TOKENS, is_second_use=True)
    settle(second)
    assert [second.holds(block.key) for block in (once, again)] == [False, True]
    assert second.stats().n_dropped == 1
    second.close(flush_s=1)


def test_a_day_ends_and_a_clock_set_back_gives_no_second_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def on(day: str) -> None:
        monkeypatch.setattr(disk_room, "_today", lambda: day)

    budget = DayBudget(tmp_path, 100)
    on("2030-01-02")
    budget.spend(60)
    budget.refresh()
    assert budget.is_half_spent
    assert not budget.is_spent
    on("2030-01-01")
    other = DayBudget(tmp_path, 100)
    other.refresh()
    assert other.spent_bytes == 60
    on("2030-01-03")
    for one in (budget, other):
        one.refresh()
        assert one.spent_bytes == 0


def test_a_budget_spent_on_a_wrong_later_day_is_back_the_day_after_the_clock_was_set_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "daily.json").write_text(json.dumps({"day": "2099-01-01", "bytes": 100}))
    monkeypatch.setattr(disk_room, "_today", lambda: "2030-01-01")
    budget = DayBudget(tmp_path, 100)
    budget.refresh()
    assert budget.is_spent
    monkeypatch.setattr(disk_room, "_today", lambda: "2030-01-02")
    for one in (budget, DayBudget(tmp_path, 100)):
        one.refresh()
        assert one.spent_bytes == 0


def test_where_there_are_no_locks_each_process_counts_and_writes_for_itself(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fcntl

    def no_locks(fd: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    disk = tier(folder, disk_daily_bytes=3 * N_BYTES)
    write(disk, *map(block_of, range(6)), n_bytes=N_BYTES)
    stats = disk.stats()
    assert (stats.n_written, stats.n_failed, stats.failure) == (3, 0, "")
    assert stats.spent_today_bytes >= 3 * N_BYTES
    disk.close(flush_s=1)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"day": 1}', '{"day": "9999-01-01", "bytes": "many"}', "[" * 100_000])
def test_a_wrong_days_file_counts_as_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "daily.json").write_text(text)
    budget = DayBudget(tmp_path, 100)
    budget.refresh()
    budget.spend(10)
    budget.refresh()
    assert budget.spent_bytes == 10
    assert json.loads((tmp_path / "daily.json").read_text())["bytes"] == 10


WRITER = """
import sys
from pathlib import Path
from tests.runtime.kv.disk_blocks import block_of, tier, write
disk = tier(Path(sys.argv[1]), disk_bytes=1 << 20)
print("writing", flush=True)
for n in range(int(sys.argv[2]), 10 ** 9):
    write(disk, block_of(n), n_bytes=30_000)
"""


def test_writers_ended_by_force_leave_only_whole_blocks(folder: Path) -> None:
    root = Path(__file__).resolve().parents[3]
    for turn in range(2):
        writers = [
            subprocess.Popen(
                [sys.executable, "-c", WRITER, str(folder), str(1000 * (2 * turn + at))],
                cwd=root,
                stdout=subprocess.PIPE,
            )
            for at in range(2)
        ]
        try:
            for writer in writers:
                assert writer.stdout is not None
                assert writer.stdout.readline()
            time.sleep(0.05 + 0.03 * turn)
        finally:
            for writer in writers:
                writer.kill()
                writer.communicate()
    disk = tier(folder, disk_bytes=1 << 20)
    blocks = list(disk.children(ROOT))
    assert blocks
    for block in blocks:
        assert disk.read(block) == blob_of(block, 30_000)
    write(disk, block_of(10**6))
    assert not files_in(folder, "*.kv.tmp")
    assert disk.stats().n_bad == 0
    disk.close(flush_s=1)
