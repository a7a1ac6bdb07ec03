"""What a contract is measured with: servers, client and machine as they are."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from localllm.bench.client.calibrate import calibrate
from localllm.bench.contract.models import FoundModel
from localllm.bench.contract.terms import Candidate, Contract
from localllm.bench.contract.tools import Runs
from localllm.bench.machine import fingerprint
from localllm.bench.serving.address import chosen
from localllm.bench.serving.driving import OnProgress
from localllm.bench.serving.endpoint import Endpoint
from localllm.bench.serving.preliminary import Preliminary, examine
from localllm.bench.serving.probing.differences import Difference, differences
from localllm.bench.serving.probing.prober import probe
from localllm.bench.serving.runner import Runner
from localllm.bench.serving.servers.given import GivenServer
from localllm.bench.serving.servers.running import Running
from localllm.bench.serving.servers.started import StartedServer
from localllm.bench.serving.servers.starting import OURS, Starting
from localllm.errors import LocalLLMError


@dataclass(frozen=True, slots=True)
class RealTools:
    """Servers, client and machine as they are.

    `key`: sent to servers that are given by their URL, to no other. `environment`: what candidates
    get, as it was before a library that is loaded here could set what its threads do.
    """

    contract: Contract
    models: Mapping[str, FoundModel]
    key: str | None = None
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))

    @contextmanager
    def start(self, candidate: Candidate) -> Iterator[Running]:
        """Start a candidate's command and end it after, or use what runs at its URL."""
        if candidate.url:
            yield GivenServer(chosen(candidate.url, candidate.serves), candidate.name)
            return
        starting = Starting(
            name=candidate.name,
            command=candidate.command,
            model=self.models[candidate.model.name].argument,
            variables=candidate.variables,
            environment=self.environment,
            serves=candidate.serves,
            folder=self.contract.folder,
            ready_timeout_s=self.contract.ready_timeout_s,
        )
        with StartedServer(starting) as running:
            yield running

    def runner(self, running: Running, candidate: Candidate, on_progress: OnProgress) -> Runs:
        """Return what measures a server."""
        key = self.key if candidate.url else None
        info = self.models[candidate.model.name].info
        return Runner(running, candidate.api, key=key, info_of=lambda _: info, on_progress=on_progress)

    def examine(self, endpoint: Endpoint) -> tuple[Preliminary, Any]:
        """Find out how a server answers, before anything is measured."""
        return examine(endpoint), probe(endpoint)

    def differences(self, by_name: Mapping[str, Any]) -> Sequence[Difference]:
        """Return in which ways candidates answer differently."""
        return differences(by_name)

    def fingerprint(self) -> dict[str, Any]:
        """Return what this is measured on, with every model that is known here."""
        infos = {name: found.info for name, found in self.models.items() if found.info is not None}
        known = {"models": [{"contract_name": name, **fingerprint.model(info)} for name, info in infos.items()]}
        only = next(iter(infos.values())) if len(infos) == 1 else None
        is_ours = any(candidate.command[:1] == (OURS,) for candidate in self.contract.candidates)
        try:
            return fingerprint.begin(only, native=is_ours) | known
        except LocalLLMError:  # no native library: ours will say so when it is started
            return fingerprint.begin(only) | known

    def calibration(self) -> Any:
        """Return the client's own part in what it measures."""
        return calibrate()
