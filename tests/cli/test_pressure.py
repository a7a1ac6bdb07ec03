"""Memory as it is watched: counters of the machine, and when they are a problem."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from localllm.cli import pressure
from localllm.cli.pressure import Pressure, PressureWatch, Reading


def machine(root: Path, vmstat: str, psi: str | None) -> Path:
    (root / "proc/pressure").mkdir(parents=True)
    (root / "proc/vmstat").write_text(vmstat)
    if psi is not None:
        (root / "proc/pressure/memory").write_text(psi)
    return root


@pytest.mark.skipif(sys.platform == "darwin", reason="reads /proc")
def test_counters_are_read(tmp_path: Path) -> None:
    psi = "some avg10=0.00 avg60=0.00 avg300=0.00 total=5000000\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=2500000\n"
    page = os.sysconf("SC_PAGESIZE")
    root = machine(tmp_path, "nr_free 7\npswpin 3\npswpout 4\n", psi)
    assert pressure.read(root) == Reading(7 * page, 2.5)


@pytest.mark.skipif(sys.platform == "darwin", reason="reads /proc")
@pytest.mark.parametrize(
    ("vmstat", "psi"), [("", None), ("pswpin x\npswpout 1\n", "full total=\n"), ("pswpin 1\n", "")]
)
def test_what_is_not_told_is_none(tmp_path: Path, vmstat: str, psi: str | None) -> None:
    assert pressure.read(machine(tmp_path, vmstat, psi)) == Reading(None, None)


@pytest.mark.parametrize(
    ("seen", "problem"),
    [
        (Pressure(10, 0, 0.0, 1), ""),
        (Pressure(10, None, None, 1), ""),
        (Pressure(10, 16 << 20, 1.0, 1), ""),
        (Pressure(10, 17 << 20, 0.0, 1), "swapped 17 MiB"),
        (Pressure(10, 0, 1.5, 1), "waited 1.5 s for memory"),
        (Pressure(0.1, 0, 0.05, 1), ""),
    ],
)
def test_what_is_a_problem(seen: Pressure, problem: str) -> None:
    assert (problem in seen.problem) if problem else seen.problem == ""


def test_processes_below_are_seen_and_counted() -> None:
    inner = "import time; print(1, flush=True); time.sleep(30)"
    script = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}])"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        watch = PressureWatch(process.pid)
        watch.sample()
        for child in pressure.tree(process.pid):
            child.kill()
    seen = watch.stop()
    assert len(watch.pids) == 2
    assert seen.peak_bytes > 1 << 20
    give_up_s = time.monotonic() + 5
    while any(pressure.is_there(pid, started_s) for pid, started_s in watch.pids):
        assert time.monotonic() < give_up_s
        time.sleep(0.01)
    assert pressure.tree(process.pid) == []
