"""Energy from made-up powercap trees."""

from __future__ import annotations

from pathlib import Path

import pytest

from localllm.bench.machine.energy import Rapl
from tests.bench.machine.trees import write

FOLDER = "sys/class/powercap"


def zone(root: Path, number: str, name: str, energy_uj: int, range_uj: int = 1_000_000_000) -> None:
    at = f"{FOLDER}/intel-rapl:{number}"
    write(
        root,
        {f"{at}/name": name, f"{at}/energy_uj": str(energy_uj), f"{at}/max_energy_range_uj": str(range_uj)},
    )


def test_packages_and_dram_are_added_and_what_lies_inside_of_them_is_not(tmp_path: Path) -> None:
    for number, name in (("0", "package-0"), ("0:0", "core"), ("0:1", "dram"), ("1", "package-1"), ("2", "psys")):
        zone(tmp_path, number, name, 5_000_000)
    rapl = Rapl(tmp_path)
    for number, name in (("0", "package-0"), ("0:0", "core"), ("0:1", "dram"), ("1", "package-1"), ("2", "psys")):
        zone(tmp_path, number, name, 8_000_000)
    rapl.take()
    assert rapl.joules == {"cpu package": pytest.approx(6.0), "dram": pytest.approx(3.0)}


def test_a_counter_that_begins_again_is_followed(tmp_path: Path) -> None:
    zone(tmp_path, "0", "package-0", 90_000_000, 100_000_000)
    rapl = Rapl(tmp_path)
    for energy_uj in (99_000_000, 4_000_000, 50_000_000):
        zone(tmp_path, "0", "package-0", energy_uj, 100_000_000)
        rapl.take()
    assert rapl.joules == {"cpu package": pytest.approx(60.0)}


def test_counters_that_may_not_be_read_give_nothing(tmp_path: Path) -> None:
    assert Rapl(tmp_path).joules == {}
    zone(tmp_path, "0", "package-0", 1)
    rapl = Rapl(tmp_path)
    (tmp_path / FOLDER / "intel-rapl:0/energy_uj").unlink()
    rapl.take()
    assert rapl.joules == {}
