"""Power and slowdowns of NVIDIA cards, from a program that stands for nvidia-smi."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest

from localllm.bench.machine.nvidia import NvidiaWatch, joules, readings, slowdowns

LINES = [
    "2024/05/01 10:00:00.000, 0, 100.00, 0x0000000000000000",
    "2024/05/01 10:00:00.000, 1, [N/A], 0x0000000000000001",
    "2024/05/01 10:00:02.000, 0, 300.00, 0x0000000000000004",
    "2024/05/01 10:00:03.000, 0, 300.00, 0x0000000000000044",
    "2024/05/01 10:00:04.000, 0, 300.00, 0x0000000000000020",
]


def test_energy_is_the_mean_power_over_the_whole_run() -> None:
    found = list(readings(LINES))
    assert joules(found, 10.0) == {"gpu0": pytest.approx(10 * (2 * 200 + 1 * 300 + 1 * 300) / 4)}
    assert joules(list(readings(LINES[:1])), 2.0) == {"gpu0": 200.0}
    assert joules([], 5.0) == {}


def test_heat_and_power_brakes_are_slowdowns_and_the_power_cap_is_not() -> None:
    assert slowdowns(list(readings(LINES))) == ["gpu0 slowed down for heat or power in 2 of 4 readings"]
    assert slowdowns(list(readings(LINES[:4]))) == []


@pytest.mark.parametrize(
    "line",
    [
        'Field "clocks_event_reasons.active" is not a valid field to query.',
        "",
        "2024/05/01 10:00:00.000, 0, 1",
        "yesterday, 0, 1.0, 0x0",
        "2024/05/01 10:00:00.000, zero, 1.0, 0x0",
    ],
)
def test_what_is_no_reading_is_left_out(line: str) -> None:
    assert list(readings([line, *LINES[:1]])) == list(readings(LINES[:1]))


def program(folder: Path, body: str) -> str:
    """Return a program that stands for nvidia-smi."""
    path = folder / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


def started(program: str, until: Path) -> NvidiaWatch:
    """Start watching; return once the program made a file."""
    watch = NvidiaWatch(program)
    watch.start()
    give_up_s = time.monotonic() + 20
    while not until.exists() and time.monotonic() < give_up_s:
        time.sleep(0.01)
    return watch


def test_the_program_is_read_while_it_runs_and_then_ended(tmp_path: Path) -> None:
    asked, printed = tmp_path / "asked", tmp_path / "printed"
    lines = "\n".join(f"echo '{line}'" for line in LINES[:3])
    watch = started(program(tmp_path, f'echo "$@" > {asked}\n{lines}\ntouch {printed}\nexec sleep 60'), printed)
    found = watch.stop()
    assert found == list(readings(LINES[:3]))
    assert watch.stop() == found
    assert "--loop-ms=1000" in asked.read_text()
    assert [child for child in psutil.Process().children() if "sleep" in child.name()] == []


def test_an_older_driver_is_asked_by_the_older_name(tmp_path: Path) -> None:
    printed = tmp_path / "printed"
    body = f"""case "$*" in *event*) echo 'Field is not a valid field to query.'; exit 2;; esac
echo '{LINES[0]}'
touch {printed}"""
    assert started(program(tmp_path, body), printed).stop() == list(readings(LINES[:1]))


def test_where_there_is_no_program_nothing_is_read(tmp_path: Path) -> None:
    watch = NvidiaWatch(str(tmp_path / "nvidia-smi"))
    watch.start()
    assert watch.stop() == []
