"""Runs a contract: examines every candidate, then measures them in turn, round after round, one server at a time."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from localllm.bench.contract.measured import Standing
from localllm.bench.contract.result import ContractResult
from localllm.bench.contract.terms import Candidate, Cell, Contract
from localllm.bench.contract.tools import Cancelling, Runs, Tools
from localllm.bench.machine import fingerprint
from localllm.bench.reports.document import run_document
from localllm.bench.serving.result import RunResult
from localllm.bench.serving.servers.running import Running
from localllm.errors import LocalLLMError, ServerUnreachable


class Ended(KeyboardInterrupt):
    """The run that was under way was cancelled: what there is is kept, nothing further is measured."""


class Told(Protocol):
    """Hears how a contract's run goes."""

    def say(self, text: str) -> None:
        """Hear something that the user should know."""
        ...

    def progress(self, what: str, done: int, total: int) -> None:
        """Hear how far it is. `total` 0: not known."""
        ...

    def saved(self, document: dict[str, Any]) -> None:
        """Hear the document as it is so far, after each turn of a candidate."""
        ...


class ContractRun:
    """A contract while it is measured. `document()` holds what there is at any time, also after `run` raised."""

    def __init__(self, contract: Contract, tools: Tools, told: Told, cancelling: Cancelling) -> None:
        self._contract = contract
        self._tools = tools
        self._told = told
        self._cancelling = cancelling
        self._is_stopped = False
        self._left = ""
        self._failures: list[LocalLLMError] = []
        standings = {candidate.name: Standing(candidate) for candidate in contract.candidates}
        self._result = ContractResult(contract, standings, tools.differences)
        self._standings = list(standings.values())

    def document(self) -> dict[str, Any]:
        """Return the result as it is now; `partial` until `run` has returned."""
        return self._result.document()

    def failure(self) -> LocalLLMError | None:
        """Return why nothing was measured, where every candidate was left out; else None."""
        return self._failures[0] if self._failures and not self._remaining() else None

    def run(self) -> None:
        """Measure everything. Raises KeyboardInterrupt where a signal ended it; the document says what there is."""
        self._result.fingerprint = self._tools.fingerprint()
        try:
            self._calibrate()
            self._measure_all()
        finally:
            fingerprint.end(self._result.fingerprint)
        self._result.partial = False

    def _measure_all(self) -> None:
        """Examine every candidate, then measure all in turn."""
        for standing in self._standings:
            with self._leaving_out(standing, "at its first start"):
                self._examine(standing)
        fills = bool(self._remaining()) and all(standing.fills_length for standing in self._remaining())
        self._told.saved(self.document())
        began_s = time.monotonic()
        for number in range(1, self._contract.rounds + 1):
            if number > 1:
                a_round_s = (time.monotonic() - began_s) / (number - 1)
                self._left = f", {_minutes(a_round_s * (self._contract.rounds - number + 1))} left"
            for standing in _turns(self._remaining(), number):
                with self._leaving_out(standing, f"in round {number}"):
                    self._turn(standing, number, fills)
                self._told.saved(self.document())

    def _calibrate(self) -> None:
        self._told.progress("the client itself", 0, 0)
        try:
            self._result.calibration = self._tools.calibration()
        except LocalLLMError as error:
            self._told.say(f"the client's own overhead was not measured: {error.message}")

    def _remaining(self) -> list[Standing]:
        return [standing for standing in self._standings if not standing.left_out]

    @contextmanager
    def _leaving_out(self, standing: Standing, when: str) -> Iterator[None]:
        """Let a candidate that fails be left out, and the others go on."""
        try:
            yield
        except LocalLLMError as error:
            self._failures.append(error)
            standing.left_out = f"left out {when}: {error.message}"
            self._told.say(f"{standing.candidate.name} is {standing.left_out}")

    def _examine(self, standing: Standing) -> None:
        """Start a candidate once, and find out how it answers."""
        candidate = standing.candidate
        self._told.progress(f"{candidate.name}: first start", 0, 0)
        with self._tools.start(candidate) as running:
            runner = self._runner(standing, running, "first start")
            standing.server = runner.endpoint.facts
            preliminary, standing.probes = self._tools.examine(runner.endpoint)
            standing.fills_length, standing.notes = preliminary.fills_length, preliminary.notes

    def _turn(self, standing: Standing, number: int, fills: bool) -> None:
        """Start a candidate and measure everything on it once."""
        when = f"round {number} of {self._contract.rounds}{self._left}"
        self._told.progress(f"{when}, {standing.candidate.name}: start", 0, 0)
        with self._tools.start(standing.candidate) as running:
            runner = self._runner(standing, running, when)
            for cell in self._contract.cells:
                if cell.key not in standing.unsupported:
                    self._measure(standing, runner, cell, number, fills)

    def _runner(self, standing: Standing, running: Running, when: str) -> Runs:
        if running.ready_s is not None:
            standing.ready_s.append(running.ready_s)
        name = standing.candidate.name
        return self._tools.runner(
            running,
            standing.candidate,
            lambda what, done, total: self._told.progress(f"{when}, {name}: {what}", done, total),
        )

    def _measure(self, standing: Standing, runner: Runs, cell: Cell, number: int, fills: bool) -> None:
        """Measure one cell; again, as often as the contract says, where the machine was disturbed."""
        contract = self._contract
        spec = cell.spec(n_warmup=contract.n_warmup, seed=contract.seed, fills_length=fills)
        for _ in range(contract.max_repeats + 1):
            with self._cancelling() as cancel_by:
                cancel_by(lambda: self._stop(runner))
                result = runner.run(spec)
            self._keep(standing.candidate, cell, result, number)
            if self._is_stopped:
                raise Ended
            if result.partial:
                raise ServerUnreachable(f"it stopped answering: {result.notes[-1] if result.notes else cell.key[0]}")
            if result.unsupported:
                standing.unsupported[cell.key] = result.unsupported
                self._told.say(f"{standing.candidate.name} cannot do {cell.key[0]}: {result.unsupported}")
            if not result.resources.disturbances:
                return
        self._told.say(
            f"{standing.candidate.name}, {', '.join(cell.key)}, round {number} is not used: "
            f"{result.resources.disturbances[0]}"
        )

    def _stop(self, runner: Runs) -> None:
        self._is_stopped = True
        runner.stop()

    def _keep(self, candidate: Candidate, cell: Cell, result: RunResult, number: int) -> None:
        run = run_document(result)
        self._result.measured.add(candidate, cell, {**run, "round": number})


def _minutes(seconds: float) -> str:
    """Return a time to come, as roughly as it is known."""
    return f"about {round(seconds / 60)} min" if seconds >= 90 else "about a minute"


def _turns(standings: Sequence[Standing], number: int) -> list[Standing]:
    """Return who is measured when in a round: A B, then B A, so that a drift of the machine falls on all alike."""
    return list(standings) if number % 2 else list(reversed(standings))
