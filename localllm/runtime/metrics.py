"""What the runtime counts about itself; read by `--stats`, `bench` and, later, `/metrics`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(slots=True)
class RuntimeStats:
    """Counters since the start and gauges of now. Written by the engine's thread only.

    `n_prompt_tokens_*` split prompt tokens by where their KV came from: computed, or the tier that held it.
    `n_retained_slots`, `used_cells` and `retained_cells` (held by retained slots alone) are gauges.
    `pool_use_at_first_refusal` is the share of
    cells in use (0..1) when room was first short, None while it never was.
    """

    n_steps: int = 0
    n_rows: int = 0
    n_prompt_tokens_computed: int = 0
    n_prompt_tokens_device: int = 0
    n_prompt_tokens_ram: int = 0
    n_prompt_tokens_disk: int = 0
    n_generated_tokens: int = 0
    n_embedded_texts: int = 0
    n_embedded_tokens: int = 0
    n_accepted_draft_tokens: int = 0
    n_rejected_draft_tokens: int = 0
    n_preemptions: int = 0
    n_recomputed_tokens: int = 0
    n_evictions: int = 0
    n_floor_chunks: int = 0  # chunks at the floor although the ITL target asked for less
    n_running: int = 0
    n_waiting: int = 0
    n_retained_slots: int = 0
    used_cells: int = 0
    retained_cells: int = 0
    n_exported_blocks: int = 0
    export_s: float = 0.0
    n_restored_blocks: int = 0
    restore_s: float = 0.0
    n_refused_blocks: int = 0  # whole bytes that the engine would not take back
    pool_use_at_first_refusal: float | None = None

    def count_cached(self, cached_tokens: Mapping[str, int]) -> None:
        """Count prompt tokens whose KV was held, by tier."""
        self.n_prompt_tokens_device += cached_tokens.get("device", 0)
        self.n_prompt_tokens_ram += cached_tokens.get("ram", 0)
        self.n_prompt_tokens_disk += cached_tokens.get("disk", 0)

    @property
    def n_prompt_tokens_cached(self) -> int:
        """Prompt tokens whose KV was held somewhere."""
        return self.n_prompt_tokens_device + self.n_prompt_tokens_ram + self.n_prompt_tokens_disk
