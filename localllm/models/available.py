"""How much memory this process may still take: the machine's, its control group's, its own limits."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator
from pathlib import Path

from localllm.models.system import control_groups, read_number, read_text

_NO_LIMIT = 2**60
_GROUP_FILES_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes")
_GROUP_FILES_V2 = ("memory.max", "memory.current")


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
    for line in read_text(root / "proc/meminfo").splitlines():
        name, _, rest = line.partition(":")
        amount = rest.split()
        if amount and amount[0].isdigit():
            values[name] = int(amount[0]) * 1024
    return values


def _group_room(root: Path) -> list[int]:
    """Return what each limited control group leaves; its file cache counts as free."""
    return [limit - max(0, used - cache) for limit, used, cache in _groups(root)]


def _groups(root: Path) -> Iterator[tuple[int, int, int]]:
    """Yield (limit, used, reclaimable file cache) of this process's limited control groups, outwards."""
    for folder, is_v2 in control_groups(root, "memory"):
        limit_name, used_name = _GROUP_FILES_V2 if is_v2 else _GROUP_FILES_V1
        prefix = "" if is_v2 else "total_"
        limit = read_number(folder / limit_name)
        if limit is not None and limit < _NO_LIMIT:
            stat = dict(_pairs(folder / "memory.stat"))
            cache = stat.get(f"{prefix}inactive_file", 0) + stat.get(f"{prefix}active_file", 0)
            yield limit, read_number(folder / used_name) or 0, cache


def _own_limits(root: Path) -> list[int]:
    """Return what ulimit leaves of the address space."""
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft == resource.RLIM_INFINITY or sys.platform == "darwin":
        return []
    pages = read_text(root / "proc/self/statm").split()
    return [soft - int(pages[0]) * resource.getpagesize()] if pages else [soft]


def _pairs(path: Path) -> Iterator[tuple[str, int]]:
    for line in read_text(path).splitlines():
        name, _, value = line.partition(" ")
        if value.isdigit():
            yield name, int(value)
