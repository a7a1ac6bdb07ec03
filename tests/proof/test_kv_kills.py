"""The run that ends writers of the disk tier finds what is wrong, and counts its kills."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from proof import kv_kills
from proof.kv_kills import block_at, bytes_of, end_at_each_call, look, open_tier, sweep


def filled(folder: Path) -> list[Path]:
    """Write one chain; return its files."""
    disk = open_tier(folder)
    for at in range(3):
        block = block_at(1, at)
        disk.write(block, bytes_of(block.key), prefix_tokens=4096, is_second_use=True, wait_s=5)
    disk.close(flush_s=10)
    return sorted(folder.rglob("*.kv"))


def test_what_is_right_counts_as_right(tmp_path: Path) -> None:
    filled(tmp_path / "kv")
    found: Counter[str] = Counter()
    look(tmp_path / "kv", found)
    assert (found["blocks_read"], found["files_checked"]) == (3, 3)
    assert not found["wrong_blocks"] + found["half_files"] + found["set_aside"]


def test_a_half_file_and_wrong_bytes_are_found(tmp_path: Path) -> None:
    paths = filled(tmp_path / "kv")
    disk = open_tier(tmp_path / "kv")
    block = block_at(2, 0)
    disk.write(block, b"other bytes", prefix_tokens=4096, is_second_use=True)
    disk.close(flush_s=10)
    paths[0].write_bytes(paths[0].read_bytes()[:-1])
    found: Counter[str] = Counter()
    look(tmp_path / "kv", found)
    assert found["wrong_blocks"] == 1
    assert found["half_files"] + found["set_aside"] == 2  # the half one, and the whole one with wrong bytes


def test_what_dead_writers_left_is_counted_and_swept(tmp_path: Path) -> None:
    (filled(tmp_path / "kv")[0].with_name(f".{'ab' * 8}.kv.tmp")).write_bytes(b"half")
    assert len(kv_kills.left_behind(tmp_path / "kv")) == 1
    found: Counter[str] = Counter()
    sweep(tmp_path / "kv", found)
    assert (found["partial_after_sweep"], found["writes_lost_after"]) == (0, 0)


def test_pins_and_the_days_count_are_looked_for_and_then_all_is_cleared(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    kv_kills.pin(folder)
    filled(folder)
    found: Counter[str] = Counter()
    kv_kills.clear(folder, found)
    assert not any(found[name] for name in kv_kills.BAD)
    assert not list(folder.rglob("*.kv"))
    (folder / "daily.json").write_text("half")
    kv_kills.clear(folder, found)
    assert (found["pins_lost"], found["days_lost"], found["left_after_clear"]) == (kv_kills.CHAIN_BLOCKS, 1, 0)


def test_a_writer_is_ended_at_the_call_that_was_named(tmp_path: Path) -> None:
    found = end_at_each_call(tmp_path, 1)
    assert found["kills"] == 1
