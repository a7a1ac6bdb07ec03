"""One model of the Hugging Face hub, or of a mirror: huggingface-hub finds it, our downloader fetches it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from localllm.errors import DownloadFailed, HashMismatch
from localllm.models.provenance import StoredFile
from localllm.models.reference import HubRef
from localllm.models.sources import download, hub_lookup
from localllm.models.sources.download import DEFAULT_PATIENCE, Patience
from localllm.models.sources.hub_lookup import HubModel, HubSettings
from localllm.models.sources.net import Policy, policy_for
from localllm.models.sources.progress import Meter, Phase
from localllm.models.sources.pulling import Fetched
from localllm.models.sources.transport import Transport
from localllm.models.store import StoredModel


class HubSource:
    """One quantisation of one repository. `pinned_sha256`: what its single file must hash to."""

    def __init__(
        self,
        ref: HubRef,
        name: str,
        *,
        pinned_sha256: str | None = None,
        settings: HubSettings | None = None,
        policy: Policy | None = None,
        patience: Patience = DEFAULT_PATIENCE,
        stall_s: float = 30.0,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.name = name
        self._ref = ref
        self._pinned = pinned_sha256
        self._settings = settings or HubSettings.from_environment(os.environ)
        self._policy = policy or policy_for(self._settings.endpoint, named=self._settings.named)
        self._patience = patience
        self._stall_s = stall_s
        self._sleep = sleep
        self._found: HubModel | None = None

    def holds(self, stored: StoredModel) -> bool:
        """Tell whether the hub still has the same files under this reference; offline, what is here counts."""
        if self._pinned:
            return stored.sha256 == self._pinned
        return self._settings.offline or stored.revision == self._find().commit

    def fill(self, staging: Path, meter: Meter) -> Fetched:
        """Fetch every file of the set that is not there yet."""
        found = self._find()
        transport = Transport(self._policy, token=self._settings.token, stall_s=self._stall_s)
        meter.start(Phase.FETCHING, self.name, found.size_bytes)
        base, stored = 0, []
        for remote in found.files:
            sha256 = download.fetch(
                remote, staging, transport, meter, base_bytes=base, patience=self._patience, sleep=self._sleep
            )
            base += remote.expected.size_bytes
            meter.at(base)
            stored.append(StoredFile(remote.name, remote.expected.size_bytes, sha256))
        owner = self._ref.repo.split("/", 1)[0]
        return Fetched(tuple(stored), str(self._ref), found.commit, found.license, quantiser=owner)

    def _find(self) -> HubModel:
        if self._found is None:
            if self._settings.offline:
                raise DownloadFailed(f"{self._ref} is not here, and HF_HUB_OFFLINE is set", "unset HF_HUB_OFFLINE")
            self._found = hub_lookup.find(self._ref, self._settings, self._policy, self._sleep)
            self._check_pin(self._found)
        return self._found

    def _check_pin(self, found: HubModel) -> None:
        there = [one.expected.sha256 for one in found.files]
        if self._pinned and there != [self._pinned]:
            raise HashMismatch(
                f"the hub has {there[0]} as {found.files[0].name}, the catalog promises {self._pinned}",
                f"localllm pull {self._ref}",
            )
