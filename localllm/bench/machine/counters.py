"""What the system has counted so far: CPU time of all, pages swapped, times that the processor throttled."""

from __future__ import annotations

import os
import platform
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from localllm.models.system import control_groups, read_number, read_text


@dataclass(frozen=True, slots=True)
class Counters:
    """The state of the system's counters at one moment. None = not readable here.

    `busy_s`, `stolen_s`, `all_s`: of the usable cores; stolen is what the hypervisor gave to others.
    `group_s`: CPU time of the control group that has a quota. `throttles`, `throttled_ms`: how often and
    how long each core and package throttled, {} where that is not told.
    """

    busy_s: float | None = None
    stolen_s: float | None = None
    all_s: float | None = None
    group_s: float | None = None
    swapped_in_bytes: int | None = None
    swapped_out_bytes: int | None = None
    throttles: Mapping[str, int] = field(default_factory=dict)
    throttled_ms: Mapping[str, int] = field(default_factory=dict)


def read_counters(cores: Collection[int], root: Path = Path("/"), system: str = platform.system()) -> Counters:
    """Return the counters as they are now. `cores`: the usable ones. `root`: where proc and sys are mounted."""
    if system != "Linux":
        return _from_psutil()
    busy_s, stolen_s, all_s = cpu_times(cores, root)
    swapped = dict(_swapped(root))
    return Counters(
        busy_s=busy_s,
        stolen_s=stolen_s,
        all_s=all_s,
        group_s=group_cpu_s(root),
        swapped_in_bytes=swapped.get("pswpin"),
        swapped_out_bytes=swapped.get("pswpout"),
        throttles=dict(_throttled(root, "count")),
        throttled_ms=dict(_throttled(root, "total_time_ms")),
    )


def usable_cores() -> frozenset[int]:
    """Return the cores that this process may run on."""
    if platform.system() == "Linux":
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def _from_psutil() -> Counters:
    import psutil

    times, swap = psutil.cpu_times(), psutil.swap_memory()
    busy_s = times.user + times.nice + times.system
    # macOS counts pages read from files as paged in: what is used of the swap space grows for certain.
    return Counters(busy_s=busy_s, all_s=busy_s + times.idle, swapped_out_bytes=swap.used)


def cpu_times(cores: Collection[int], root: Path = Path("/")) -> tuple[float, float, float] | tuple[None, None, None]:
    """Return seconds busy, stolen and in all, summed over `cores`; None where one of them is not listed."""
    busy = stolen = everything = n_found = 0
    for line in read_text(root / "proc/stat").splitlines():
        words = line.split()
        if not words[0].startswith("cpu"):
            break
        name = words[0].removeprefix("cpu")
        if name.isdigit() and int(name) in cores and len(words) >= 9:
            user, nice, kernel, idle, waiting, irq, soft_irq, steal = map(int, words[1:9])
            busy += user + nice + kernel + irq + soft_irq
            stolen += steal
            everything += user + nice + kernel + idle + waiting + irq + soft_irq + steal
            n_found += 1
    if n_found < len(cores):
        return None, None, None
    tick_s = 1 / os.sysconf("SC_CLK_TCK")
    return busy * tick_s, stolen * tick_s, everything * tick_s


def group_cpu_s(root: Path) -> float | None:
    """Return the CPU time of the innermost control group of this process that has a quota."""
    for folder, is_v2 in control_groups(root, "cpu"):
        if is_v2 and read_text(folder / "cpu.max")[:1].isdigit():
            counted = dict(_pairs(folder / "cpu.stat")).get("usage_usec")
            return None if counted is None else counted / 1e6
        if not is_v2 and read_number(folder / "cpu.cfs_quota_us"):
            counted = read_number(folder / "cpuacct.usage")
            return None if counted is None else counted / 1e9
    return None


def _swapped(root: Path) -> Iterator[tuple[str, int]]:
    page_bytes = os.sysconf("SC_PAGE_SIZE")
    for name, n_pages in _pairs(root / "proc/vmstat"):
        if name in ("pswpin", "pswpout"):
            yield name, n_pages * page_bytes


def _pairs(path: Path) -> Iterator[tuple[str, int]]:
    for line in read_text(path).splitlines():
        name, _, value = line.partition(" ")
        if value.isdigit():
            yield name, int(value)


def _throttled(root: Path, what: str) -> Iterator[tuple[str, int]]:
    for folder in root.glob("sys/devices/system/cpu/cpu[0-9]*/thermal_throttle"):
        for kind in ("core", "package"):
            value = read_number(folder / f"{kind}_throttle_{what}")
            if value is not None:
                yield f"{folder.parent.name} {kind}", value
