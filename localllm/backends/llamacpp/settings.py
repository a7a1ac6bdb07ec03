"""What a llama.cpp model and context are opened with: frozen, decided by placement."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from localllm.runtime.config import FlashAttn

FLASH_ATTENTION: Mapping[FlashAttn, int] = MappingProxyType({"auto": -1, "off": 0, "on": 1})
"""llama.cpp's numbers of its flash attention settings."""


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """How weights are loaded.

    `n_gpu_layers` counts from the end, 0 = all on the CPU. `repack` makes a second copy of the
    weights in a layout that is faster for many rows (`native.md`: memory and load time).
    `vocab_only`: no weights at all, for a tokenizer.
    """

    n_gpu_layers: int = 0
    use_mmap: bool = True
    repack: bool = True
    vocab_only: bool = False


@dataclass(frozen=True, slots=True)
class ContextSettings:
    """How one context over a model is opened.

    `n_ctx`: cells of the pool. `n_slots`: sequences, the spare one included. `n_batch` rows go
    into one forward, `n_ubatch` into one graph. `n_rs_seq`: snapshots a slot for rollback on the
    recurrent models that can. `kv_unified`: one pool for all slots, else a stream each.
    `swa_full`: window layers keep every cell. `max_sequence_tokens`: the longest sequence, where
    the model was trained for less than the pool holds; 0 = what the pool holds. `pool_is_host_memory`: the cells lie
    in the machine's own memory. `cut_tokens`: results are
    to be bit-identical, and prompts computed in chunks that end at its multiples; 0 = not. `exact_rows`:
    the most rows of a forward that is no such chunk, where the kernels give equal bits for that many.
    """

    n_ctx: int
    n_slots: int
    n_batch: int = 512
    n_ubatch: int = 512
    n_threads: int = 1
    n_threads_batch: int = 1
    flash_attn: FlashAttn = "auto"
    kv_k: str = "f16"
    kv_v: str = "f16"
    kv_unified: bool = True
    swa_full: bool = False
    n_rs_seq: int = 0
    offload_kqv: bool = True
    max_sequence_tokens: int = 0
    pool_is_host_memory: bool = True
    cut_tokens: int = 0
    exact_rows: int = 1
