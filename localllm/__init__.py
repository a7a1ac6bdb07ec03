"""localllm: run language models on your own machine.

import localllm

with localllm.open("smollm2:135m") as model:
    print(model.generate(["Name three colours."], max_tokens=32)[0].text)
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from localllm.runtime.service import Service

__version__ = "0.1.0"


def open(model: str | os.PathLike[str], **config: Any) -> Service:
    """Load a model and return its `Service`; close it, or use it as a context manager.

    `model`: a file, a directory, an alias such as "smollm2:135m", or part of a stored name.
    `config`: the fields of `localllm.runtime.config.LoadConfig` (ctx, kv, gpu, threads, parallel, ...);
    kv may be text ("q8_0", or "q8_0:f16" for K and V apart). `tiers`: a `TierConfig` of the same module, where
    KV is kept beyond the device; without one, in RAM alone.
    Raises: ModelNotFound, ModelRefused, NotEnoughMemory, UsageError (all of `localllm.errors`).
    """
    from dataclasses import fields
    from pathlib import Path

    from localllm import compose
    from localllm.errors import UsageError
    from localllm.models.kv_types import KvTypes
    from localllm.runtime.config import LoadConfig, RuntimeConfig, TierConfig

    tiers = config.pop("tiers", TierConfig())
    unknown = config.keys() - {f.name for f in fields(LoadConfig)}
    if unknown:
        raise UsageError(
            f"open() has no setting {', '.join(sorted(unknown))}.", "see localllm.runtime.config.LoadConfig"
        )
    if isinstance(config.get("kv"), str):
        config["kv"] = KvTypes.parse(config["kv"])
    if isinstance(config.get("template"), (str, os.PathLike)):
        config["template"] = Path(config["template"])
    if not isinstance(model, (str, os.PathLike)):
        raise UsageError(f"The model must be a name or a path, not {model!r}.", 'localllm.open("smollm2:135m")')
    if not isinstance(tiers, TierConfig):
        raise UsageError(f"tiers must be a TierConfig, not {tiers!r}.", "TierConfig(disk_dir=..., disk_bytes=...)")
    return compose.open(os.fspath(model), LoadConfig(**config), runtime=RuntimeConfig(tiers=tiers))
