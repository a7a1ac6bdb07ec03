"""The system's counters from made-up /proc and /sys."""

from __future__ import annotations

import os
from pathlib import Path

from localllm.bench.machine.counters import Counters, group_cpu_s, read_counters
from tests.bench.machine.trees import cpu_lines, write

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def test_only_the_usable_cores_count(tmp_path: Path) -> None:
    write(tmp_path, {"proc/stat": cpu_lines((100, 900, 0), (500, 400, 50), (300, 600, 10))})
    found = read_counters({0, 2}, tmp_path, "Linux")
    assert (found.busy_s, found.stolen_s, found.all_s) == (4.0, 0.1, 19.1)


def test_a_core_that_is_not_listed_makes_all_unreadable(tmp_path: Path) -> None:
    write(tmp_path, {"proc/stat": cpu_lines((100, 900, 0))})
    assert read_counters({0, 1}, tmp_path, "Linux") == Counters()


def test_swapping_and_throttling_are_read(tmp_path: Path) -> None:
    cpu = "sys/devices/system/cpu"
    write(
        tmp_path,
        {
            "proc/vmstat": "pgfault 9\npswpin 3\npswpout 10",
            f"{cpu}/cpu0/thermal_throttle/core_throttle_count": "4",
            f"{cpu}/cpu0/thermal_throttle/package_throttle_count": "6",
            f"{cpu}/cpu1/thermal_throttle/core_throttle_total_time_ms": "70",
        },
    )
    found = read_counters((), tmp_path, "Linux")
    assert (found.swapped_in_bytes, found.swapped_out_bytes) == (3 * PAGE_BYTES, 10 * PAGE_BYTES)
    assert found.throttles == {"cpu0 core": 4, "cpu0 package": 6}
    assert found.throttled_ms == {"cpu1 core": 70}


def test_nothing_there_is_nothing_read(tmp_path: Path) -> None:
    assert read_counters({0}, tmp_path, "Linux") == Counters()


def test_the_group_with_the_quota_tells_its_time(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/a/b"
    write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/a/b/c",
            f"{group}/c/cpu.max": "max 100000",
            f"{group}/cpu.max": "200000 100000",
            f"{group}/cpu.stat": "usage_usec 2500000\nuser_usec 1",
        },
    )
    assert group_cpu_s(tmp_path) == 2.5


def test_the_older_groups_tell_theirs(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "proc/self/cgroup": "4:cpu,cpuacct:/box\n1:name=systemd:/x",
            "sys/fs/cgroup/cpu/box/cpu.cfs_quota_us": "150000",
            "sys/fs/cgroup/cpu/box/cpuacct.usage": "7000000000",
        },
    )
    assert group_cpu_s(tmp_path) == 7.0
    write(tmp_path, {"sys/fs/cgroup/cpu/box/cpu.cfs_quota_us": "-1"})
    assert group_cpu_s(tmp_path) is None


def test_other_systems_are_asked_through_psutil() -> None:
    found = read_counters({0}, system="Darwin")
    assert found.busy_s is not None
    assert found.busy_s > 0
    assert found.stolen_s is None
    assert found.swapped_out_bytes is not None
