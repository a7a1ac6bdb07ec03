"""Watches memory while something runs: swapping and stalls of the machine, and what processes hold."""

from __future__ import annotations

import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from localllm.models.system import read_text

N = TypeVar("N", int, float)

SAMPLE_S = 0.2
MAX_SWAPPED_BYTES = 16 << 20
MAX_STALLED_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class Reading:
    """Counters of the machine since it started; None where it does not tell. `stalled_s`: tasks waited for memory."""

    swapped_bytes: int | None
    stalled_s: float | None


@dataclass(frozen=True, slots=True)
class Pressure:
    """What memory went through meanwhile. `peak_bytes`: of all processes of the tree together."""

    took_s: float
    swapped_bytes: int | None
    stalled_s: float | None
    peak_bytes: int

    @property
    def problem(self) -> str:
        """What is wrong with it; "" where nothing is."""
        if self.swapped_bytes is not None and self.swapped_bytes > MAX_SWAPPED_BYTES:
            return f"the machine swapped {self.swapped_bytes >> 20} MiB meanwhile"
        if self.stalled_s is not None and self.stalled_s > MAX_STALLED_SHARE * max(self.took_s, 1.0):
            return f"tasks waited {self.stalled_s:.1f} s for memory in {self.took_s:.1f} s"
        return ""


def read(root: Path = Path("/")) -> Reading:
    """Return the machine's counters. `root`: where proc is mounted."""
    if sys.platform == "darwin":
        return Reading(_swapped_elsewhere(), None)
    return Reading(_swapped(root), _stalled(root))


class PressureWatch:
    """Samples a process and all below it until `stop`. `pids`: every (pid, start) that was ever seen there."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._began = read()
        self._began_s = time.monotonic()
        self._peak_bytes = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="localllm-pressure", daemon=True)
        self.pids: set[tuple[int, float]] = set()
        self._thread.start()

    def stop(self) -> Pressure:
        """Return what was seen. Idempotent, but for the time."""
        self._ended.set()
        self._thread.join()
        now = read()
        return Pressure(
            took_s=time.monotonic() - self._began_s,
            swapped_bytes=_since(self._began.swapped_bytes, now.swapped_bytes),
            stalled_s=_since(self._began.stalled_s, now.stalled_s),
            peak_bytes=self._peak_bytes,
        )

    def sample(self) -> None:
        """Look at the processes now."""
        held = 0
        for process in tree(self._pid):
            facts = _facts(process)
            if facts is not None:
                self.pids.add(facts[:2])
                held += facts[2]
        self._peak_bytes = max(self._peak_bytes, held)

    def _watch(self) -> None:
        while True:
            self.sample()
            if self._ended.wait(SAMPLE_S):
                return


def tree(pid: int) -> list[Any]:
    """Return the process and all below it, as psutil has them; those that are there."""
    import psutil

    try:
        top = psutil.Process(pid)
        return [top, *top.children(recursive=True)]
    except psutil.Error:
        return []


def is_there(pid: int, started_s: float) -> bool:
    """Say whether a process that was seen is still there; one that nobody waited for is not."""
    import psutil

    try:
        process = psutil.Process(pid)
        return bool(process.create_time() == started_s and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def _facts(process: Any) -> tuple[int, float, int] | None:
    import psutil

    try:
        return process.pid, process.create_time(), int(process.memory_info().rss)
    except psutil.Error:
        return None


def _swapped(root: Path) -> int | None:
    import mmap

    counters = dict(line.split(" ", 1) for line in read_text(root / "proc/vmstat").splitlines() if " " in line)
    pages = [counters.get(name, "") for name in ("pswpin", "pswpout")]
    return sum(map(int, pages)) * mmap.PAGESIZE if all(page.isdigit() for page in pages) else None


def _swapped_elsewhere() -> int | None:
    import psutil

    swap = psutil.swap_memory()
    return int(swap.sin + swap.sout)


def _stalled(root: Path) -> float | None:
    for line in read_text(root / "proc/pressure/memory").splitlines():
        if line.startswith("full"):
            total = line.rpartition("total=")[2]
            return int(total) / 1e6 if total.isdigit() else None
    return None


def _since(before: N | None, now: N | None) -> N | None:
    return None if before is None or now is None else now - before
