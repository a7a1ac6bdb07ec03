"""One worker process per loaded model: started, watched, restarted, evicted; and found by name."""

from __future__ import annotations

from collections.abc import Callable

from localllm.worker.lifecycle import ModelEntry, ModelState, SupervisorSettings
from localllm.worker.link import EventStream, Worker

__all__ = ["EventStream", "ModelEntry", "ModelState", "Supervisor", "SupervisorSettings", "Worker"]


def log_nothing(level: str, text: str) -> None:
    """Nobody reads."""


class Supervisor:
    """Owns every worker process. All of it runs on one event loop; the methods are for that loop's thread."""

    def __init__(self, settings: SupervisorSettings, log: Callable[[str, str], None] = log_nothing) -> None:
        self._settings = settings
        self._log = log

    async def start(self) -> None:
        """Find the named models and begin to load them, without waiting. Raises: ModelNotFound, UsageError, ..."""
        raise NotImplementedError

    async def close(self) -> None:
        """End every worker and wait until it is gone. Idempotent."""
        raise NotImplementedError

    def entries(self) -> list[ModelEntry]:
        """Return all models that can be asked for: those named at start, then the store's."""
        raise NotImplementedError

    def entry(self, name: str | None) -> ModelEntry:
        """Return the model of this name, or the first named one for none.

        Raises: ModelNotFound, which lists what there is.
        """
        raise NotImplementedError

    async def worker(self, name: str | None, wait_s: float = 15.0) -> Worker:
        """Return a model's worker, loaded where it was not.

        Raises: Unavailable (details: retry_after_s, state), NotEnoughMemory, ModelRefused, ModelNotFound.
        """
        raise NotImplementedError

    async def load(self, name: str | None) -> ModelEntry:
        """Load a model and wait for it. Raises as `worker`."""
        raise NotImplementedError

    async def unload(self, name: str | None) -> ModelEntry:
        """End a model's worker; requests in it end with an error event. Raises: ModelNotFound."""
        raise NotImplementedError

    def workers(self) -> list[Worker]:
        """Return the workers of the models that are loaded."""
        raise NotImplementedError
