"""One run under way: its asks are chosen and written before it begins, sent, and summed up after it."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from itertools import chain, islice

from localllm.bench.client.calls import Call, End
from localllm.bench.machine.resources import Resources
from localllm.bench.machine.watching import Watch
from localllm.bench.serving.asks import (
    WINDOW,
    Numbered,
    Salting,
    by_session,
    each_its_own,
    interleaved,
    n_whole_in,
    one_for_all,
    prefixes,
)
from localllm.bench.serving.counting import Counted
from localllm.bench.serving.driving import Kept, OnProgress, arrive, drive, offsets
from localllm.bench.serving.endpoint import Endpoint
from localllm.bench.serving.result import RunResult
from localllm.bench.serving.running import Running
from localllm.bench.serving.spec import Cache, Load, RunSpec
from localllm.bench.serving.trying import Tried
from localllm.bench.serving.wire import call_of
from localllm.bench.workloads.ask import Ask

N_AHEAD = 2000
"""Most asks that are made before a run of a given time begins."""
N_AHEAD_LEAST = 24
AHEAD_FACTOR = 4.0
"""Answers may come so much quicker in the run than the trial's came."""
BUSY_CLIENT = 0.5
FILL_CLIENTS = 4
"""Send what is to be cached, where the load has no clients."""


class Run:
    """A run's asks, what they are sent as, and what became of them. One owner: the coroutine that runs it."""

    def __init__(self, spec: RunSpec, endpoint: Endpoint, on_progress: OnProgress, stop: asyncio.Event) -> None:
        self.spec = spec
        self.endpoint = endpoint
        self.name = f"{spec.workload.spec} {spec.cache.value}, {spec.load}"
        self.notes: list[str] = []
        self._on_progress = on_progress
        self._stop = stop
        self._window = spec.load.concurrency or WINDOW
        self._salted: Salting = each_its_own() if spec.cache is Cache.COLD else one_for_all()
        self._source = interleaved(spec.workload.sessions(spec.seed), self._window)
        self._numbered: list[Numbered] = []
        self._take(self._n_at_first())
        self._keeps_text = False
        self._calls: list[Call] = []
        self._n_warmed_up = 0
        self._began_at = ""
        self._elapsed_s = 0.0
        self._client_cpu_s = 0.0
        self._resources = Resources()
        self._phases: list[Kept] = []
        self.kept = self._new_kept("", 0)

    @property
    def asks(self) -> list[Ask]:
        """Those made so far, unsalted, in the order of their labels."""
        return [ask for _, ask in self._numbered]

    def _new_kept(self, what: str, n_total: int, duration_s: float | None = None) -> Kept:
        kept = Kept(f"{self.name}{what}", self._on_progress, self._stop, n_total, duration_s)
        self._phases.append(kept)
        return kept

    def _n_at_first(self) -> int | None:
        """Return how many asks are made before the trial: all where they are known. None: all of a trace."""
        spec = self.spec
        if spec.n_requests is not None:
            return spec.n_requests
        return None if spec.workload.is_trace else N_AHEAD_LEAST

    def _take(self, n_all: int | None) -> None:
        """Draw asks until there are `n_all`."""
        n_more = None if n_all is None else max(0, n_all - len(self._numbered))
        self._numbered += islice(self._source, n_more)

    def make_ready(self, tried: Tried) -> None:
        """Choose how many asks there are, and write their requests."""
        self._keeps_text = not tried.has_usage
        if self.spec.n_requests is None and self.spec.duration_s is not None:
            self._take(self._n_ahead(tried, self.spec.duration_s))
        self.make_calls()

    def _n_ahead(self, tried: Tried, duration_s: float) -> int:
        """Return how many asks the time may take, at the most that is likely."""
        load = self.spec.load
        if load.concurrency is None:
            return len(list(offsets(load, self.spec.seed, N_AHEAD, duration_s))) if load.rate_per_s else 0
        if not tried.answer_s:
            return N_AHEAD_LEAST
        n = math.ceil(AHEAD_FACTOR * duration_s / tried.answer_s * load.concurrency)
        return max(N_AHEAD_LEAST, min(n, N_AHEAD))

    def make_calls(self) -> None:
        """Write the requests: nothing is left to do for them while the run is measured."""
        self._calls = [self._call(number, ask) for number, (_, ask) in enumerate(self._numbered)]

    def _call(self, label: int, ask: Ask) -> Call:
        return call_of(
            self._salted(ask),
            self.endpoint,
            fills_length=self.spec.fills_length,
            label=str(label),
            keep_text=self._keeps_text,
        )

    async def fill(self) -> None:
        """Send what the asks begin with, once each, so that the server may keep it."""
        salted = [self._salted(ask) for ask in self.asks]
        beginnings = prefixes(salted)
        n_sent = await self._send(beginnings, ", prefixes")
        if n_sent:
            n_whole = n_whole_in(salted, beginnings)
            repeated = f"; {n_whole} of them whole, as later turns repeat them" if n_whole else ""
            told = f"what {len(salted)} requests begin with was sent before, in {n_sent} requests{repeated}"
            self.notes.append(told)

    async def warm_up(self) -> None:
        """Send requests of the same shape under salts of their own; they do not count."""
        salted = each_its_own()
        asks = self.asks
        wanted = [salted(asks[i % len(asks)]) for i in range(self.spec.n_warmup)] if asks else []
        self._n_warmed_up = await self._send(wanted, ", warm-up")

    async def _send(self, asks: Sequence[Ask], what: str) -> int:
        """Send asks that do not count; return how many were answered."""
        if not asks or self._stop.is_set():
            return 0
        kept = self._new_kept(what, len(asks))
        kept.tell(time.perf_counter())
        calls = [[call_of(ask, self.endpoint, fills_length=self.spec.fills_length)] for ask in asks]
        clients = Load(concurrency=min(self.spec.load.concurrency or FILL_CLIENTS, len(asks)))
        await drive(self.endpoint.target, clients, calls, iter(()), kept)
        return sum(outcome.end is End.ANSWER for outcome in kept.outcomes)

    async def measure(self, running: Running) -> None:
        """Send what counts."""
        spec = self.spec
        self.kept = kept = self._new_kept("", self._n_expected(), spec.duration_s)
        self._began_at = datetime.now(UTC).isoformat(timespec="milliseconds")
        watch = Watch(running.pids)
        with watch:
            began_s, began_cpu_s = time.perf_counter(), time.process_time()
            kept.tell(began_s)
            if not self._stop.is_set():
                await self._send_counted(kept)
            self._client_cpu_s = time.process_time() - began_cpu_s
            self._elapsed_s = time.perf_counter() - began_s
        self._resources = watch.found()

    async def _send_counted(self, kept: Kept) -> None:
        load, target = self.spec.load, self.endpoint.target
        if load.concurrency is None:
            await arrive(target, self._planned() if load.rate_per_s else self._recorded(), kept)
            return
        numbers = (number for number, _ in self._numbered)
        sessions = by_session(zip(numbers, self._calls, strict=True))
        await drive(target, load, sessions, ([call] for call in self._further()), kept)

    def _n_expected(self) -> int:
        spec = self.spec
        if spec.duration_s is not None and (spec.n_requests is None or spec.load.concurrency is not None):
            return spec.n_requests or 0
        return len(self._numbered)

    def _further(self) -> Iterator[Call]:
        """Yield what comes after the asks that were made before; nothing where that was to be sent before."""
        if self.spec.n_requests is not None:
            return
        for numbered in self._source:
            if self.spec.cache is not Cache.COLD:
                self._ran_out()
                return
            self._numbered.append(numbered)
            yield self._call(len(self._numbered) - 1, numbered[1])

    def _planned(self) -> Iterator[tuple[float, Call]]:
        """Yield the calls at the times of a rate."""
        spec = self.spec
        times = offsets(spec.load, spec.seed, spec.n_requests, spec.duration_s)
        return zip(times, chain(self._calls, self._further()), strict=False)

    def _recorded(self) -> Iterator[tuple[float, Call]]:
        """Yield the calls at the times of a trace."""
        asks, duration_s = self.asks, self.spec.duration_s
        for at_s, number in sorted((ask.at_s or 0.0, number) for number, ask in enumerate(asks)):
            if duration_s is None or at_s < duration_s:
                yield at_s, self._calls[number]

    def _ran_out(self) -> None:
        n = len(self._numbered)
        self.notes.append(f"the run ended before its time: what {n} requests begin with was sent before, not more")

    def result(self, *, unsupported: str = "", counted: Counted | None = None) -> RunResult:
        """Return what the run found."""
        counted = counted or Counted((), "usage", ())
        outcomes = [sample.outcome for sample in counted.samples]
        duration_s = self._elapsed_s
        if outcomes:
            duration_s = max(one.ended_s for one in outcomes) - min(one.due_s for one in outcomes)
        return RunResult(
            spec=self.spec,
            api=self.endpoint.api,
            model=self.endpoint.model,
            samples=counted.samples,
            began_at=self._began_at or datetime.now(UTC).isoformat(timespec="milliseconds"),
            duration_s=duration_s,
            client_cpu_s=self._client_cpu_s,
            n_warmed_up=self._n_warmed_up,
            token_source=counted.token_source,
            resources=self._resources,
            unsupported=unsupported,
            partial=not unsupported and self._stop.is_set(),
            notes=(*self.notes, *counted.notes, *self._last_notes()),
            server=self.endpoint.facts,
        )

    def _last_notes(self) -> Iterator[str]:
        if self._elapsed_s and self._client_cpu_s > BUSY_CLIENT * self._elapsed_s:
            share = self._client_cpu_s / self._elapsed_s
            yield f"the client itself was busy: {share:.0%} of a core; it may be what limits these figures"
        fault = next((phase.outcomes[-1].fault for phase in self._phases if phase.is_dead), None)
        if fault is not None:
            yield f"the server stopped answering after {self._n_answers()} answers: {fault}"
        elif self._stop.is_set():
            yield "ended early: only what was complete by then is counted"

    def _n_answers(self) -> int:
        return sum(outcome.end is End.ANSWER for outcome in self.kept.outcomes)
