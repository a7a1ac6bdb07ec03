"""Servers, client and machine that a contract's run is tested with: everything is scripted, nothing is started."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from localllm.bench.client.calls import End, Outcome, Target
from localllm.bench.contract.file import parse_contract
from localllm.bench.contract.terms import Candidate, Contract
from localllm.bench.machine.resources import Resources
from localllm.bench.serving.endpoint import Endpoint
from localllm.bench.serving.preliminary import Preliminary
from localllm.bench.serving.probing.differences import Difference
from localllm.bench.serving.result import RunResult, Sample
from localllm.bench.serving.spec import RunSpec
from localllm.errors import LocalLLMError

TWO = """
version = 1
title = "A against B"
[run]
rounds = {rounds}
max_repeats = 1
requests = 4
[[model]]
name = "m"
reference = "smollm2:135m"
[[candidate]]
name = "A"
command = ["a", "{{port}}"]
[[candidate]]
name = "B"
command = ["b", "{{port}}"]
[[workload]]
use = "chat"
concurrency = 2
"""


def contract(text: str = "", *, rounds: int = 2, head: str = TWO) -> Contract:
    """Return a contract of A and B at chat, with further text."""
    data = (head.format(rounds=rounds) + text).encode()
    return parse_contract(data, source="contract.toml", folder=Path("/nowhere"))


@dataclass
class FakeRunning:
    """A server that is nowhere."""

    name: str
    ready_s: float | None = 0.25
    url: str = "http://127.0.0.1:1"
    can_restart: bool = True

    def pids(self) -> Sequence[int]:
        """Return nothing."""
        return ()

    def restart(self) -> None:
        """Do nothing."""

    def stop(self) -> None:
        """Do nothing."""


@dataclass
class FakeTools:
    """`log` tells what was done, in order.

    `gap_ms(name, n)`: between tokens of a candidate's n-th run. `disturbed(name, n)`: why that run
    should not be used. `unsupported`: workloads a candidate cannot do. `fails`: what its n-th start raises.
    """

    gap_ms: Callable[[str, int], float] = lambda name, n: 10.0
    disturbed: Callable[[str, int], str] = lambda name, n: ""
    unsupported: Mapping[str, str] = field(default_factory=dict)
    fails: Callable[[str, int], LocalLLMError | None] = lambda name, n: None
    fills: Mapping[str, bool] = field(default_factory=dict)
    differ: Sequence[Difference] = ()
    on_run: Callable[[FakeRuns, int], None] = lambda runs, n: None
    dies: Callable[[str, int], bool] = lambda name, n: False
    log: list[str] = field(default_factory=list)
    specs: list[RunSpec] = field(default_factory=list)
    n_starts: dict[str, int] = field(default_factory=dict)
    n_runs: dict[str, int] = field(default_factory=dict)

    @contextmanager
    def start(self, candidate: Candidate) -> Iterator[FakeRunning]:
        """Say that it runs."""
        n = self.n_starts[candidate.name] = self.n_starts.get(candidate.name, 0) + 1
        failure = self.fails(candidate.name, n)
        if failure is not None:
            raise failure
        self.log.append(f"start {candidate.name}")
        try:
            yield FakeRunning(candidate.name)
        finally:
            self.log.append(f"stop {candidate.name}")

    def runner(self, running: Any, candidate: Candidate, on_progress: Any) -> FakeRuns:
        """Return what measures it."""
        on_progress("chat", 1, 4)
        return FakeRuns(self, candidate.name)

    def examine(self, endpoint: Endpoint) -> tuple[Preliminary, Any]:
        """Say whether it fills answers."""
        self.log.append(f"examine {endpoint.model}")
        return Preliminary(self.fills.get(endpoint.model, True)), {"of": endpoint.model}

    def differences(self, by_name: Mapping[str, Any]) -> Sequence[Difference]:
        """Return what was scripted, where there are two to compare."""
        return self.differ if len(by_name) > 1 else ()

    def fingerprint(self) -> dict[str, Any]:
        """Return a machine."""
        return {"machine": {"cpu": "fake"}}

    def calibration(self) -> Any:
        """Return nothing."""
        return None


@dataclass
class FakeRuns:
    """Measures by script."""

    tools: FakeTools
    name: str
    is_stopped: bool = False

    @property
    def endpoint(self) -> Endpoint:
        """An endpoint whose model is called like the candidate."""
        return Endpoint(Target("127.0.0.1", 1), self.name, "openai-chat", {"server": self.name})

    def stop(self) -> None:
        """End the run."""
        self.is_stopped = True

    def run(self, spec: RunSpec) -> RunResult:
        """Return a run of four requests, each of five tokens."""
        tools = self.tools
        n = tools.n_runs[self.name] = tools.n_runs.get(self.name, 0) + 1
        tools.log.append(f"run {self.name}")
        tools.specs.append(spec)
        tools.on_run(self, n)
        unsupported = tools.unsupported.get(self.name, "")
        gap_s = tools.gap_ms(self.name, n) / 1e3
        samples = () if unsupported else tuple(_sample(i, gap_s) for i in range(4))
        disturbed = tools.disturbed(self.name, n)
        return RunResult(
            spec=spec,
            api="openai-chat",
            model=self.name,
            samples=samples,
            began_at="2026-01-01T00:00:00.000+00:00",
            duration_s=4 * 5 * gap_s,
            resources=Resources(disturbances=(disturbed,) if disturbed else ()),
            unsupported=unsupported,
            ready_s=0.25,
            partial=self.is_stopped or tools.dies(self.name, n),
            notes=("the server stopped answering",) if tools.dies(self.name, n) else (),
        )


def _sample(number: int, gap_s: float) -> Sample:
    due_s = 100.0 + number * 5 * gap_s
    times = tuple(due_s + gap_s * (i + 1) for i in range(5))
    outcome = Outcome(
        label=str(number),
        client=0,
        end=End.ANSWER,
        is_stream=True,
        status=200,
        due_s=due_s,
        started_s=due_s,
        ended_s=times[-1],
        token_s=times,
        answer_s=times[0],
        prompt_tokens=7,
        completion_tokens=5,
    )
    return Sample(outcome, "chat", 5, 5)


class Listener:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.documents: list[dict[str, Any]] = []
        self.shown: list[str] = []

    def say(self, text: str) -> None:
        """Keep a sentence."""
        self.said.append(text)

    def progress(self, what: str, done: int, total: int) -> None:
        """Keep what is shown."""
        self.shown.append(what)

    def saved(self, document: dict[str, Any]) -> None:
        """Keep a document."""
        self.documents.append(document)


@contextmanager
def cancelling() -> Iterator[Callable[[Callable[[], None]], None]]:
    """Stand for signals that never come."""
    yield lambda cancel: None
