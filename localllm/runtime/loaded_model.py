"""What a loaded model is: its file, how it was loaded, what a request without settings gets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from localllm.models.info import ModelInfo
from localllm.runtime.sampling_params import Sampling


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """What is loaded, and how. `sampling` = what a request without sampling fields gets.

    `sha256` is None until the file was hashed once; `notes` are the plan's lines for people;
    `settings` are the parameters in force, by llama-bench's names. `n_ctx`: tokens of its context.
    `is_deterministic`: equal requests get answers equal to the last bit.
    """

    name: str
    path: Path
    sha256: str | None
    info: ModelInfo
    n_ctx: int
    n_slots: int
    sampling: Sampling
    notes: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    is_deterministic: bool = False
