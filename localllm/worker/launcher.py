"""A model's workers, one after another: started with what is known of the last ones, and buried."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from localllm.errors import LocalLLMError
from localllm.models.disk.files import Identity
from localllm.runtime.config import RuntimeConfig
from localllm.worker.description import config_to_wire, runtime_to_wire
from localllm.worker.handle import StartProcess, Worker
from localllm.worker.lifecycle import SupervisorSettings, keeping_s
from localllm.worker.naming import Known
from localllm.worker.poison import NATIVE_DEATHS, PoisonLedger
from localllm.worker.protocol import Load

_LOADER_CRASHES = NATIVE_DEATHS | {signal.SIGILL, signal.SIGFPE}


@dataclass(frozen=True, slots=True)
class Death:
    """How a worker ended. `is_by_loading`: native code crashed in loading a file that no worker has loaded yet."""

    how: str
    is_by_loading: bool


class Launcher:
    """Starts one model's workers, at most one at a time. `current`: the one that there is, loaded or not.

    `key`: for fingerprints. `log(level, text)` gets what workers say.
    """

    def __init__(
        self,
        known: Known,
        settings: SupervisorSettings,
        key: bytes,
        start: StartProcess,
        log: Callable[[str, str], None],
    ) -> None:
        self.current: Worker | None = None
        self._known = known
        self._settings = settings
        self._key = key
        self._start = start
        self._log = log
        self._ledger = PoisonLedger()
        self._loaded_identity: object = None

    @property
    def is_changed(self) -> bool:
        """Say whether the file is another now than the one that was loaded last."""
        return self._known.identity() != self._loaded_identity

    async def load(self, runtime: RuntimeConfig, identity: tuple[Identity, ...]) -> Worker:
        """Start a worker and have it load the file, which is of this identity. Raises: Gone, OSError, its errors."""
        known, settings, now_s = self._known, self._settings, time.monotonic()
        order = Load(
            str(known.path),
            known.name,
            config_to_wire(settings.config),
            runtime_to_wire(runtime),
            self._key,
            self._ledger.to_run_alone(now_s),
            self._ledger.to_refuse(now_s),
            settings.nice,
        )
        worker = Worker(known.name, self._start, self._log, settings.watchdog_s, order, keeping_s(runtime))
        self.current = worker
        await worker.load(sum(one.size_bytes for one in identity))
        self._loaded_identity = identity
        if known.sha256 and not worker.model.get("sha256"):
            worker.model = {**worker.model, "sha256": known.sha256}
        return worker

    async def bury(self) -> Death:
        """Wait for the end of a worker that died, and learn from it."""
        worker = self.current
        assert worker is not None
        code = await worker.gone()
        was_loaded = bool(worker.model)
        if -code in NATIVE_DEATHS or worker.is_hung:
            self._ledger.died_with(worker.dying_step(), worker.ran_alone, time.monotonic())
        how = worker.how_it_ended(code)
        worker.dispose()
        self.current = None
        is_crash = not was_loaded and -code in _LOADER_CRASHES and not worker.is_hung
        return Death(how, is_by_loading=is_crash and self.is_changed)

    async def stop(self, error: LocalLLMError) -> None:
        """End the worker that there is, requests by `error`, and leave nothing of it."""
        if self.current is not None:
            await self.current.stop(error)
        self.current = None
