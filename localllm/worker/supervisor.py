"""One worker process per loaded model: started, watched, restarted, evicted; and found by name."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import replace

from localllm.errors import LocalLLMError, ModelNotFound, Unavailable
from localllm.runtime.config import RuntimeConfig
from localllm.worker import eviction, naming
from localllm.worker.event_stream import EventStream
from localllm.worker.eviction import Held
from localllm.worker.handle import StartProcess, Worker
from localllm.worker.lifecycle import ModelEntry, ModelState, SupervisorSettings
from localllm.worker.process import WorkerProcess
from localllm.worker.surroundings import Surroundings
from localllm.worker.unit import ModelUnit

__all__ = ["EventStream", "ModelEntry", "ModelState", "Supervisor", "SupervisorSettings", "Worker"]

_STORE_READ_EVERY_S = 1.0
_CALL_TIMEOUT_S = 2.0


def log_nothing(level: str, text: str) -> None:
    """Nobody reads."""


class Supervisor:
    """Owns every worker process. All of it runs on one event loop; the methods are for that loop's thread.

    That thread has to stay for as long as workers run: the kernel ends them with the thread that
    started them.
    """

    def __init__(
        self,
        settings: SupervisorSettings,
        log: Callable[[str, str], None] = log_nothing,
        start_process: StartProcess = WorkerProcess,
    ) -> None:
        """`log(level, text)` gets what happens to workers, never text of a request."""
        self._settings = settings
        self._units: dict[str, ModelUnit] = {}
        self._named: list[str] = []
        self._store_read_s = -_STORE_READ_EVERY_S
        self._idle_check: asyncio.TimerHandle | None = None
        self._tasks = set[asyncio.Task[None]]()
        self._ram_bytes = -1  # what each model may keep KV in, as it was last shared out
        self._is_closed = False
        self._around = Surroundings(
            settings, os.urandom(32), log, start_process, self._make_room, self._evict_one, self._plan_idle_check
        )

    async def start(self) -> None:
        """Find the named models and begin to load them, without waiting.

        Raises: ModelNotFound, ModelRefused, UsageError for a name or alias that cannot be.
        """
        settings = self._settings
        found = await asyncio.to_thread(naming.find_named, settings.models, settings.aliases)
        self._check_open()
        for known in found:
            self._units[known.key] = ModelUnit(known, self._around)
        self._named = [known.key for known in found]
        for key in self._named:
            self._units[key].begin()

    def hurry(self) -> None:
        """End at once what `close` is waiting for: what workers have not put on disk yet is lost."""
        for unit in self._units.values():
            unit.hurry()

    async def close(self) -> None:
        """End every worker and wait until it is gone; requests end with an error. Idempotent.

        Workers put on disk what they keep of prompts before, in the time that the settings give.
        """
        self._is_closed = True
        if self._idle_check is not None:
            self._idle_check.cancel()
            self._idle_check = None
        error = Unavailable("The server is stopping.", "start it again: localllm serve")
        await asyncio.gather(*(unit.stop(error) for unit in self._units.values()))
        if self._tasks:
            await asyncio.wait(set(self._tasks))

    def entries(self) -> list[ModelEntry]:
        """Return all models that can be asked for: those named at start, then the store's."""
        self._read_store()
        return [unit.entry() for unit in self._in_order()]

    def entry(self, name: str | None) -> ModelEntry:
        """Return the model of this name, or the first named one for none.

        Raises: ModelNotFound, which lists what there is.
        """
        return self._find(name).entry()

    async def worker(self, name: str | None, wait_s: float = 15.0) -> Worker:
        """Return a model's worker, loaded where it was not.

        Raises: Unavailable (details: retry_after_s; state where it is on its way), NotEnoughMemory,
        ModelRefused, ModelNotFound.
        """
        self._check_open()
        return await self._find(name).ready(wait_s)

    async def load(self, name: str | None) -> ModelEntry:
        """Load a model and wait for it, however long it takes. Raises as `worker`."""
        self._check_open()
        unit = self._find(name)
        await unit.ready(None, cooldown_s=0.0)
        return unit.entry()

    async def unload(self, name: str | None) -> ModelEntry:
        """End a model's worker; requests in it end with an error event. Raises: ModelNotFound."""
        unit = self._find(name)
        await unit.stop(Unavailable("The model was unloaded.", "send it again: it is loaded on demand"))
        return unit.entry()

    def workers(self) -> list[Worker]:
        """Return the workers of the models that are loaded."""
        return [worker for unit in self._in_order() if (worker := unit.worker) is not None]

    def _in_order(self) -> Iterable[ModelUnit]:
        named = [self._units[key] for key in self._named]
        return [*named, *(unit for key, unit in self._units.items() if key not in self._named)]

    def _find(self, name: str | None) -> ModelUnit:
        """Return the model of this name; only where it is not known yet, the store is read."""
        if not name:
            return self._default()
        try:
            return self._known(name)
        except ModelNotFound:
            self._read_store()
            return self._known(name)

    def _known(self, name: str) -> ModelUnit:
        units = list(self._in_order())
        chosen = naming.choose(name, [unit.known for unit in units])
        return next(unit for unit in units if unit.known is chosen)

    def _default(self) -> ModelUnit:
        if self._named:
            return self._units[self._named[0]]
        self._read_store()
        units = list(self._in_order())
        if len(units) == 1:
            return units[0]
        raise naming.not_found("The request names no model", [unit.known for unit in units])

    def _read_store(self) -> None:
        """Take in models that were pulled or removed meanwhile; what is loaded stays as it is."""
        now_s = time.monotonic()
        if now_s - self._store_read_s < _STORE_READ_EVERY_S:
            return
        self._store_read_s = now_s
        there = {known.key: known for known in naming.in_store()}
        for key, unit in list(self._units.items()):
            if key not in self._named and unit.can_be_forgotten and there.get(key) != unit.known:
                del self._units[key]
        names = {unit.known.name for unit in self._units.values()}
        for key, known in there.items():
            if key not in self._units and known.name not in names:
                self._units[key] = ModelUnit(known, self._around)

    def _held(self, besides: ModelUnit | None = None) -> list[Held]:
        """Return what takes memory, or is about to."""
        return [
            Held(key, unit.memory_bytes, unit.is_busy, unit.known.is_pinned, unit.used_s)
            for key, unit in self._units.items()
            if unit is not besides and (unit.worker is not None or unit.memory_bytes)
        ]

    async def _make_room(self, unit: ModelUnit) -> RuntimeConfig:
        """Unload what stands in the way of a model under --max-memory; return its runtime's settings.

        How much of RAM it keeps KV in, where nobody says, is what is left then: no model has to go for that.
        """
        runtime, limit_bytes = self._settings.runtime, self._settings.max_memory_bytes
        unit.memory_bytes = 0
        if limit_bytes is None:
            return runtime
        tiers = runtime.tiers
        need_bytes = await asyncio.to_thread(self._estimate_bytes, unit) + (tiers.ram_bytes or 0)
        unit.memory_bytes = need_bytes  # others that make room now have to count it
        await self._evict(eviction.make_room(need_bytes, self._held(besides=unit), limit_bytes, time.monotonic()))
        if tiers.ram_bytes is not None:
            return runtime
        return replace(runtime, tiers=replace(tiers, ram_bytes=await self._share_ram(limit_bytes)))

    async def _share_ram(self, limit_bytes: int) -> int:
        """Return how much each model may keep KV in, and tell it to those that are loaded."""
        model_bytes = [one.memory_bytes for one in self._held()]
        for unit in list(self._units.values()):
            if unit.known.is_pinned and unit.is_to_come:
                with contextlib.suppress(LocalLLMError):  # it is told when it is loaded
                    model_bytes.append(await asyncio.to_thread(self._estimate_bytes, unit))
        ram_bytes = eviction.tier_bytes(limit_bytes, model_bytes)
        if ram_bytes != self._ram_bytes:
            self._ram_bytes = ram_bytes
            for worker in self.workers():
                self._keep_task(asyncio.create_task(_limit_ram(worker, ram_bytes)))
        return ram_bytes

    def _estimate_bytes(self, unit: ModelUnit) -> int:
        """Return about what a model takes, without what it keeps of prompts. Raises ModelRefused."""
        return eviction.estimate_bytes(unit.known.path, self._settings.config)

    async def _evict_one(self, unit: ModelUnit) -> bool:
        """Unload the model that is missed least; say whether there was one."""
        key = eviction.least_used(self._held(besides=unit), time.monotonic())
        await self._evict((key,) if key else ())
        return key is not None

    async def _evict(self, keys: Iterable[str]) -> None:
        for key in keys:
            unit = self._units[key]
            self._around.log("info", f"{unit.known.name}: unloaded to make room")
            await unit.stop(Unavailable("The model was unloaded to make room for another.", "send it again"))

    def _plan_idle_check(self) -> None:
        """See that the next model that is unused for too long gets unloaded; with none, there is no timer."""
        keep_alive_s = self._settings.keep_alive_s
        if keep_alive_s is None or self._idle_check is not None or self._is_closed:
            return
        due_s = eviction.due_in_s(self._held(), keep_alive_s, time.monotonic())
        if due_s is not None:
            self._idle_check = asyncio.get_running_loop().call_later(due_s, self._unload_idle, keep_alive_s)

    def _unload_idle(self, keep_alive_s: float) -> None:
        self._idle_check = None
        for key in eviction.unused(self._held(), keep_alive_s, time.monotonic()):
            unit = self._units[key]
            self._around.log("info", f"{unit.known.name}: unloaded, not used for {keep_alive_s:g} s")
            self._keep_task(asyncio.create_task(unit.stop(Unavailable("The model was unloaded.", "send it again"))))
        self._plan_idle_check()

    def _keep_task(self, task: asyncio.Task[None]) -> None:
        """Hold on to work that nobody awaits, until it is done."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _check_open(self) -> None:
        if self._is_closed:
            raise Unavailable("The server is stopping.", "start it again: localllm serve", retry_after_s=5)


async def _limit_ram(worker: Worker, limit_bytes: int) -> None:
    """Tell a worker how much RAM it may keep KV in; one that dies or hangs keeps nothing for long."""
    with contextlib.suppress(LocalLLMError):
        await worker.call("limit_ram", {"limit_bytes": limit_bytes}, timeout_s=_CALL_TIMEOUT_S)
