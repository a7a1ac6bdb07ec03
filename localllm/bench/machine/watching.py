"""Watches a run: what the processes under measurement take, and what disturbs them."""

from __future__ import annotations

import os
import platform
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from localllm.backends.cpu.probe import quota_cores
from localllm.bench.machine import nvidia
from localllm.bench.machine.counters import cpu_times, read_counters, usable_cores
from localllm.bench.machine.disturbance import Span, Verdict, verdict
from localllm.bench.machine.energy import Rapl
from localllm.bench.machine.memory import MemoryPeak
from localllm.bench.machine.nvidia import NvidiaWatch
from localllm.bench.machine.pace import Pace
from localllm.bench.machine.processes import CpuLedger, Family, Process, ProcFs, PsutilProcesses, ReadsProcesses
from localllm.bench.machine.resources import Resources
from localllm.bench.machine.speed import ClockSpeed, mac_slowdown

INTERVAL_S = 0.25
_END_S = 5.0

_BUSY_CORES = 0.5
"""Load under which the processor's clock says something."""


def _default_reader() -> ReadsProcesses:
    return ProcFs() if platform.system() == "Linux" else PsutilProcesses()


@dataclass(slots=True)
class _Paces:
    """How often each thing is looked at; together they stay under a hundredth of a core."""

    processes: Pace = field(default_factory=lambda: Pace(INTERVAL_S, 0.003))
    search: Pace = field(default_factory=lambda: Pace(1.0, 0.002))
    memory: Pace = field(default_factory=lambda: Pace(INTERVAL_S, 0.002))
    machine: Pace = field(default_factory=lambda: Pace(1.0, 0.001))

    @property
    def spent_s(self) -> float:
        return sum(pace.spent_s for pace in (self.processes, self.search, self.memory, self.machine))


class Watch:
    """Looks at processes and machine some times a second while it is entered, at under 1 % of a core.

    `pids` gives the processes under measurement as they are then; those that they start are
    found. This process and all that it starts count as ours, too. Enter it once; `found` after leaving it.
    """

    def __init__(
        self, pids: Callable[[], Sequence[int]], root: Path = Path("/"), reader: ReadsProcesses | None = None
    ) -> None:
        self._pids = pids
        self._root = root
        self._reader = reader or _default_reader()
        self._cores = usable_cores()
        self._quota_cores = quota_cores(root)
        self._server, self._own = Family(self._reader), Family(self._reader)
        self._memory = MemoryPeak()
        self._clock, self._cards = ClockSpeed(self._cores, root), NvidiaWatch()
        self._paces = _Paces()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look_on, name="localllm-watch", daemon=True)
        self._failure = ""
        self._saw_server = False
        self._resources = Resources()

    def __enter__(self) -> Self:
        since_s = self._reader.now_s()
        self._server_ledger, self._ours_ledger = CpuLedger(since_s), CpuLedger(since_s)
        self._before, self._energy = read_counters(self._cores, self._root), Rapl(self._root)
        self._begun_s = self._last_look_s = time.monotonic()
        self._last_busy_s = self._before.busy_s or 0.0
        self._cards.start()
        self._try_look()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join(_END_S)
        readings = self._cards.stop()
        if not self._thread.is_alive():
            self._try_look(is_last=True)
        self._resources = self._sum_up(readings)

    def found(self) -> Resources:
        """Return what was found, once the watch is over."""
        return self._resources

    @property
    def cost_s(self) -> float:
        """The CPU time that watching took so far."""
        return self._paces.spent_s

    def _look_on(self) -> None:
        while not self._over.wait(INTERVAL_S):
            self._try_look()

    def _try_look(self, *, is_last: bool = False) -> None:
        try:
            self._look(is_last=is_last)
        except Exception as error:  # what goes wrong here must not spoil what is measured
            self._failure = type(error).__name__

    def _look(self, *, is_last: bool = False) -> None:
        if is_last or self._paces.search.is_due:
            with self._paces.search.counted():
                server, own = self._server.search(self._pids()), self._own.search((os.getpid(),))
                self._count(server, own)
        elif self._paces.processes.is_due:
            with self._paces.processes.counted():
                self._count(self._server.update(), self._own.update())
        if is_last or self._paces.memory.is_due:
            with self._paces.memory.counted():
                self._weigh()
        if is_last or self._paces.machine.is_due:
            with self._paces.machine.counted():
                self._look_at_machine()

    def _count(self, server: Mapping[int, Process], own: Mapping[int, Process]) -> None:
        self._saw_server = self._saw_server or bool(server)
        self._server_ledger.take(server.values())
        self._ours_ledger.take({**own, **server}.values())

    def _weigh(self) -> None:
        footprints = (self._reader.footprint(pid) for pid in self._server.pids)
        self._memory.take(one for one in footprints if one is not None)

    def _look_at_machine(self) -> None:
        self._energy.take()
        if self._clock.is_readable:
            busy_s, now_s = cpu_times(self._cores, self._root)[0] or 0.0, time.monotonic()
            if busy_s - self._last_busy_s > _BUSY_CORES * (now_s - self._last_look_s):
                self._clock.take()
            self._last_busy_s, self._last_look_s = busy_s, now_s

    def _sum_up(self, readings: Sequence[nvidia.Reading]) -> Resources:
        after, elapsed_s = read_counters(self._cores, self._root), time.monotonic() - self._begun_s
        ours_s = self._ours_ledger.used_s if self._saw_server and not self._failure else None
        seen = verdict(self._before, after, Span(elapsed_s, ours_s, len(self._cores), self._quota_cores))
        seen = self._with_slowdowns(seen, readings)
        joules = self._energy.joules | nvidia.joules(readings, elapsed_s)
        return Resources(
            peak_memory_bytes=self._memory.peak_bytes,
            memory_kind=self._memory.kind,
            joules=sum(joules.values()) if joules else None,
            joules_of=tuple(joules),
            server_cpu_s=self._server_ledger.used_s if self._saw_server else None,
            disturbances=seen.disturbances,
            unseen=seen.unseen,
        )

    def _with_slowdowns(self, seen: Verdict, readings: Sequence[nvidia.Reading]) -> Verdict:
        """Add what other witnesses tell of throttling than the processor's counters."""
        mac = mac_slowdown()
        sentences = [self._clock.slowdown(), mac or "", *nvidia.slowdowns(readings)]
        unseen = [name for name in seen.unseen if name != "throttling"]
        if "throttling" in seen.unseen and not self._clock.is_readable and mac is None:
            unseen.append("throttling")
        if self._failure:
            unseen.append(f"what a look that failed would have shown ({self._failure})")
        return Verdict(seen.disturbances + tuple(filter(None, sentences)), tuple(unseen))
