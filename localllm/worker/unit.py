"""One model's way through its states: loaded, served, started again when its worker dies, stopped."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Awaitable

from localllm.errors import LocalLLMError, ModelNotFound, ModelRefused, NotEnoughMemory, Unavailable
from localllm.models.system import resident_bytes
from localllm.worker.attempts import Attempts
from localllm.worker.handle import Gone, Worker
from localllm.worker.launcher import Launcher
from localllm.worker.lifecycle import ModelEntry, ModelState, Restarts, died_too_often, not_yet, resting_place
from localllm.worker.naming import Known
from localllm.worker.surroundings import Surroundings

COOLDOWN_S = 5.0
"""After a load failed, requests get its error for so long before one of them tries again."""

_AT_REST = (ModelState.UNLOADED, ModelState.FAILED, ModelState.REFUSED)


class ModelUnit:
    """One model. Its state is changed here only, on the event loop's thread; at most one worker is its own."""

    def __init__(self, known: Known, around: Surroundings) -> None:
        self.known = known
        self.state = ModelState.UNLOADED
        self.error: LocalLLMError | None = None
        self.used_s = 0.0
        self.memory_bytes = 0
        self._around = around
        self._launcher = Launcher(known, around.settings, around.key, around.start, self._log_of_worker)
        self._task: asyncio.Task[None] | None = None
        self._stopping: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._attempts = Attempts(known)
        self._restarts = Restarts()
        self._last_used_epoch_s = 0.0
        self._n_stops = self._n_waiting = 0
        if known.problem:
            self._rest(ModelState.REFUSED, ModelRefused(f"{known.name} cannot be used: {known.problem}", "localllm ls"))

    @property
    def worker(self) -> Worker | None:
        """The worker, while requests can be given to it."""
        return self._launcher.current if self.state is ModelState.READY else None

    @property
    def is_busy(self) -> bool:
        """Say whether it is at work, or on its way into or out of another state."""
        is_moving = self.state not in (*_AT_REST, ModelState.READY)
        return is_moving or (self._launcher.current is not None and self._launcher.current.is_busy)

    @property
    def is_to_come(self) -> bool:
        """Say whether it has not been given memory yet, and nothing speaks against it."""
        return not self.memory_bytes and self.state in (ModelState.UNLOADED, ModelState.LOADING)

    @property
    def can_be_forgotten(self) -> bool:
        """Say whether nothing runs and nobody waits."""
        is_at_work = self._launcher.current or self._task or self._stopping
        return self.state in _AT_REST and not is_at_work and not self._n_waiting

    def entry(self) -> ModelEntry:
        """Return what can be told of it now."""
        known, worker = self.known, self.worker
        try:
            facts = [path.stat() for path in known.files]
        except OSError:
            facts = []
        return ModelEntry(
            name=known.name,
            aliases=known.aliases,
            path=known.path,
            size_bytes=sum(one.st_size for one in facts),
            created_s=int(max((one.st_mtime for one in facts), default=0)),
            state=self.state,
            reason=self.error.message if self.error else "",
            is_pinned=known.is_pinned,
            n_requests=worker.n_requests if worker else 0,
            last_used_s=self._last_used_epoch_s,
            pid=self._launcher.current.pid if self._launcher.current else None,
            model=worker.model if worker else {},
            is_changed=worker is not None and self._launcher.is_changed,
        )

    async def ready(self, wait_s: float | None, cooldown_s: float = COOLDOWN_S) -> Worker:
        """Return its worker, loaded where it was not, after at most `wait_s` (None: however long it takes).

        Raises: Unavailable, NotEnoughMemory, ModelRefused, ModelNotFound (its file is gone).
        """
        self._n_waiting += 1
        try:
            return await self._ready(math.inf if wait_s is None else time.monotonic() + wait_s, cooldown_s)
        finally:
            self._n_waiting -= 1

    async def _ready(self, end_s: float, cooldown_s: float) -> Worker:
        n_stops, has_tried = self._n_stops, False
        while True:
            self._use()
            worker = self.worker
            if worker is not None and worker.is_alive:
                return worker
            if self.state in _AT_REST:
                self._check_may_try(has_tried, cooldown_s)
                self.begin()
            has_tried = True
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                raise not_yet(self.state, self._attempts.left_s(self.state))
            changed = self._changed
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(None if left_s == math.inf else left_s):
                    await changed.wait()
            if self._n_stops != n_stops:
                raise Unavailable("The model was unloaded meanwhile.", "try again in a moment", retry_after_s=1)

    def begin(self) -> None:
        """Start to load it, where it is at rest."""
        if self.state in _AT_REST and self._stopping is None:
            self._attempts.began()
            self._set(ModelState.LOADING)
            self._run(self._bring_up(0.0))

    async def stop(self, error: LocalLLMError) -> None:
        """Unload it, whatever it is at; its requests end with `error`. Done even where the caller is cancelled."""
        self._n_stops += 1
        if self._stopping is None:
            self._set(ModelState.STOPPING if self._launcher.current or self._task else self.state)
            self._stopping = asyncio.create_task(self._stop(error))
        await asyncio.shield(self._stopping)

    def hurry(self) -> None:
        """Wait for nothing more where it is stopping: what its worker has not kept yet is lost."""
        if self._stopping is not None and self._launcher.current is not None:
            self._launcher.current.kill()

    async def _stop(self, error: LocalLLMError) -> None:
        worker, task = self._launcher.current, self._task
        if worker is not None:
            worker.end(error)
        if task is not None:
            task.cancel()
            await asyncio.wait({task})
        await self._launcher.stop(error)
        self._task = self._stopping = None
        self.memory_bytes = 0
        if self.state is ModelState.STOPPING:
            self.error = None
            self.state = ModelState.UNLOADED
        self._set(self.state)

    async def _bring_up(self, delay_s: float) -> None:
        """Load it; where its worker dies in that, again, until it stands or was tried too often."""
        due_s: float | None = delay_s
        while due_s is not None:
            self._attempts.due_in(due_s)
            await asyncio.sleep(due_s)
            try:
                await self._load()
                return
            except Gone:
                due_s = await self._bury()
            except OSError as error:
                await self._bury_failed()
                due_s = self._died(f"its process could not be started ({error.strerror})")
            except LocalLLMError as error:
                await self._bury_failed()
                due_s = self._failed(error)
            except Exception as error:  # a model is never left without a state that its requests can be told
                await self._bury_failed()
                due_s = self._failed(LocalLLMError(f"{type(error).__name__} in the supervisor"))

    async def _load(self) -> None:
        """Have a worker load it; only what ran before does not wait for its turn. Raises: Gone, OSError, its errors."""
        is_new = self.state is ModelState.LOADING
        async with self._around.turn if is_new else contextlib.nullcontext():
            await self._load_now()

    async def _load_now(self) -> None:
        identity = self.known.identity()
        if not identity:
            raise ModelNotFound(f"The files of {self.known.name} are gone.", "localllm ls")
        runtime = await self._around.make_room(self)
        while True:
            self._attempts.began()
            try:
                self._stand(await self._launcher.load(runtime, identity))
                return
            except NotEnoughMemory:
                await self._bury_failed()
                if not await self._around.evict_one(self):
                    raise

    def _stand(self, worker: Worker) -> None:
        """Take the loaded worker into service."""
        load_s = self._attempts.loaded()
        self.memory_bytes = max(self.memory_bytes, resident_bytes(worker.pid))
        worker.on_death = self._on_death
        worker.link.on_answer = self._on_answer
        self.error, self._task = None, None
        self._around.log("info", f"{self.known.name}: loaded in {load_s:.1f} s (process {worker.pid})")
        self._set(ModelState.READY)

    def _on_death(self) -> None:
        self._set(ModelState.RESTARTING)
        self._run(self._revive())

    async def _revive(self) -> None:
        due_s = await self._bury()
        if due_s is not None:
            await self._bring_up(due_s)

    def _on_answer(self, is_good: bool) -> None:
        if is_good:
            self._restarts.answered()
        self._use()
        self._around.noticed()

    async def _bury(self) -> float | None:
        """Wait for the end of a worker that died, and return when the next is due."""
        death = await self._launcher.bury()
        if death.is_by_loading:
            text = f"loading it crashes its process ({death.how}); it is not tried again until the file changes"
            return self._failed(ModelRefused(f"{self.known.name}: {text}.", f"localllm show {self.known.name}"))
        return self._died(death.how)

    async def _bury_failed(self) -> None:
        """Wait for the end of a worker that said why it cannot load."""
        await self._launcher.stop(Unavailable("The model could not be loaded."))

    def _died(self, how: str) -> float | None:
        due_s = self._restarts.died()
        name, n_deaths = self.known.name, self._restarts.n_deaths
        if due_s is None:
            self._around.log("error", f"{name}: {how}; not started again by itself after {n_deaths} times")
            self._rest(ModelState.FAILED, died_too_often(n_deaths, how))
            return None
        self._around.log("error", f"{name}: {how}; it is started again in {due_s:g} s")
        self.error = Unavailable(f"The model's process died: {how}.", retry_after_s=1)
        self._set(ModelState.RESTARTING)
        return due_s

    def _failed(self, error: LocalLLMError) -> float | None:
        """Take in that the model cannot be loaded; return when to try again by itself, which is after a death only."""
        if self.state is ModelState.RESTARTING and isinstance(error, (NotEnoughMemory, Unavailable)):
            return self._died(error.message)
        hint = f" Hint: {error.hint}" if error.hint else ""
        self._around.log("error", f"{self.known.name}: not loaded: {error.message}{hint}")
        if isinstance(error, ModelRefused):
            self._attempts.refused()
        self._rest(*resting_place(error))
        return None

    def _rest(self, state: ModelState, error: LocalLLMError) -> None:
        self.error = error
        self.memory_bytes = 0
        self._task = None
        self._attempts.failed()
        self._set(state)

    def _check_may_try(self, has_tried: bool, cooldown_s: float) -> None:
        """Raise the error that it rests with, where trying again is of no use yet."""
        if self.error is not None and (has_tried or not self._attempts.is_of_use(self.state, cooldown_s)):
            raise self.error

    def _use(self) -> None:
        self.used_s = time.monotonic()
        self._last_used_epoch_s = time.time()

    def _set(self, state: ModelState) -> None:
        self.state = state
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        self._around.noticed()

    def _run(self, work: Awaitable[None]) -> None:
        self._task = asyncio.ensure_future(work)

    def _log_of_worker(self, level: str, text: str) -> None:
        self._around.log(level, f"{self.known.name}: {text}")
