"""One server under eight clients while faults happen to its worker, each once it answers again."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from localllm.bench.client.calls import Call, End, Outcome
from localllm.bench.client.load import closed_loop
from proof.history import History, Texts
from proof.output import rounded, tell
from proof.serving import Serving
from proof.tally import Tally

SIGNALS = ("SEGV", "ABRT", "KILL", "STOP", "BUS")
KINDS = (*SIGNALS, "hang")
N_CLIENTS = 8
RECOVERY_TIMEOUT_S = 60.0
CALL_TIMEOUT_S = 90.0


@dataclass(frozen=True, slots=True)
class Part:
    """One server's share of the run. `tokens`: shortest and longest answer asked for."""

    engine: str
    n_faults: int
    variables: Mapping[str, str]
    tokens: tuple[int, int]
    arguments: tuple[str, ...] = ()
    is_exact: bool = False  # the same prompt always gets the same greedy text


@dataclass(frozen=True, slots=True)
class Fault:
    """What one fault did. Times in milliseconds after it; None = it never came."""

    number: int
    engine: str
    kind: str
    at_s: float
    in_flight: int
    ends: Mapping[str, int]
    told_ms: float | None
    good_answer_ms: float | None
    improper: tuple[str, ...]

    def line(self) -> dict[str, Any]:
        """Return the fault's line of the result."""
        return {
            "fault": self.number,
            "engine": self.engine,
            "kind": self.kind,
            "at_s": rounded(self.at_s, 3),
            "in_flight": self.in_flight,
            "ends": dict(self.ends),
            "told_ms": rounded(self.told_ms),
            "good_answer_ms": rounded(self.good_answer_ms),
            "improper": list(self.improper),
        }


@dataclass(slots=True)
class Run:
    """One server under load, its history and its faults. One owner: the event loop."""

    part: Part
    serving: Serving
    rng: random.Random
    first_number: int
    prompts: list[str]
    plan: Path
    history: History = field(default_factory=History)
    texts: Texts = field(default_factory=Texts)
    tally: Tally = field(default_factory=Tally)
    faults: list[Fault] = field(default_factory=list)
    asked: dict[str, str] = field(default_factory=dict)
    is_over: bool = False
    began_s: float = field(default_factory=time.perf_counter)
    _answered: asyncio.Event = field(default_factory=asyncio.Event)
    _last_good_start_s: float = -1.0

    def calls(self, client: int) -> Iterator[Call]:
        """Yield one client's requests until the run is over."""
        number = 0
        while not self.is_over:
            name = f"{self.part.engine}-{client}-{number}"
            number += 1
            prompt = self.rng.choice(self.prompts)
            self.asked[name] = prompt
            self.history.began(name)
            yield Call.of("/v1/chat/completions", self._body(name, prompt), **self._settings(name))

    def _body(self, name: str, prompt: str) -> dict[str, Any]:
        is_stream = self.rng.random() < 0.6
        return {
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": self.rng.randint(*self.part.tokens),
            "temperature": 0,
            # Makes each request one of its own to the rule that refuses those which crash twice.
            "stop": [f"\u00a7{name}"],
            "stream": is_stream,
            **({"stream_options": {"include_usage": True}} if is_stream else {}),
        }

    @staticmethod
    def _settings(name: str) -> dict[str, Any]:
        return {"label": name, "headers": (("x-request-id", name),), "keep_text": True}

    def keep(self, outcome: Outcome) -> None:
        """Take what became of a request."""
        self.history.keep(outcome)
        self.tally.add(outcome)
        if outcome.end is End.ANSWER:
            self._last_good_start_s = max(self._last_good_start_s, outcome.started_s)
            self._answered.set()
        if self.part.is_exact:
            self.texts.see(self.asked[outcome.label], outcome)

    async def good_answer(self, after_s: float) -> float | None:
        """Wait for an answer to a request begun after `after_s`; return when it came, None for never."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(RECOVERY_TIMEOUT_S):
                while self._last_good_start_s < after_s:
                    self._answered.clear()
                    await self._answered.wait()
                return time.perf_counter()
        return None

    async def inject_all(self, kinds: Sequence[str]) -> None:
        """Inject the faults one after another, each once the server answers again."""
        try:
            await self.good_answer(0.0)
            for kind in kinds:
                await asyncio.sleep(self.rng.uniform(0.02, 1.0))
                fault = await self._inject(self.first_number + len(self.faults), kind)
                self.faults.append(fault)
                tell(
                    f"{fault.number:4d} {fault.engine} {kind:5s} good answer after {fault.good_answer_ms or -1:.0f} ms"
                )
                if fault.good_answer_ms is None or not self.serving.is_alive:
                    return
        finally:
            self.is_over = True

    async def _inject(self, number: int, kind: str) -> Fault:
        victims = set(self.history.in_flight)
        n_broken = len(self.history.broken)
        before = len(self.history.ended)
        injected_s = await self._do(number, kind)
        good_s = await self.good_answer(injected_s)
        during = list(self.history.ended.items())[before:]
        told = [outcome.ended_s - injected_s for name, outcome in during if name in victims]
        return Fault(
            number=number,
            engine=self.part.engine,
            kind=kind,
            at_s=injected_s - self.began_s,
            in_flight=len(victims),
            ends=Counter(outcome.end.value for _, outcome in during),
            told_ms=1e3 * max(told) if told else None,
            good_answer_ms=None if good_s is None else 1e3 * (good_s - injected_s),
            improper=tuple(self.history.broken[n_broken:]),
        )

    async def _do(self, number: int, kind: str) -> float:
        """Make it go wrong; return when it did."""
        if kind == "hang":
            return await self._hang(number)
        worker = self.serving.workers()[-1]
        os.kill(worker, signal.Signals[f"SIG{kind}"])
        return time.perf_counter()

    async def _hang(self, number: int) -> float:
        """Let a forward never return; half of them hold the interpreter too, so that no thread runs."""
        fault = {"id": str(number), "do": "hang", "in_steps": self.rng.randint(1, 8), "gil": self.rng.random() < 0.5}
        partial = self.plan.with_suffix(".partial")
        partial.write_text(json.dumps({"faults": [fault]}), encoding="utf-8")
        os.replace(partial, self.plan)
        fired = Path(f"{self.plan}.fired")
        ends_s = time.perf_counter() + CALL_TIMEOUT_S
        while time.perf_counter() < ends_s:
            if fired.exists() and f'"id": "{number}"' in fired.read_text(encoding="utf-8"):
                break
            await asyncio.sleep(0.005)
        return time.perf_counter()


def kinds_for(n: int, rng: random.Random) -> list[str]:
    """Return `n` faults, as many of each kind as of any other, in no order."""
    kinds = [KINDS[i % len(KINDS)] for i in range(n)]
    rng.shuffle(kinds)
    return kinds


async def drive(run: Run, kinds: Sequence[str]) -> None:
    """Let the clients ask while faults happen."""
    async with asyncio.TaskGroup() as group:
        group.create_task(run.inject_all(kinds))
        clients = [run.calls(number) for number in range(N_CLIENTS)]
        target = run.serving.target(timeout_s=CALL_TIMEOUT_S)
        group.create_task(closed_loop(target, clients, run.keep))
