"""Watching a run: what is found on a made-up machine, what failures leave, and what the real one tells."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from localllm.bench.machine.counters import usable_cores
from localllm.bench.machine.pace import Pace
from localllm.bench.machine.processes import Footprint, Process
from localllm.bench.machine.resources import Resources
from localllm.bench.machine.watching import Watch
from tests.bench.machine.trees import cpu_lines, write

SERVER = 70_000_001


class MadeUp:
    """Processes as a test sets them."""

    def __init__(self) -> None:
        self.processes: dict[int, Process] = {}
        self.footprints: dict[int, Footprint] = {}

    def put(self, pid: int, parent: int = 1, *, cpu: float = 0.0, started: float = 10.0, mb: int = 0) -> None:
        """Set one process."""
        self.processes[pid] = Process(pid, parent, started, cpu)
        self.footprints[pid] = Footprint(2 * mb << 20, mb << 20)

    def now_s(self) -> float:
        """Return a time after the first process's start."""
        return 50.0

    def read(self, pid: int) -> Process | None:
        """Return a process."""
        return self.processes.get(pid)

    def below(self, pids: Collection[int]) -> dict[int, Process]:
        """Return some and their children."""
        found = {pid: self.processes[pid] for pid in pids if pid in self.processes}
        return found | {p.pid: p for p in list(self.processes.values()) if p.parent in found}

    def footprint(self, pid: int) -> Footprint | None:
        """Return a process's memory."""
        return self.footprints.get(pid)


def machine(root: Path, *, swapped: int = 0, energy_uj: int = 0) -> Path:
    """Write a machine on which nothing happens but what is said."""
    rapl = "sys/class/powercap/intel-rapl:0"
    files = {
        "proc/stat": cpu_lines(*[(100, 900, 0)] * (1 + max(usable_cores()))),
        "proc/vmstat": f"pswpin {swapped}\npswpout 0",
        f"{rapl}/name": "package-0",
        f"{rapl}/energy_uj": str(energy_uj),
        f"{rapl}/max_energy_range_uj": "1000000000",
    }
    return write(root, files)


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> MadeUp:
    """Let no program of the real machine be found, and give made-up processes."""
    monkeypatch.setenv("PATH", "")
    made_up = MadeUp()
    made_up.put(os.getpid())
    return made_up


def test_a_run_is_summed_up_over_server_children_and_machine(tmp_path: Path, made_up: MadeUp) -> None:
    made_up.put(SERVER, cpu=100.0, mb=300)
    with Watch(lambda: [SERVER], machine(tmp_path), made_up) as watch:
        made_up.put(SERVER, cpu=102.0, mb=200)
        made_up.put(SERVER + 1, SERVER, cpu=0.5, started=60.0, mb=150)
        machine(tmp_path, swapped=100_000, energy_uj=7_000_000)
    assert replace(watch.found(), unseen=()) == Resources(
        peak_memory_bytes=350 << 20,
        memory_kind="pss",
        joules=7.0,
        joules_of=("cpu package",),
        server_cpu_s=2.5,
        disturbances=(f"the machine swapped: {100_000 * os.sysconf('SC_PAGE_SIZE') / 1e6:.0f} MB in, 0 MB out",),
    )


def test_what_is_not_on_this_machine_is_not_known(tmp_path: Path, made_up: MadeUp) -> None:
    with Watch(lambda: (), machine(tmp_path), made_up) as watch:
        pass
    found = watch.found()
    assert (found.peak_memory_bytes, found.server_cpu_s) == (None, None)
    assert "load of others" in found.unseen


def test_a_server_that_is_started_again_counts_with_both_lives(tmp_path: Path, made_up: MadeUp) -> None:
    made_up.put(SERVER, cpu=100.0, mb=10)
    pids = [SERVER]
    with Watch(lambda: pids, machine(tmp_path), made_up) as watch:
        made_up.processes.pop(SERVER)
        pids[:] = [SERVER + 9]
        made_up.put(SERVER + 9, cpu=3.0, started=55.0, mb=20)
    assert watch.found().server_cpu_s == 3.0
    assert watch.found().peak_memory_bytes == 20 << 20


def test_a_look_that_fails_spoils_no_run_and_is_told(tmp_path: Path, made_up: MadeUp) -> None:
    def fail() -> Sequence[int]:
        raise RuntimeError("the server is being started again")

    with Watch(fail, machine(tmp_path), made_up) as watch:
        pass
    assert "what a look that failed would have shown (RuntimeError)" in watch.found().unseen
    assert "load of others" in watch.found().unseen


def test_what_is_raised_inside_goes_on_and_the_thread_ends(tmp_path: Path, made_up: MadeUp) -> None:
    made_up.put(SERVER, mb=5)
    watch = Watch(lambda: [SERVER], machine(tmp_path), made_up)
    with pytest.raises(KeyboardInterrupt), watch:
        raise KeyboardInterrupt
    assert watch.found().peak_memory_bytes == 5 << 20
    assert not [thread for thread in threading.enumerate() if thread.name == "localllm-watch"]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_real_process_is_weighed_and_its_cpu_time_counted() -> None:
    code = "import time\nheld = bytearray(64 << 20)\nprint(flush=True)\ninput()\n"
    code += "while time.process_time() < 0.4: pass\nprint(flush=True)\ninput()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            child.stdout.readline()
            with Watch(lambda: [child.pid]) as watch:
                child.stdin.write(b"\n")
                child.stdin.flush()
                child.stdout.readline()
        finally:
            child.kill()
    found = watch.found()
    assert found.peak_memory_bytes is not None
    assert found.peak_memory_bytes > 64 << 20
    assert found.server_cpu_s is not None
    assert 0.1 < found.server_cpu_s <= 0.5


def burned(cpu_s: float) -> Callable[[], None]:
    def burn() -> None:
        until_s = time.thread_time() + cpu_s
        while time.thread_time() < until_s:
            pass

    return burn


def test_what_is_dear_is_done_rarely() -> None:
    cheap, dear = Pace(0.0, 0.5), Pace(0.0, 0.0001)
    for pace, work in ((cheap, burned(0.0)), (dear, burned(0.01))):
        assert pace.is_due
        with pace.counted():
            work()
    assert dear.spent_s >= 0.01
    assert not dear.is_due  # for 100 seconds
    time.sleep(0.01)
    assert cheap.is_due
