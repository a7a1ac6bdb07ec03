"""Runs one run after another on a server: tries, warms up, fills caches as the run asks, measures, counts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from localllm.bench.serving.counting import count
from localllm.bench.serving.driving import OnProgress
from localllm.bench.serving.endpoint import Endpoint, discover
from localllm.bench.serving.model_file import token_counter
from localllm.bench.serving.one_run import Run
from localllm.bench.serving.result import RunResult
from localllm.bench.serving.servers.running import Running
from localllm.bench.serving.spec import Api, Cache, RunSpec
from localllm.bench.serving.trying import Tried, try_asks
from localllm.errors import UsageError
from localllm.models.info import ModelInfo


class Runner:
    """Measures one server. One run at a time; `stop` may come from any thread.

    `info_of`: what the file of the model says, where it is known, to count tokens that the server does not count.
    `on_progress` hears what is done, how much of it and of how much (0: not known), in the thread that runs.
    """

    def __init__(
        self,
        running: Running,
        api: Api,
        *,
        key: str | None = None,
        info_of: Callable[[Endpoint], ModelInfo | None] = lambda endpoint: None,
        on_progress: OnProgress,
    ) -> None:
        self._running = running
        self._api = api
        self._key = key
        self._info_of = info_of
        self._on_progress = on_progress
        self._endpoint: Endpoint | None = None
        self._tried: dict[tuple[str, int], Tried] = {}
        self._is_stopped = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop = asyncio.Event()

    @property
    def endpoint(self) -> Endpoint:
        """What is measured, found out at the first use. Raises as `discover`."""
        if self._endpoint is None:
            found = discover(self._running.url, api=self._api, key=self._key)
            self._endpoint = replace(found, counts=token_counter(self._info_of(found)))
        return self._endpoint

    def stop(self) -> None:
        """End the run that is under way, and every later one before it begins; what there is is returned."""
        self._is_stopped = True
        loop = self._loop
        if loop is not None:
            with suppress(RuntimeError):  # it ended just now
                loop.call_soon_threadsafe(self._stop.set)

    def check(self, cache: Cache) -> None:
        """Raise UsageError where this server cannot be measured under a protocol."""
        if cache is Cache.RESTART and not self._running.can_restart:
            raise UsageError(
                f"cache=restart needs a server that was started here, and {self._running.name} was not.",
                "localllm bench serve MODEL, or cache=cold+warm",
            )

    def run(self, spec: RunSpec) -> RunResult:
        """Measure one run and return what it found; `partial` where it was stopped or the server died.

        Raises: UsageError for a run that this server cannot be asked for, ServerUnreachable where the key is not
        taken, LocalLLMError where the server does not come back from a restart.
        """
        self.check(spec.cache)
        try:
            return asyncio.run(self._run(spec))
        finally:
            self._loop = None

    async def _run(self, spec: RunSpec) -> RunResult:
        self._stop = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        if self._is_stopped:
            self._stop.set()
        run = Run(spec, self.endpoint, self._on_progress, self._stop)
        tried = await self._trial(run)
        if tried.unsupported:
            return run.result(unsupported=tried.unsupported)
        await run.make_ready(tried)
        if spec.cache is Cache.RESTART:
            await run.fill()
            await self._restart(run)
        await run.warm_up()
        if spec.cache is Cache.WARM:
            await run.fill()
        await run.measure(self._running)
        return run.result(counted=await count(run.endpoint, run.asks, run.kept.outcomes))

    async def _trial(self, run: Run) -> Tried:
        key = (run.spec.workload.spec, run.spec.seed)
        if key not in self._tried:
            self._on_progress(f"{run.name}: trial", 0, 0)
            self._tried[key] = await try_asks(run.endpoint, run.asks, self._stop)
        return self._tried[key]

    async def _restart(self, run: Run) -> None:
        if self._stop.is_set():
            return
        self._on_progress(f"{run.name}: restart", 0, 0)
        before = run.endpoint
        restart = asyncio.create_task(asyncio.to_thread(self._running.restart))
        stop = asyncio.create_task(self._stop.wait())
        await asyncio.wait((restart, stop), return_when=asyncio.FIRST_COMPLETED)
        if self._stop.is_set():  # a big model loads for minutes: it is given up
            await asyncio.to_thread(self._running.stop)
            await asyncio.gather(restart, return_exceptions=True)
            return
        stop.cancel()
        await restart
        found = await asyncio.to_thread(
            lambda: discover(self._running.url, api=self._api, model=before.model, key=self._key)
        )
        self._endpoint = run.endpoint = replace(found, counts=before.counts)
        run.make_calls()
