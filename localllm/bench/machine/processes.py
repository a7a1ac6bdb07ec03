"""Reads processes and those below them, and adds up the CPU time that they take, each counted once."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Process:
    """One process at one moment.

    `started_s` (on the reader's clock) tells it from a later one of the same `pid`. `cpu_s`: its own CPU time;
    `waited_s`: that of the children which ended and which it waited for, theirs included.
    """

    pid: int
    parent: int
    started_s: float
    cpu_s: float
    waited_s: float = 0.0

    @property
    def key(self) -> tuple[int, float]:
        """What no other process has."""
        return self.pid, self.started_s

    @property
    def total_s(self) -> float:
        """Its CPU time and that of the children which it waited for."""
        return self.cpu_s + self.waited_s


@dataclass(frozen=True, slots=True)
class Footprint:
    """The memory of one process. `pss_bytes`: shared pages divided among those that share; None = not readable."""

    rss_bytes: int
    pss_bytes: int | None = None


class ReadsProcesses(Protocol):
    """The system's view of processes."""

    def now_s(self) -> float:
        """Return the time on the clock of `Process.started_s`."""
        ...

    def read(self, pid: int) -> Process | None:
        """Return a process; None where it has ended, or is not ours to see."""
        ...

    def below(self, pids: Collection[int]) -> dict[int, Process]:
        """Return these processes and all that descend from them, by pid."""
        ...

    def footprint(self, pid: int) -> Footprint | None:
        """Return what a process holds in memory; None where that cannot be read."""
        ...


class ProcFs:
    """Linux's view. `root`: where proc is mounted."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._proc = os.path.join(root, "proc")
        self._tick_s = 1 / os.sysconf("SC_CLK_TCK")
        self._page_bytes = os.sysconf("SC_PAGE_SIZE")
        self._lists_children = os.path.exists(f"{self._proc}/thread-self/children")

    def now_s(self) -> float:
        """Return the seconds since the machine started."""
        return time.clock_gettime(time.CLOCK_BOOTTIME)

    def read(self, pid: int) -> Process | None:
        """Return a process from its line of numbers."""
        line = self._text(f"{pid}/stat")
        fields = line[line.rfind(")") + 1 :].split()  # its name may hold anything, brackets too
        if len(fields) < 20:
            return None
        user, system, waited_user, waited_system = map(int, fields[11:15])
        tick_s = self._tick_s
        return Process(
            pid,
            int(fields[1]),
            int(fields[19]) * tick_s,
            (user + system) * tick_s,
            (waited_user + waited_system) * tick_s,
        )

    def below(self, pids: Collection[int]) -> dict[int, Process]:
        """Return these processes and all that descend from them, by pid."""
        return self._walk(pids) if self._lists_children else _descendants(pids, self._all())

    def footprint(self, pid: int) -> Footprint | None:
        """Return what a process holds in memory."""
        sizes = dict(_sizes(self._text(f"{pid}/smaps_rollup")))
        if "Pss" in sizes and "Rss" in sizes:
            return Footprint(sizes["Rss"], sizes["Pss"])
        pages = self._text(f"{pid}/statm").split()
        return Footprint(int(pages[1]) * self._page_bytes) if len(pages) > 1 else None

    def _walk(self, pids: Iterable[int]) -> dict[int, Process]:
        found: dict[int, Process] = {}
        waiting = list(pids)
        while waiting:
            pid = waiting.pop()
            process = None if pid in found else self.read(pid)
            if process is not None:
                found[pid] = process
                waiting += self._children(pid)
        return found

    def _children(self, pid: int) -> Iterator[int]:
        with contextlib.suppress(OSError):
            for thread in os.listdir(f"{self._proc}/{pid}/task"):
                yield from map(int, self._text(f"{pid}/task/{thread}/children").split())

    def _all(self) -> Iterator[Process]:
        with contextlib.suppress(OSError):
            for name in os.listdir(self._proc):
                process = self.read(int(name)) if name.isdigit() else None
                if process is not None:
                    yield process

    def _text(self, name: str) -> str:
        try:
            with open(f"{self._proc}/{name}", "rb", buffering=0) as file:
                return file.read().decode("utf-8", "replace")
        except OSError:
            return ""


def _sizes(text: str) -> Iterator[tuple[str, int]]:
    """Yield (name, bytes) of lines such as "Pss:   325 kB"."""
    for line in text.splitlines():
        words = line.split()
        if len(words) == 3 and words[2] == "kB" and words[1].isdigit():
            yield words[0].rstrip(":"), int(words[1]) << 10


class PsutilProcesses:
    """What psutil tells on systems without /proc; shared pages count for each."""

    def now_s(self) -> float:
        """Return the seconds since 1970."""
        return time.time()

    def read(self, pid: int) -> Process | None:
        """Return a process."""
        import psutil

        try:
            return _from_psutil(psutil.Process(pid))
        except psutil.Error:
            return None

    def below(self, pids: Collection[int]) -> dict[int, Process]:
        """Return these processes and all that descend from them, by pid."""
        import psutil

        found: dict[int, Process] = {}
        for pid in pids:
            with contextlib.suppress(psutil.Error):
                top = psutil.Process(pid)
                for process in (top, *top.children(recursive=True)):
                    with contextlib.suppress(psutil.Error):
                        found[process.pid] = _from_psutil(process)
        return found

    def footprint(self, pid: int) -> Footprint | None:
        """Return what a process holds in memory."""
        from localllm.models.system import resident_bytes

        n_bytes = resident_bytes(pid)
        return Footprint(n_bytes) if n_bytes else None


def _from_psutil(process: Any) -> Process:
    with process.oneshot():
        times = process.cpu_times()
        waited_s = times.children_user + times.children_system
        return Process(process.pid, process.ppid(), process.create_time(), times.user + times.system, waited_s)


def _descendants(pids: Collection[int], everyone: Iterable[Process]) -> dict[int, Process]:
    by_pid, children = dict[int, Process](), dict[int, list[int]]()
    for process in everyone:
        by_pid[process.pid] = process
        children.setdefault(process.parent, []).append(process.pid)
    found: dict[int, Process] = {}
    waiting = list(pids)
    while waiting:
        pid = waiting.pop()
        if pid in by_pid and pid not in found:
            found[pid] = by_pid[pid]
            waiting += children.get(pid, ())
    return found


class Family:
    """Some processes and all that they start, also those whose parent has ended since."""

    def __init__(self, reader: ReadsProcesses) -> None:
        self._reader = reader
        self._known: dict[int, Process] = {}

    @property
    def pids(self) -> Collection[int]:
        """Those that ran at the last look."""
        return self._known.keys()

    def update(self) -> dict[int, Process]:
        """Return those known that still run, by pid, as they are now."""
        now = (self._reader.read(pid) for pid in list(self._known))
        self._known = {p.pid: p for p in now if p is not None and p.key == self._known[p.pid].key}
        return self._known

    def search(self, pids: Iterable[int]) -> dict[int, Process]:
        """As `update`, and take in `pids` and all that was started meanwhile: the slow way."""
        self._known = self._reader.below({*pids, *self.update()})
        return self._known


_SLACK_S = 0.05
"""What rounding to ticks makes of the CPU time of a process that was waited for."""

_N_LOOKS = 2


class CpuLedger:
    """Adds up CPU time over processes that come and go.

    What was used before `since_s` is not counted. A process that ended is counted by what its
    parent was told when it waited for it, else by what was last seen of it.
    """

    def __init__(self, since_s: float) -> None:
        self._since_s = since_s
        self._last: dict[tuple[int, float], Process] = {}
        self._parents: dict[int, int] = {}
        self._gone: list[tuple[Process, int]] = []
        self._unclaimed_s: dict[int, float] = {}
        self.used_s = 0.0

    def take(self, seen: Iterable[Process]) -> None:
        """Count what was used since the last time; `seen`: all that run now."""
        now = {process.key: process for process in seen}
        grown_s: dict[int, float] = {}
        for key, process in now.items():
            before = self._last.get(key)
            if before is None and process.started_s < self._since_s:
                before = process
            self.used_s += process.total_s - (before.total_s if before else 0.0)
            grown_s[process.pid] = process.waited_s - (before.waited_s if before else 0.0)
            self._parents[process.pid] = process.parent
        self._gone += [(process, _N_LOOKS) for key, process in self._last.items() if key not in now]
        self._inherit(grown_s)
        self._last = now

    def _inherit(self, grown_s: dict[int, float]) -> None:
        """Take off what ended processes had counted, where a parent's count has it now too."""
        # A parent is read a moment before or after its child: the count may come one look late.
        left_s = {pid: s + self._unclaimed_s.get(pid, 0.0) for pid, s in grown_s.items()}
        waiting = []
        for process, n_looks in sorted(self._gone, key=lambda one: -one[0].total_s):
            heir = self._heir(process, left_s)
            if heir is not None and left_s[heir] >= process.total_s - _SLACK_S:
                self.used_s -= process.total_s
                left_s[heir] -= process.total_s
            elif heir is not None and n_looks > 1:
                waiting.append((process, n_looks - 1))
        self._gone = waiting
        self._unclaimed_s = {pid: min(s, grown_s[pid]) for pid, s in left_s.items()}

    def _heir(self, process: Process, running: Collection[int]) -> int | None:
        """Return the nearest ancestor that still runs and is counted here."""
        pid: int | None = process.parent
        seen = set[int]()
        while pid is not None and pid not in running and pid not in seen:
            seen.add(pid)
            pid = self._parents.get(pid)
        return pid if pid in running else None
