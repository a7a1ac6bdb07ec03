"""What tests make go wrong in a worker. Imported only under LOCALLLM_FAULTS=1."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace

from localllm.errors import UsageError
from localllm.runtime.config import LoadConfig, RuntimeConfig
from localllm.runtime.engine import Engine
from localllm.runtime.hooks import Hooks
from localllm.runtime.service import Service
from localllm.worker.protocol import Load


def wrapper() -> Callable[[Engine], Engine]:
    return lambda engine: engine


def open_named(name: str, load: Load, config: LoadConfig, runtime: RuntimeConfig, hooks: Hooks) -> Service:
    """Return a service over the engine that `name` ("module:factory") makes of `load`. Raises: UsageError."""
    module, _, factory = name.partition(":")
    try:
        make = getattr(importlib.import_module(module), factory)
    except (ImportError, AttributeError):
        raise UsageError(
            f"LOCALLLM_ENGINE names {name}, which is not there.", "LOCALLLM_ENGINE=module:factory"
        ) from None
    model, facts, engine = make(load)
    if runtime.max_running is None:
        runtime = replace(runtime, max_running=config.parallel)
    return Service(model, facts, engine, runtime, hooks=hooks)
