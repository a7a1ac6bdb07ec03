"""The settings of a loaded model and of its runtime; the CLI's defaults are these defaults."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from localllm.models.kv_types import KvTypes

FlashAttn: TypeAlias = Literal["auto", "on", "off"]
GpuLayers: TypeAlias = Literal["auto", "off", "all"] | int


@dataclass(frozen=True, slots=True)
class LoadConfig:
    """How a model is loaded: wishes, which placement turns into engine settings.

    `ctx` in tokens, None = auto (sized by the caller's `need_tokens`, else by the model and memory).
    `gpu` counts layers on the device. `parallel` sequences run at once; `retained` finished ones
    keep their KV on the device.
    """

    ctx: int | None = None
    kv: KvTypes = KvTypes()
    flash_attn: FlashAttn = "auto"
    gpu: GpuLayers = "auto"
    threads: int | None = None
    template: Path | None = None
    parallel: int = 1
    retained: int = 1


@dataclass(frozen=True, slots=True)
class RuntimeConfig:
    """How the loop spends time and room.

    `itl_target_s`: a prefill chunk beside decoding sequences fits in this. `prefill_target_s`:
    the longest step when nobody decodes, so that cancel stays quick. `min_chunk_tokens`: the
    floor that lets a newcomer always advance. `max_waiting`: beyond it, QueueFull. `max_running`:
    sequences at work at once, None = as many as there are slots.
    """

    itl_target_s: float = 0.2
    prefill_target_s: float = 2.0
    min_chunk_tokens: int = 32
    max_waiting: int = 128
    kv_block_tokens: int = 64
    min_wait_prefix_tokens: int = 32
    max_running: int | None = None
