"""What running a contract needs of the rest of the bench: one door, so that tests can stand in for servers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeAlias

from localllm.bench.contract.terms import Candidate
from localllm.bench.serving.driving import OnProgress
from localllm.bench.serving.endpoint import Endpoint
from localllm.bench.serving.preliminary import Preliminary
from localllm.bench.serving.probing.differences import Difference
from localllm.bench.serving.result import RunResult
from localllm.bench.serving.servers.running import Running
from localllm.bench.serving.spec import RunSpec

Cancelling: TypeAlias = Callable[[], AbstractContextManager[Callable[[Callable[[], None]], None]]]
"""While inside, a signal calls what is handed to the function that is yielded, and does not raise."""


class Runs(Protocol):
    """Measures one server: `serving.runner.Runner`."""

    @property
    def endpoint(self) -> Endpoint: ...

    def run(self, spec: RunSpec) -> RunResult: ...

    def stop(self) -> None: ...


class Tools(Protocol):
    """What a contract is measured with. Probes are what `examine` found: only `differences` looks into them."""

    def start(self, candidate: Candidate) -> AbstractContextManager[Running]:
        """Let a candidate run while inside."""
        ...

    def runner(self, running: Running, candidate: Candidate, on_progress: OnProgress) -> Runs:
        """Return what measures a candidate that runs."""
        ...

    def examine(self, endpoint: Endpoint) -> tuple[Preliminary, Any]:
        """Find out how a candidate answers, before anything is measured."""
        ...

    def differences(self, by_name: Mapping[str, Any]) -> Sequence[Difference]:
        """Return in which ways candidates answer differently, by their probes."""
        ...

    def fingerprint(self) -> dict[str, Any]:
        """Return what is known of machine, software and models before the first run."""
        ...

    def calibration(self) -> Any:
        """Return the client's own part in what it measures."""
        ...
