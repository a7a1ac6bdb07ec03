"""The rows of a benchmark, in llama-bench's field names, and what is measured beside them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from localllm.bench.stats.summaries import Estimate, mean, stdev


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What a row was measured on: llama-bench's fields, in its order. None = this engine has no such fact.

    `build_commit` and `backends` as the native library reports them (it carries no build number);
    `n_threads` of a decode step; `flash_attn`: 1 = on, 0 = off, -1 = left to the library.
    """

    build_commit: str
    cpu_info: str
    gpu_info: str
    backends: str
    model_filename: str
    model_type: str
    model_size: int
    model_n_params: int
    n_batch: int
    n_ubatch: int
    n_threads: int
    type_k: str
    type_v: str
    n_gpu_layers: int
    flash_attn: int
    repack: bool
    load_mode: str = "mmap"
    build_number: int | None = None
    cpu_mask: str = "0x0"
    cpu_strict: bool = False
    poll: int | None = None
    n_cpu_moe: int = 0
    split_mode: str = "layer"
    main_gpu: int = 0
    no_kv_offload: bool = False
    devices: str = "auto"
    tensor_split: str = "0.00"
    tensor_buft_overrides: str = "none"
    lazy_mode: str | None = None
    embeddings: bool = False
    no_op_offload: bool = False
    no_host: bool = False
    fit_target: int | None = None
    fit_min_ctx: int | None = None


FACT_FIELDS = tuple(
    """
    build_commit build_number cpu_info gpu_info backends model_filename model_type model_size model_n_params
    n_batch n_ubatch n_threads cpu_mask cpu_strict poll type_k type_v n_gpu_layers n_cpu_moe split_mode main_gpu
    no_kv_offload flash_attn devices tensor_split tensor_buft_overrides load_mode lazy_mode embeddings
    no_op_offload no_host repack fit_target fit_min_ctx
    """.split()  # noqa: SIM905
)
TEST_FIELDS = ("n_prompt", "n_gen", "n_depth", "test_time", "avg_ns", "stddev_ns", "avg_ts", "stddev_ts")

# Ours, after llama-bench's: a script that reads its fields by name finds them unmoved.
EXTRA_FIELDS = (
    "test",
    "n_parallel",
    "partial",
    "bytes_per_token",
    "bandwidth_share",
    "bare_avg_ns",
    "bare_avg_ts",
    "overhead_ratio",
    "overhead_ratio_low",
    "overhead_ratio_high",
    "start_ratio",
    "start_ratio_low",
    "start_ratio_high",
    "peak_rss_bytes",
    "bare_peak_rss_bytes",
)
FIELDS = (*FACT_FIELDS, *TEST_FIELDS, *EXTRA_FIELDS)


@dataclass(frozen=True, slots=True)
class Case:
    """What one row measures: `n_prompt` tokens prefilled or `n_gen` decoded, by `n_parallel` sequences each.

    `n_depth` tokens are held before the clock starts. `kind` names rows that llama-bench has not.
    """

    n_prompt: int = 0
    n_gen: int = 0
    n_depth: int = 0
    n_parallel: int = 1
    kind: str = ""

    @property
    def single_name(self) -> str:
        """llama-bench's name: "pp512", "tg128", "pp512 @ d512"; the kind in front where it has none."""
        counts = "+".join(
            f"{letters}{count}" for letters, count in (("pp", self.n_prompt), ("tg", self.n_gen)) if count
        )
        depth = f" @ d{self.n_depth}" if self.n_depth else ""
        return f"{self.kind} {counts}{depth}".strip()

    @property
    def name(self) -> str:
        """`single_name`, with the number of sequences where there are several: "tg32 x4"."""
        return self.single_name + (f" x{self.n_parallel}" if self.n_parallel > 1 else "")

    @property
    def n_tokens(self) -> int:
        """Tokens that one repetition counts, over all sequences."""
        return (self.n_prompt + self.n_gen) * self.n_parallel


@dataclass(frozen=True, slots=True)
class Row:
    """One measured test. `samples_ns`: nanoseconds of each repetition; `extras`: fields of EXTRA_FIELDS.

    `partial`: interrupted before all repetitions were done. `is_rate`: tokens a second mean something.
    """

    case: Case
    facts: EngineFacts
    test_time: str
    samples_ns: tuple[int, ...]
    partial: bool = False
    is_rate: bool = True
    extras: Mapping[str, Any] = field(default_factory=dict)

    @property
    def samples_ts(self) -> tuple[float, ...]:
        """Tokens a second of each repetition."""
        return tuple(1e9 * self.case.n_tokens / ns for ns in self.samples_ns) if self.is_rate else ()

    @property
    def avg_ts(self) -> float | None:
        """Mean tokens a second, as llama-bench takes it: over the repetitions' rates."""
        return mean(self.samples_ts) if self.is_rate else None

    @property
    def stddev_ts(self) -> float | None:
        """Sample standard deviation of the rates."""
        return stdev(self.samples_ts) if self.is_rate else None

    def flat(self) -> dict[str, Any]:
        """Return every field of FIELDS, in order; None where the row has no such value."""
        values: dict[str, Any] = {name: getattr(self.facts, name) for name in FACT_FIELDS}
        values |= {
            "n_prompt": self.case.n_prompt,
            "n_gen": self.case.n_gen,
            "n_depth": self.case.n_depth,
            "test_time": self.test_time,
            "avg_ns": round(mean(self.samples_ns)),
            "stddev_ns": round(stdev(self.samples_ns)),
            "avg_ts": self.avg_ts,
            "stddev_ts": self.stddev_ts,
        }
        extras = {"test": self.case.name, "n_parallel": self.case.n_parallel, "partial": self.partial}
        return values | dict.fromkeys(EXTRA_FIELDS) | extras | dict(self.extras)

    def document(self) -> dict[str, Any]:
        """Return `flat` with the samples, as llama-bench's JSON has them."""
        return self.flat() | {"samples_ns": list(self.samples_ns), "samples_ts": list(self.samples_ts)}


def ratio_fields(name: str, ratio: Estimate) -> dict[str, float]:
    """Return the three fields of a ratio and its 95 % interval: `name`, `name_low`, `name_high`."""
    return {name: ratio.median, f"{name}_low": ratio.low, f"{name}_high": ratio.high}
