"""One run under way: its asks are chosen and written before it begins, sent, and summed up after it."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from itertools import chain, islice, takewhile

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
from localllm.bench.serving.servers.running import Running
from localllm.bench.serving.spec import Cache, Load, RunSpec
from localllm.bench.serving.trying import Tried
from localllm.bench.serving.wire import call_of
from localllm.bench.workloads.ask import Ask

N_AT_FIRST = 48
"""Asks that are made before the trial: some of every kind of a mix."""
N_AT_ONCE = 100
N_AHEAD = 2000
"""Most asks that are made before the run, where not all must be known then."""
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
        self.name = f"{spec.workload.spec.partition(':')[0]} {spec.cache.value}, {spec.load}"
        self.notes: list[str] = []
        self._on_progress = on_progress
        self._stop = stop
        self._window = spec.load.concurrency or WINDOW
        self._salted: Salting = each_its_own() if spec.cache is Cache.COLD else one_for_all()
        self._sessions = spec.workload.sessions(spec.seed)
        self._source = islice(interleaved(self._sessions, self._window), spec.n_requests)
        self._numbered: list[Numbered] = list(islice(self._source, N_AT_FIRST))
        self._keeps_text = False
        self._calls: list[Call] = []
        self._n_warmed_up = 0
        self._began_at = ""
        self._ready_s: float | None = None
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

    async def make_ready(self, tried: Tried) -> None:
        """Make the asks that are made before, and write their requests. Gives way now and then: it can be stopped."""
        self._keeps_text = not tried.has_usage
        n_ahead = self._n_ahead(tried)
        while not self._stop.is_set():
            self._on_progress(f"{self.name}: making requests", len(self._numbered), n_ahead or 0)
            n_more = N_AT_ONCE if n_ahead is None else min(N_AT_ONCE, n_ahead - len(self._numbered))
            more = list(islice(self._source, max(0, n_more)))
            if not more:
                break
            self._numbered += more
            await asyncio.sleep(0)
        self.make_calls()

    def _n_ahead(self, tried: Tried) -> int | None:
        """Return how many asks are made before: all (None) where all must be known, else what is likely to do."""
        spec, load = self.spec, self.spec.load
        must_be_known = spec.cache is not Cache.COLD or (load.concurrency is None and load.rate_per_s is None)
        if must_be_known and (spec.n_requests is not None or spec.workload.is_trace):
            return None
        if spec.duration_s is None:
            return N_AHEAD
        if load.rate_per_s is not None:
            return sum(1 for _ in offsets(load, spec.seed, N_AHEAD, spec.duration_s))
        if not tried.answer_s:
            return N_AT_FIRST
        n = math.ceil(AHEAD_FACTOR * spec.duration_s / tried.answer_s * (load.concurrency or 1))
        return max(N_AT_FIRST, min(n, N_AHEAD))

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
        """Send what the asks begin with, once each, so that the server may keep it.

        After a restart nothing of this run is left but that, so each session's last turn is prepared for. On a warm
        server the first turn is: the others find what the turns before them left.
        """
        is_restarted = self.spec.cache is Cache.RESTART
        salted = [self._salted(ask) for ask in (self.asks if is_restarted else self._first_asks())]
        beginnings = prefixes(salted)
        n_sent = await self._send(beginnings, ", prefixes")
        if n_sent:
            n_whole = n_whole_in(salted, beginnings)
            repeated = f"; {n_whole} of them whole, as later turns repeat them" if n_whole else ""
            what = f"what {_counted(len(salted), 'request' if is_restarted else 'session')}"
            if is_restarted:
                repeated += "; what requests leave for each other after the restart counts as cached too"
            how = f"in {_counted(n_sent, 'request')}"
            self.notes.append(f"{what} begin{'s' * (len(salted) == 1)} with was sent before, {how}{repeated}")

    def _first_asks(self) -> list[Ask]:
        """Return the first ask of each session."""
        return [ask for ask, *_ in by_session(self._numbered)]

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
        self._ready_s = running.ready_s
        watch = Watch(running.pids)
        with watch:
            began_s, began_cpu_s = time.perf_counter(), time.process_time()
            kept.tell(began_s)
            if not self._stop.is_set():
                await self._send_counted(kept)
            self._client_cpu_s = time.process_time() - began_cpu_s - watch.cost_s
            self._elapsed_s = time.perf_counter() - began_s
        self._resources = watch.found()

    async def _send_counted(self, kept: Kept) -> None:
        load, target = self.spec.load, self.endpoint.target
        if load.concurrency is None:
            await arrive(target, self._planned() if load.rate_per_s else self._recorded(), kept)
            return
        numbers = (number for number, _ in self._numbered)
        sessions = by_session(zip(numbers, self._calls, strict=True))
        await drive(target, load, sessions, self._further_sessions(), kept)

    def _n_expected(self) -> int:
        """Return how many requests will count; 0 where the time decides."""
        spec = self.spec
        if spec.workload.is_trace or (spec.load.rate_per_s is not None and len(self._numbered) < N_AHEAD):
            return len(self._numbered)
        return spec.n_requests or 0

    def _further_sessions(self) -> Iterator[Iterator[Call]]:
        """Yield the sessions that were not begun before: nothing where what they begin with was to be sent before."""
        for session in self._sessions:
            if not self._goes_on():
                return
            yield map(self._added, takewhile(lambda _: self._goes_on(), session))

    def _further(self) -> Iterator[Call]:
        """Yield the asks that were not made before, as they come in turn."""
        for _, ask in self._source:
            if not self._goes_on():
                return
            yield self._added(ask)

    def _goes_on(self) -> bool:
        """Say whether an ask may be added: not where it would have had to be known before."""
        if self.spec.n_requests is not None:
            return self.spec.cache is Cache.COLD and len(self._numbered) < self.spec.n_requests
        if self.spec.cache is not Cache.COLD:
            self._ran_out()
            return False
        return True

    def _added(self, ask: Ask) -> Call:
        self._numbered.append((-1, ask))
        return self._call(len(self._numbered) - 1, ask)

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
        told = f"the run ended before its time: what {n} requests begin with was sent before, not more"
        if told not in self.notes:  # each client finds that out
            self.notes.append(told)

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
            ready_s=self._ready_s,
        )

    def _last_notes(self) -> Iterator[str]:
        if self.kept.outcomes and self._client_cpu_s > BUSY_CLIENT * self._elapsed_s:
            share = self._client_cpu_s / self._elapsed_s
            yield f"the client itself was busy: {share:.0%} of a core; it may be what limits these figures"
        fault = next((phase.outcomes[-1].fault for phase in self._phases if phase.is_dead), None)
        if fault is not None:
            yield f"the server stopped answering after {self._n_answers()} answers: {fault}"
        elif self._stop.is_set():
            yield "ended early: only what was complete by then is counted"

    def _n_answers(self) -> int:
        return sum(outcome.end is End.ANSWER for outcome in self.kept.outcomes)


def _counted(n: int, what: str) -> str:
    return f"{n} {what}{'s' * (n != 1)}"
