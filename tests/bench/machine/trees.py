"""Made-up trees of /proc and /sys."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def write(root: Path, files: Mapping[str, str]) -> Path:
    """Write files below `root`; return it."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


def stat_line(
    pid: int, parent: int = 1, *, cpu: int = 0, waited: int = 0, started: int = 100, name: str = "server"
) -> str:
    """Return a process's line of numbers; times in ticks."""
    head = f"{pid} ({name}) S {parent} {pid} {pid} 0 -1 4194560 100 0 0 0"
    return f"{head} {cpu} 0 {waited} 0 20 0 1 0 {started} 1000000 500 0"


def cpu_lines(*cores: tuple[int, int, int]) -> str:
    """Return /proc/stat with (busy, idle, stolen) ticks of each core."""
    lines = [f"cpu{at} {busy} 0 0 {idle} 0 0 0 {stolen} 0 0" for at, (busy, idle, stolen) in enumerate(cores)]
    total = [sum(column) for column in zip(*cores, strict=True)]
    return "\n".join([f"cpu  {total[0]} 0 0 {total[1]} 0 0 0 {total[2]} 0 0", *lines, "intr 1 0 0", "ctxt 5"])
