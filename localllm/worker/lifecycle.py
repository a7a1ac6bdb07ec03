"""The supervisor's values and rules: states, entries, settings, when a restart is due, what is told meanwhile."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from localllm.errors import LocalLLMError, ModelNotFound, ModelRefused, NotEnoughMemory, Unavailable
from localllm.runtime.config import LoadConfig, RuntimeConfig


class ModelState(Enum):
    """Where a model stands; `worker.unit.ModelUnit` moves it on."""

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
    `worker.description.describe_loaded` says, {} unless loaded. `is_changed`: the file is another now than
    the one that was loaded.
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
    is_changed: bool = False


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


STEP_S = 3.0
"""How long a worker that is asked to end may take for the step at work, before it counts as stuck."""

KEEPING_LINE = b"localllm: keeping what was computed"
"""What a worker says on stderr when it has seen that it is to end: one that does not is stopped, or hangs."""

_LAST_S = 2.0  # for the last exports, and to free the engine


def keeping_s(runtime: RuntimeConfig) -> float:
    """Return how long a worker may take to put on disk what it has kept, once its step is done; 0 without a disk."""
    tiers = runtime.tiers
    return tiers.flush_s + _LAST_S if tiers.disk_dir and tiers.disk_bytes != 0 else 0.0


RETRY_FAILED_S = 30


def resting_place(error: LocalLLMError) -> tuple[ModelState, LocalLLMError]:
    """Return where a model rests that could not be loaded, and what those who ask for it are told."""
    match error:
        case ModelRefused():
            return ModelState.REFUSED, error
        case NotEnoughMemory() | ModelNotFound():
            return ModelState.FAILED, error
        case Unavailable():  # nothing is wrong with it
            return ModelState.UNLOADED, error
    text = f"The model could not be loaded: {error.message}"
    return ModelState.FAILED, Unavailable(text, error.hint, retry_after_s=RETRY_FAILED_S)


def died_too_often(n_deaths: int, how: str) -> Unavailable:
    """Return what is told of a model that is not started again by itself."""
    text = f"The model's process died {n_deaths} times in a row: {how}."
    return Unavailable(text, "look at the server's log", retry_after_s=RETRY_FAILED_S)


def not_yet(state: ModelState, left_s: float) -> Unavailable:
    """Return what is told of a model that is on its way, probably for `left_s` more."""
    is_restarting = state is ModelState.RESTARTING
    text = "The model's process died; it is being started again." if is_restarting else "The model is being loaded."
    retry_after_s = max(1, math.ceil(left_s))
    code = "restarting" if is_restarting else "loading"
    return Unavailable(text, "try again in a moment", code=code, retry_after_s=retry_after_s, state=state.value)
