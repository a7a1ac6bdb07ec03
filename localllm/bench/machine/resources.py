"""What a run cost the machine, and what disturbed it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Resources:
    """Found by watching a run. None = not readable here.

    `memory_kind`: "pss" (shared pages counted once) or "rss". `joules_of`: what the energy counts
    ("cpu package", "gpu0"). `server_cpu_s`: CPU time of the server's processes. `disturbances`: in
    sentences why the run should not be used: it swapped, throttled, or others took the cores.
    `unseen`: which of these could not be looked for here ("load of others", "throttling", ...).
    """

    peak_memory_bytes: int | None = None
    memory_kind: str = "pss"
    joules: float | None = None
    joules_of: tuple[str, ...] = ()
    server_cpu_s: float | None = None
    disturbances: tuple[str, ...] = ()
    unseen: tuple[str, ...] = ()
