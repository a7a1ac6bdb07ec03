"""Models for goldens without weights: files of a few bytes, and services over fake engines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from localllm.bench.goldens.golden import Bench
from localllm.bench.goldens.shelf import Shelf
from localllm.errors import LocalLLMError, ModelNotFound
from localllm.models.info import ModelInfo
from localllm.models.resolve import ModelFile
from localllm.models.store import Store
from localllm.runtime.config import LoadConfig, RuntimeConfig
from localllm.runtime.service import Service
from tests.fake_engine import TEMPLATE, FakeEngine, endless_token, fake_info, fake_service

SETTINGS = {"n_threads": 3, "n_gpu_layers": 33, "flash_attn": "auto"}


@dataclass
class FakeModels:
    """Stands for `compose`: every file in `folder` is a model, and answers as the fields say."""

    folder: Path
    source: str = "file"
    engine: Callable[[], FakeEngine] = lambda: FakeEngine(script=endless_token)
    template: str | None = TEMPLATE
    settings: Mapping[str, Any] = field(default_factory=lambda: SETTINGS)
    failure: LocalLLMError | None = None
    configs: list[tuple[LoadConfig, RuntimeConfig]] = field(default_factory=list)
    engines: list[FakeEngine] = field(default_factory=list)

    def find(self, model: str, /) -> tuple[ModelFile, ModelInfo]:
        """Return a file of the folder."""
        path = self.folder / model
        if not path.is_file():
            raise ModelNotFound(f"There is no {model}.", "localllm ls")
        info = replace(fake_info(model, path), files=(path,))
        return ModelFile(model, path, (path,), None, self.source), info

    def open(self, model: str, config: LoadConfig, /, *, runtime: RuntimeConfig) -> Service:
        """Return a service over a fake engine."""
        if self.failure is not None:
            raise self.failure
        self.configs.append((config, runtime))
        engine = self.engine()
        self.engines.append(engine)
        service = fake_service(engine, config=runtime, template=self.template)
        service.model = replace(service.model, settings=self.settings)
        return service


def bench(models: FakeModels, home: Path) -> Bench:
    """Return what records and checks with these models; goldens go under `home`."""
    return Bench(models, Shelf(Store(home)))
