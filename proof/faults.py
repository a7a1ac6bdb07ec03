"""Ends the worker process under eight clients, again and again: `python -m proof.faults`.

Every request must end in exactly one answer, error event or refusal, and the server must answer
again by itself. The larger part runs on an engine that computes nothing, a tenth on a real model.
Writes a JSON line a fault between a line that names the machine and one that sums up.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from localllm.bench.calls import Call, End, Outcome
from localllm.bench.load import closed_loop
from localllm.bench.measure import Tally
from localllm.cli.serve import WATCHDOG_VARIABLE
from localllm.models.catalog import DEFAULT_ALIAS
from proof.history import History, Texts, log_lines
from proof.output import MEASURED, header, model_path, rounded, tell, write_lines
from proof.processes import Usage, usage
from proof.prompts import story
from proof.serving import Serving, alive, fake_engine

SIGNALS = ("SEGV", "ABRT", "KILL", "STOP", "BUS")
KINDS = (*SIGNALS, "hang")
N_CLIENTS = 8
WATCHDOG_S = 2
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


def run_part(part: Part, model: Path, seed: int, first_number: int, folder: Path) -> dict[str, Any]:
    """Run one server through its faults; return its lines and what sums them up."""
    rng = random.Random(seed)
    plan = folder / "plan.json"
    variables = {"LOCALLLM_FAULTS": "1", "LOCALLLM_FAULT_PLAN": str(plan), WATCHDOG_VARIABLE: str(WATCHDOG_S)}
    arguments = [str(model), "--log-format", "json", *part.arguments]
    with Serving(folder, arguments, {**variables, **part.variables}) as serving:
        pid, workers = serving.pid, set(serving.workers())
        before = usage(pid)
        prompts = [story(rng, rng.randint(4, 30)) for _ in range(48)]
        run = Run(part, serving, rng, first_number, prompts, plan)
        asyncio.run(drive(run, kinds_for(part.n_faults, rng)))
        time.sleep(1.0)
        survived = serving.is_alive
        after = usage(pid) if survived else None
        workers |= set(serving.workers())
        exit_code = serving.stop()
    wrong = [*run.history.check(log_lines(serving.log_text())), *run.texts.mixed_up]
    return {
        "lines": [fault.line() for fault in run.faults],
        "sums": sums(run, part, before, after, wrong)
        | {"server_survived": survived, "exit_code": exit_code, "left_processes": len(alive([pid, *workers]))},
        "wrong": wrong,
    }


def sums(run: Run, part: Part, before: Usage, after: Usage | None, wrong: Sequence[str]) -> dict[str, Any]:
    """Return what one part came to."""
    summary = run.tally.summary()
    good = [fault.good_answer_ms for fault in run.faults if fault.good_answer_ms is not None]
    return {
        "engine": part.engine,
        "asked": part.n_faults,
        "injected": len(run.faults),
        "survived": len(good),
        "requests": summary.n_requests,
        "ends": dict(summary.n_by_end),
        "errors": dict(summary.n_by_error),
        "lost": len(wrong),
        "kinds": {kind: by_kind(run.faults, kind) for kind in KINDS if any(f.kind == kind for f in run.faults)},
        "fds": [before.n_fds, after.n_fds if after else None],
        "threads": [before.n_threads, after.n_threads if after else None],
        "server_rss_mb": [rounded(before.rss_bytes / 1e6), rounded(after.rss_bytes / 1e6) if after else None],
        "seconds": rounded(summary.duration_s),
    }


def by_kind(faults: Sequence[Fault], kind: str) -> dict[str, Any]:
    """Return how often one kind was survived, and in which time."""
    of_kind = [fault for fault in faults if fault.kind == kind]
    good = [fault.good_answer_ms for fault in of_kind if fault.good_answer_ms is not None]
    told = [fault.told_ms for fault in of_kind if fault.told_ms is not None]
    return {
        "injected": len(of_kind),
        "survived": len(good),
        "told_median_ms": rounded(statistics.median(told)) if told else None,
        "told_max_ms": rounded(max(told)) if told else None,
        "good_answer_median_ms": rounded(statistics.median(good)) if good else None,
        "good_answer_max_ms": rounded(max(good)) if good else None,
    }


def parts(n_faults: int, n_real: int, threads: str) -> list[Part]:
    """Return the two parts of a run of `n_faults`, `n_real` of them on a real model."""
    fake = Part("fake", n_faults - n_real, fake_engine(4.0), (4, 80), is_exact=True)
    real = Part("real", n_real, {}, (4, 24), ("--threads", threads, "--ctx", "4096"))
    return [part for part in (fake, real) if part.n_faults]


def held(part: Mapping[str, Any]) -> bool:
    """Say whether one part kept every promise."""
    survived = part["survived"] == part["asked"] and part["server_survived"]
    return survived and not part["lost"] and not part["left_processes"]


def main(arguments: list[str]) -> int:
    """Run it; return 0 where every fault was survived and no request was lost."""
    parser = argparse.ArgumentParser(prog="python -m proof.faults", description=__doc__)
    parser.add_argument("--faults", type=int, default=200, help="how many in all")
    parser.add_argument("--real", type=int, help="how many of them on the real model; default: a tenth")
    parser.add_argument("--model", default=DEFAULT_ALIAS)
    parser.add_argument("--threads", default="auto", help="of the real model")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("-o", "--output", type=Path, default=MEASURED / "faults.jsonl")
    wishes = parser.parse_args(arguments)
    n_real = wishes.faults // 10 if wishes.real is None else wishes.real
    model = model_path(wishes.model)
    head = header("faults", model, seed=wishes.seed, clients=N_CLIENTS, watchdog_s=WATCHDOG_S)
    lines: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    for part in parts(wishes.faults, n_real, wishes.threads):
        with tempfile.TemporaryDirectory(prefix="localllm-proof-") as folder:
            found = run_part(part, model, wishes.seed, len(lines) + 1, Path(folder))
        lines += found["lines"]
        results.append(found["sums"])
        for wrong in found["wrong"]:
            tell(wrong)
    write_lines(wishes.output, [head, *lines, {"summary": results}])
    tell(f"{wishes.output}")
    print(json.dumps(results, indent=1))
    is_good = all(held(part) for part in results)
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
