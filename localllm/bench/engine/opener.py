"""Loads what the benchmark measures, through `compose`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from localllm.bench.engine.facts import engine_facts
from localllm.bench.engine.rows import EngineFacts
from localllm.models.info import ModelInfo
from localllm.runtime.config import LoadConfig
from localllm.runtime.service import Service
from localllm.runtime.types import GenerationRequest

if TYPE_CHECKING:
    from localllm.bench.engine.plan import ClosableBare


class Opener:
    """Opens one model in the ways that its rows need.

    `load` runs a load and returns what it returns: the command line waits for it in a thread.
    """

    def __init__(self, model: str, load: Callable[[Callable[[], Any]], Any] = lambda work: work()) -> None:
        self._model = model
        self._load = load

    def info(self) -> ModelInfo:
        """Return what the model's files say. Raises as `compose.open`."""
        from localllm import compose

        return compose.find(self._model)[1]

    def service(self, config: LoadConfig, sized_for: GenerationRequest | None = None) -> Service:
        """Load the model behind a service."""
        from localllm import compose

        service: Service = self._load(lambda: compose.open(self._model, config, sized_for=sized_for))
        return service

    def bare(self, config: LoadConfig) -> ClosableBare:
        """Open the bare loop with the settings that `service` gets."""
        from localllm import compose

        loop: ClosableBare = self._load(lambda: compose.open_bare(self._model, config))
        return loop

    def facts(self, service: Service) -> EngineFacts:
        """Return what the rows say of this model and the settings it was loaded with."""
        return engine_facts(service.model.info, service.model.settings)
