"""How much memory this process may still take: the machine's, its control group's, its own limits."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator
from pathlib import Path

_NO_LIMIT = 2**60


def available_bytes(root: Path = Path("/")) -> int:
    """Return the bytes this process can take without swapping or being killed.

    The least of what the machine has available, what each control group (v1 or v2) leaves, and
    the process's own limits. `root`: where proc and sys are mounted.
    """
    return max(0, min(_machine_available(root), *_group_room(root), *_own_limits(root), _NO_LIMIT))


def total_bytes(root: Path = Path("/")) -> int:
    """Return the memory of the machine, or of the control group where that is less."""
    total = _meminfo(root).get("MemTotal") or _psutil_memory()[0]
    return min([total, *(limit for limit, _, _ in _groups(root))])


def _machine_available(root: Path) -> int:
    return _meminfo(root).get("MemAvailable") or _psutil_memory()[1]


def _psutil_memory() -> tuple[int, int]:
    """Return (total, available) where there is no /proc: macOS."""
    import psutil

    memory = psutil.virtual_memory()
    return int(memory.total), int(memory.available)


def _meminfo(root: Path) -> dict[str, int]:
    values = {}
    for line in _text(root / "proc/meminfo").splitlines():
        name, _, rest = line.partition(":")
        amount = rest.split()
        if amount and amount[0].isdigit():
            values[name] = int(amount[0]) * 1024
    return values


def _group_room(root: Path) -> list[int]:
    """Return what each limited control group leaves; its file cache counts as free."""
    return [limit - max(0, used - cache) for limit, used, cache in _groups(root)]


def _groups(root: Path) -> Iterator[tuple[int, int, int]]:
    """Yield (limit, used, reclaimable file cache) of this process's control groups, outwards."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = ([*line.split(":", 2), "", ""])[:3]
        if controllers == "":
            base, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "")
        elif "memory" in controllers.split(","):
            base = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
        else:
            continue
        inside = Path(path.lstrip("/"))
        for folder in (base / inside, *(base / parent for parent in inside.parents)):
            limit = _number(folder / names[0])
            if limit is not None and limit < _NO_LIMIT:
                stat = dict(_pairs(folder / "memory.stat"))
                cache = stat.get(f"{names[2]}inactive_file", 0) + stat.get(f"{names[2]}active_file", 0)
                yield limit, _number(folder / names[1]) or 0, cache


def _own_limits(root: Path) -> list[int]:
    """Return what ulimit leaves of address space and data."""
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft == resource.RLIM_INFINITY or sys.platform == "darwin":
        return []
    pages = _text(root / "proc/self/statm").split()
    return [soft - int(pages[0]) * resource.getpagesize()] if pages else [soft]


def _pairs(path: Path) -> Iterator[tuple[str, int]]:
    for line in _text(path).splitlines():
        name, _, value = line.partition(" ")
        if value.isdigit():
            yield name, int(value)


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdigit() else None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
