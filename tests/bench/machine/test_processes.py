"""Processes read from made-up /proc trees, and CPU time that is counted once, whoever ends when."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from localllm.bench.machine.processes import CpuLedger, Family, Footprint, Process, ProcFs, PsutilProcesses
from tests.bench.machine.trees import stat_line, write

SINCE_S = 50.0
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def tree(root: Path, *lines: str, lists_children: bool = False) -> ProcFs:
    """Write a process a line; with `lists_children` as a kernel that tells them does."""
    for line in lines:
        pid = line.split()[0]
        write(root, {f"proc/{pid}/stat": line})
        if lists_children:
            below = [other.split()[0] for other in lines if other[other.rfind(")") :].split()[2] == pid]
            write(root, {f"proc/{pid}/task/{pid}/children": " ".join(below)})
    if lists_children:
        write(root, {"proc/thread-self/children": ""})
    return ProcFs(root)


def test_a_process_is_read_whatever_its_name_holds(tmp_path: Path) -> None:
    reader = tree(tmp_path, stat_line(7, 3, cpu=250, waited=40, started=900, name="a) R 1 (b"))
    assert reader.read(7) == Process(7, 3, 9.0, 2.5, 0.4)
    assert reader.read(8) is None


@pytest.mark.parametrize("lists_children", [False, True])
def test_all_that_descend_are_found_and_nobody_else(tmp_path: Path, lists_children: bool) -> None:
    lines = [stat_line(10), stat_line(11, 10), stat_line(12, 11), stat_line(13, 10), stat_line(20), stat_line(21, 20)]
    reader = tree(tmp_path, *lines, lists_children=lists_children)
    assert set(reader.below([10])) == {10, 11, 12, 13}
    assert set(reader.below([12, 20, 99])) == {12, 20, 21}
    assert reader.below([]) == {}


def test_memory_is_pss_where_it_can_be_read_else_rss(tmp_path: Path) -> None:
    rollup = "5578-7ffd ---p 00000000 00:00 0   [rollup]\nRss:    300 kB\nPss:    120 kB\nPss_Dirty: 5 kB"
    write(tmp_path, {"proc/5/smaps_rollup": rollup, "proc/5/statm": "900 75 1 1 0 1 0", "proc/6/statm": "900 75 1"})
    reader = ProcFs(tmp_path)
    assert reader.footprint(5) == Footprint(300 << 10, 120 << 10)
    assert reader.footprint(6) == Footprint(75 * PAGE_BYTES)
    assert reader.footprint(7) is None


def test_a_family_keeps_those_whose_parent_ended_and_not_who_gets_their_number(tmp_path: Path) -> None:
    reader = tree(tmp_path, stat_line(10), stat_line(11, 10), stat_line(12, 11), stat_line(99))
    family = Family(reader)
    assert set(family.search([10])) == {10, 11, 12}
    tree(tmp_path, stat_line(12, 1), stat_line(10, 99, started=500))  # 11 ended, 10 is somebody else
    (tmp_path / "proc/11/stat").unlink()
    assert set(family.update()) == {12}
    tree(tmp_path, stat_line(13, 12))
    assert set(family.update()) == {12}
    assert set(family.search([])) == {12, 13}


def process(pid: int, parent: int = 1, *, cpu: float = 0.0, waited: float = 0.0, started: float = 10.0) -> Process:
    return Process(pid, parent, started, cpu, waited)


def used(*looks: list[Process]) -> float:
    ledger = CpuLedger(SINCE_S)
    for look in looks:
        ledger.take(look)
    return round(ledger.used_s, 6)


def test_what_was_used_before_does_not_count_but_all_of_what_began_since_does() -> None:
    old = [process(1, cpu=100)], [process(1, cpu=103)]
    assert used(*old) == 3
    assert used([process(1, cpu=100)], [process(1, cpu=100), process(2, 1, cpu=1.5, started=60)]) == 1.5


def test_one_that_is_watched_late_counts_from_then() -> None:
    assert used([], [process(5, cpu=40)], [process(5, cpu=42)]) == 2


def test_a_child_that_was_waited_for_counts_once() -> None:
    parent, child = process(1, cpu=10), process(2, 1, cpu=100)
    assert used([parent, child], [process(1, cpu=10), process(2, 1, cpu=103)], [process(1, cpu=10, waited=104)]) == 4


def test_a_child_whose_time_comes_a_look_late_or_early_counts_once() -> None:
    parent, child, ended = process(1, cpu=10), process(2, 1, cpu=100), process(1, cpu=10, waited=101)
    assert used([parent, child], [parent], [ended]) == 1  # the parent was read before it waited
    assert used([parent, child], [ended, child], [ended]) == 1  # the child was read before it ended


def test_a_child_that_nobody_waited_for_counts_by_what_was_seen_of_it() -> None:
    parent = process(1, cpu=10)
    assert used([parent, process(2, 1, cpu=100)], [parent, process(2, 1, cpu=103)], [parent], [parent], [parent]) == 3
    assert used([process(2, 77, cpu=100)], [process(2, 77, cpu=105)], []) == 5


def test_children_that_were_never_seen_count_through_their_parent() -> None:
    assert used([process(1, cpu=1)], [process(1, cpu=1, waited=2.5)]) == 2.5


def test_a_whole_branch_that_ends_at_once_counts_once() -> None:
    before = [process(1), process(2, 1, cpu=20), process(3, 2, cpu=30)]
    assert used(before, [process(1, waited=52)]) == 2


def test_a_number_that_is_used_again_is_another_process() -> None:
    assert used([process(5, 77, cpu=100)], [process(5, 77, cpu=1, started=60)]) == 1


def test_psutil_sees_this_process_and_its_memory() -> None:
    reader = PsutilProcesses()
    found = reader.below([os.getpid()])[os.getpid()]
    assert found.parent == os.getppid()
    assert found.started_s < reader.now_s()
    assert reader.read(os.getpid()) is not None
    footprint = reader.footprint(os.getpid())
    assert footprint is not None
    assert footprint.rss_bytes > 1 << 20
    assert reader.read(2**22 + 5) is None
    assert reader.below([2**22 + 5]) == {}
