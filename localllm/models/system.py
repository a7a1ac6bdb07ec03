"""Reads what the system tells; where there is no such file or process, nothing is told."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def read_text(path: Path) -> str:
    """Return the text of a small file without the white space around it; "" where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def read_number(path: Path) -> int | None:
    """Return the whole number in a file; None where there is none ("max", no file)."""
    text = read_text(path)
    return int(text) if text.isdigit() else None


def resident_bytes(pid: int | None = None) -> int:
    """Return what a process (this one for None) holds in RAM; 0 where nobody tells."""
    import psutil

    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0


def control_groups(root: Path, controller: str) -> Iterator[tuple[Path, bool]]:
    """Yield (folder, whether it is of version 2) of this process's groups under `controller`, outwards.

    `root`: where proc and sys are mounted.
    """
    for line in read_text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = ([*line.split(":", 2), "", ""])[:3]
        is_v2 = controllers == ""
        if not is_v2 and controller not in controllers.split(","):
            continue
        base = root / "sys/fs/cgroup" if is_v2 else root / "sys/fs/cgroup" / controller
        inside = Path(path.lstrip("/"))
        for folder in (inside, *inside.parents):
            yield base / folder, is_v2
