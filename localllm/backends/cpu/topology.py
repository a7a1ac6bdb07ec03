"""Which cores there are, and which of them are fast: Linux's /sys, macOS's sysctl."""

from __future__ import annotations

import ctypes
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from localllm.models.system import read_number, read_text


@dataclass(frozen=True, slots=True)
class Topology:
    """Cores by logical number: `core_of` gives (package, core), `fast` are the performance cores."""

    core_of: Mapping[int, tuple[int, int]]
    fast: frozenset[int]

    def n_physical(self, logical: frozenset[int]) -> int:
        """Return how many physical performance cores these logical ones reach (all, where none is fast)."""
        chosen = logical & self.fast or logical
        return len({self.core_of.get(number, (0, number)) for number in chosen})


def linux_topology(root: Path, logical: frozenset[int]) -> Topology:
    """Read the topology of the logical cores from /sys under `root`; what is missing counts as alike."""
    cpus = root / "sys/devices/system/cpu"
    core_of, capacity = {}, {}
    for number in logical:
        folder = cpus / f"cpu{number}"
        package, core = read_number(folder / "topology/physical_package_id"), read_number(folder / "topology/core_id")
        core_of[number] = (package or 0, number if core is None else core)
        capacity[number] = read_number(folder / "cpu_capacity") or 0
    hybrid = _numbers(root / "sys/devices/cpu_core/cpus")  # Intel's name for performance cores
    best = max(capacity.values(), default=0)
    fast = hybrid & logical or frozenset(number for number in logical if 2 * capacity[number] > best)
    return Topology(core_of, fast or logical)


def mac_cores() -> tuple[int, int]:
    """Return (physical cores, performance cores) as macOS tells them."""
    physical = sysctl_int("hw.physicalcpu") or 1
    return physical, sysctl_int("hw.perflevel0.physicalcpu") or physical


def sysctl_int(name: str) -> int | None:
    """Return a number that macOS tells under `name`, None where there is none."""
    raw = _sysctl(name)
    return int.from_bytes(raw, sys.byteorder) if raw and len(raw) in (4, 8) else None


def sysctl_text(name: str) -> str:
    """Return a text that macOS tells under `name`, "" where there is none."""
    return _sysctl(name).rstrip(b"\0").decode("utf-8", "replace")


def _sysctl(name: str) -> bytes:
    if platform.system() != "Darwin":
        return b""
    function = ctypes.CDLL(None).sysctlbyname
    size = ctypes.c_size_t(0)
    if function(name.encode(), None, ctypes.byref(size), None, 0) or not size.value:
        return b""
    room = ctypes.create_string_buffer(size.value)
    return b"" if function(name.encode(), room, ctypes.byref(size), None, 0) else room.raw[: size.value]


def _numbers(path: Path) -> frozenset[int]:
    """Read a list such as "0-7,16"."""
    found: set[int] = set()
    for part in read_text(path).split(","):
        first, _, last = part.partition("-")
        if first.isdigit():
            found.update(range(int(first), int(last if last.isdigit() else first) + 1))
    return frozenset(found)
