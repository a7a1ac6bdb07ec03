"""The settings of a loaded model and of its runtime; the CLI's defaults are these defaults."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from localllm.errors import UsageError
from localllm.models.kv_types import KvTypes

ANSWER_TOKENS = 2048
"""The longest answer that nobody asked to be longer: on the command line, and in a context sized by itself."""

AUTO_CTX_TOKENS = 8192
"""The context of each parallel sequence where nobody says how long: more costs start time and memory."""

AUTO_POOL_SEQUENCES = 2
"""Sequences of that length that an automatic pool holds, however many run: they share it, and few are long."""

FlashAttn: TypeAlias = Literal["auto", "on", "off"]
GpuChoice: TypeAlias = Literal["auto", "off", "all"]
GpuLayers: TypeAlias = GpuChoice | int

MAX_THREADS = 512
"""GGML_MAX_N_THREADS; far more than that ends the process in native code."""

_MAX_COUNT = 2**31 - 1


@dataclass(frozen=True, slots=True)
class LoadConfig:
    """How a model is loaded: wishes, which placement turns into engine settings.

    `ctx` in tokens, None = auto (sized by the caller's `need_tokens`, else by the model and memory).
    `gpu` counts layers on the device. `parallel` sequences run at once; `retained` finished ones
    keep their KV on the device. `deterministic`: equal requests get answers equal to the last bit,
    whatever else runs and whatever is cached. Raises: UsageError naming the field that is out of its range.
    """

    ctx: int | None = None
    kv: KvTypes = KvTypes()
    flash_attn: FlashAttn = "auto"
    gpu: GpuLayers = "auto"
    threads: int | None = None
    template: Path | None = None
    parallel: int = 1
    retained: int = 1
    deterministic: bool = False

    def __post_init__(self) -> None:
        if self.ctx is not None:
            _check_count("ctx", self.ctx, 1, _MAX_COUNT)
        if self.threads is not None:
            _check_count("threads", self.threads, 1, MAX_THREADS)
        if self.gpu not in get_args(GpuChoice):
            _check_count("gpu", self.gpu, 0, _MAX_COUNT, ", auto, off or all")
        _check_count("parallel", self.parallel, 1, _MAX_COUNT)
        _check_count("retained", self.retained, 0, _MAX_COUNT)
        if self.flash_attn not in get_args(FlashAttn):
            raise UsageError(f"flash_attn must be auto, on or off, not {self.flash_attn!r}.", "leave flash_attn out")
        if not isinstance(self.kv, KvTypes):
            raise UsageError(f"kv must be KV types, not {self.kv!r}.", "KvTypes.parse('q8_0')")
        if not isinstance(self.template, (Path, type(None))):
            raise UsageError(f"template must be a path, not {self.template!r}.", "Path('chat.jinja')")


def _check_count(name: str, value: Any, low: int, high: int, others: str = "") -> None:
    """Refuse what is no whole number in [low, high]; a bool is none."""
    if type(value) is not int or not low <= value <= high:
        wanted = f"a whole number from {low} to {high}{others}"
        raise UsageError(f"{name} must be {wanted}; got {value!r}.", f"leave {name} out for the default", field=name)


@dataclass(frozen=True, slots=True)
class TierConfig:
    """Where KV is kept once it leaves the device. Sizes in bytes, ages in seconds.

    `ram_bytes`: of one loaded model; None = a quarter of the memory that is available, 0 = no RAM tier.
    `disk_dir` "" = nothing goes to disk. `disk_bytes`: of all models in that folder together; None = a tenth
    of the free disk, counting what lies there.
    `disk_daily_bytes`: written a day, by all processes together. `disk_age_s`: unused for that long, it goes.
    `flush_s`: how long closing waits for what is still to be written; with `keeps_all` that is all that RAM
    holds, else what the rules of writing chose before.
    """

    ram_bytes: int | None = None
    disk_dir: str = ""
    disk_bytes: int | None = 0
    disk_daily_bytes: int = 32 << 30
    disk_age_s: float = 7 * 86_400.0
    block_tokens: int = 64
    flush_s: float = 2.0
    keeps_all: bool = False

    def __post_init__(self) -> None:
        for name in ("ram_bytes", "disk_bytes", "disk_daily_bytes"):
            if getattr(self, name) is not None:
                _check_count(name, getattr(self, name), 0, 2**62)
        _check_count("block_tokens", self.block_tokens, 1, _MAX_COUNT)
        if not self.disk_age_s > 0:
            raise UsageError(f"disk_age_s must be above 0; got {self.disk_age_s!r}.", "leave disk_age_s out")


@dataclass(frozen=True, slots=True)
class RuntimeConfig:
    """How the loop spends time and room.

    `itl_target_s`: a prefill chunk beside decoding sequences fits in this. `prefill_target_s`:
    the longest step when nobody decodes, so that cancel stays quick. `min_chunk_tokens`: the
    floor that lets a newcomer always advance. `max_waiting`: beyond it, QueueFull. `max_running`:
    sequences at work at once, None = as many as there are slots. `fixed_chunks`: chunks end where
    they would on any machine, whatever steps cost: for answers that are compared to the last digit.
    `tiers`: where KV is kept once it leaves the device.
    """

    itl_target_s: float = 0.2
    prefill_target_s: float = 2.0
    min_chunk_tokens: int = 32
    max_waiting: int = 128
    min_wait_prefix_tokens: int = 32
    max_running: int | None = None
    fixed_chunks: bool = False
    tiers: TierConfig = TierConfig()

    def __post_init__(self) -> None:
        for name in ("min_chunk_tokens", "max_waiting", "min_wait_prefix_tokens"):
            _check_count(name, getattr(self, name), 1, _MAX_COUNT)
        if self.max_running is not None:
            _check_count("max_running", self.max_running, 1, _MAX_COUNT)
