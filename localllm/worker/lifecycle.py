"""The values of the supervisor: what it is told to keep, what it shows of a model, and when a restart is due."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from localllm.runtime.config import LoadConfig, RuntimeConfig


class ModelState(Enum):
    """Where a model stands; what moves it on is in `Supervisor`."""

    UNLOADED = "unloaded"
    LOADING = "loading"
    READY = "ready"
    RESTARTING = "restarting"
    FAILED = "failed"
    REFUSED = "refused"
    STOPPING = "stopping"


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """A model as it was at one moment.

    `aliases`: further names that it answers to. `created_s`: the file's time. `reason`: why it is not
    ready, where something is wrong. `is_pinned`: never unloaded by itself. `n_requests`: at work now.
    `last_used_s`: time.time() of the last request, 0 without one. `model`: what
    `worker.description.describe_loaded` says, {} unless loaded.
    """

    name: str
    aliases: tuple[str, ...]
    path: Path
    size_bytes: int
    created_s: int
    state: ModelState
    reason: str
    is_pinned: bool
    n_requests: int
    last_used_s: float
    pid: int | None
    model: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class SupervisorSettings:
    """What to serve, and how.

    `models`: references that are loaded at start and stay; `aliases`: further names of the first.
    `max_memory_bytes`: what all workers together may take, by estimate (None = what the machine has).
    `keep_alive_s`: unused models that were not named at start are unloaded after it (None = never).
    `watchdog_s`: the least time without progress that ends a worker.
    """

    models: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    config: LoadConfig = LoadConfig()
    runtime: RuntimeConfig = RuntimeConfig()
    nice: int = 0
    max_memory_bytes: int | None = None
    keep_alive_s: float | None = 600.0
    watchdog_s: float = 60.0


BACKOFF_S = (0.0, 1.0, 5.0, 30.0)
MAX_DEATHS = 5


class Restarts:
    """Counts the deaths of a model's workers since its last good answer, and says when to start the next."""

    def __init__(self) -> None:
        self.n_deaths = 0

    def answered(self) -> None:
        """A good answer came: what was before does not count any more."""
        self.n_deaths = 0

    def died(self) -> float | None:
        """Return the seconds to wait before the next start; None where it died too often to try again by itself."""
        self.n_deaths += 1
        if self.n_deaths >= MAX_DEATHS:
            return None
        return BACKOFF_S[min(self.n_deaths, len(BACKOFF_S)) - 1]
