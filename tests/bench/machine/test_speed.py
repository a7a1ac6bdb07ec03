"""The processor's clock under load, from made-up cpufreq trees."""

from __future__ import annotations

from pathlib import Path

import pytest

from localllm.bench.machine.speed import ClockSpeed, mac_slowdown
from tests.bench.machine.trees import write


def followed(root: Path, *readings_mhz: tuple[int, int]) -> ClockSpeed:
    path = "sys/devices/system/cpu/cpu{}/cpufreq/scaling_cur_freq"
    write(root, {path.format(core): "1" for core in (0, 1)})
    clock = ClockSpeed({0, 1}, root)
    for first, second in readings_mhz:
        write(root, {path.format(0): str(first * 1000), path.format(1): str(second * 1000)})
        clock.take()
    return clock


def test_a_clock_that_falls_and_stays_low_is_told(tmp_path: Path) -> None:
    clock = followed(tmp_path, *[(4000, 800)] * 6, *[(2400, 2500)] * 6)
    assert clock.slowdown() == "the processor's clock fell from 4.00 to 2.50 GHz under load (62 %)"


@pytest.mark.parametrize(
    "readings",
    [
        [(4000, 800)] * 20,
        [(4000, 3900)] * 6 + [(3300, 3300)] * 6,
        [(4000, 800)] * 6 + [(1000, 1000)] + [(4000, 800)] * 6,  # one reading says nothing
        [(4000, 800)] * 3 + [(2000, 800)] * 3,  # nor do six
        [(800, 4000)] * 6 + [(4000, 800)] * 6,  # the work moved to another core
        [],
    ],
)
def test_a_clock_that_holds_is_not(tmp_path: Path, readings: list[tuple[int, int]]) -> None:
    assert followed(tmp_path, *readings).slowdown() == ""


def test_a_machine_that_does_not_tell_its_clock(tmp_path: Path) -> None:
    clock = ClockSpeed({0}, tmp_path)
    clock.take()
    assert not clock.is_readable
    assert clock.slowdown() == ""


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("CPU_Scheduler_Limit = 100\nCPU_Speed_Limit \t= 62", "macOS let the processor run at 62 % of its speed"),
        ("CPU_Speed_Limit = 100", ""),
        ("Note: No thermal warning level has been recorded", ""),
        ("", None),
    ],
)
def test_macos_tells_its_limit(answer: str, expected: str | None) -> None:
    assert mac_slowdown(lambda command: answer, "Darwin") == expected
    assert mac_slowdown(lambda command: answer, "Linux") is None
