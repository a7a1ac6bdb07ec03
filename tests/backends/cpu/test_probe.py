"""The CPU is read from files that the tests write: topology, quota, features."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from localllm.backends.cpu.probe import CpuFacts, missing_features, probe, quota_cores
from localllm.backends.cpu.topology import linux_topology

ALL = frozenset(range(8))


def tree(root: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


def cores(core_ids: list[int], capacities: list[int] | None = None) -> dict[str, str]:
    found = {}
    for number, core in enumerate(core_ids):
        found[f"sys/devices/system/cpu/cpu{number}/topology/core_id"] = str(core)
        found[f"sys/devices/system/cpu/cpu{number}/topology/physical_package_id"] = "0"
        if capacities:
            found[f"sys/devices/system/cpu/cpu{number}/cpu_capacity"] = str(capacities[number])
    return found


def test_hyperthreads_count_once(tmp_path: Path) -> None:
    topology = linux_topology(tree(tmp_path, cores([0, 1, 2, 3, 0, 1, 2, 3])), ALL)
    assert topology.n_physical(ALL) == 4
    assert topology.n_physical(frozenset({0, 4})) == 1
    assert topology.n_physical(frozenset({0, 1, 4})) == 2


def test_only_performance_cores_count_where_there_are_any(tmp_path: Path) -> None:
    files = {**cores([0, 0, 1, 1, 2, 3, 4, 5]), "sys/devices/cpu_core/cpus": "0-3", "sys/devices/cpu_atom/cpus": "4-7"}
    topology = linux_topology(tree(tmp_path, files), ALL)
    assert topology.n_physical(ALL) == 2
    assert topology.n_physical(frozenset({4, 5, 6})) == 3  # taskset left only the small ones


def test_small_cores_of_an_arm_chip_do_not_count(tmp_path: Path) -> None:
    files = cores(list(range(8)), [1024, 1024, 1024, 1024, 400, 400, 400, 400])
    assert linux_topology(tree(tmp_path, files), ALL).n_physical(ALL) == 4


def test_cores_without_a_topology_count_one_each(tmp_path: Path) -> None:
    assert linux_topology(tmp_path, ALL).n_physical(ALL) == 8


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"proc/self/cgroup": "0::/a/b", "sys/fs/cgroup/a/cpu.max": "150000 100000"}, 1.5),
        (
            {
                "proc/self/cgroup": "0::/a/b",
                "sys/fs/cgroup/a/cpu.max": "800000 100000",
                "sys/fs/cgroup/a/b/cpu.max": "200000 100000",
            },
            2.0,
        ),
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "max 100000"}, None),
        (
            {
                "proc/self/cgroup": "4:memory:/x\n3:cpu,cpuacct:/x",
                "sys/fs/cgroup/cpu/x/cpu.cfs_quota_us": "50000",
                "sys/fs/cgroup/cpu/x/cpu.cfs_period_us": "100000",
            },
            0.5,
        ),
        (
            {
                "proc/self/cgroup": "3:cpu:/",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            },
            None,
        ),
        ({}, None),
    ],
)
def test_quota_is_the_least_of_all_groups(tmp_path: Path, files: dict[str, str], expected: float | None) -> None:
    assert quota_cores(tree(tmp_path, files)) == expected


@pytest.mark.parametrize(
    ("usable", "physical", "quota", "threads"),
    [(16, 8, None, 8), (2, 8, None, 2), (16, 8, 4.0, 4), (16, 8, 3.9, 3), (16, 8, 0.5, 1), (1, 1, None, 1)],
)
def test_threads_stay_within_affinity_cores_and_quota(
    usable: int, physical: int, quota: float | None, threads: int
) -> None:
    facts = CpuFacts("x", "x86_64", frozenset(), 16, usable, physical, quota)
    assert facts.default_threads == threads


def test_a_library_for_another_cpu_names_what_is_missing() -> None:
    facts = CpuFacts("x", "x86_64", frozenset({"avx", "avx2", "fma"}), 4, 4, 4)
    compiled_for = ("AVX", "AVX2", "FMA", "AVX512", "AMX_INT8", "OPENMP", "REPACK")
    assert missing_features(compiled_for, facts) == ("AVX512", "AMX_INT8")


def test_this_machine_is_read() -> None:
    facts = probe()
    assert facts.name
    assert facts.features
    assert 1 <= facts.default_threads <= facts.n_usable <= facts.n_cores == os.cpu_count()
