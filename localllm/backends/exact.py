"""Placing a model so that equal requests get answers equal to the last bit: what that takes, and what refuses it.

What was measured, and why each setting is needed: docs/decisions/019-deterministic.md.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from localllm.errors import UsageError
from localllm.models.kv_types import KvTypes
from localllm.models.memory import CELL_PAD, EXACT_KV
from localllm.runtime.config import LoadConfig

if TYPE_CHECKING:
    from localllm.backends.llamacpp.devices import Device

EXACT_ROWS = 7
"""Rows a forward where each counts for itself: from 8 on kernels add up in another order."""


def exact_wishes(wishes: LoadConfig, gpus: tuple[Device, ...]) -> LoadConfig:
    """Return the wishes that make results repeat.

    Raises: UsageError for a wish that rules it out, naming it and the way out.
    """
    if wishes.kv not in (KvTypes(), EXACT_KV):
        raise UsageError(
            f"--deterministic needs a KV cache of type {EXACT_KV}, not {wishes.kv}: others depend on threads.",
            f"--kv {EXACT_KV}, or leave --deterministic out",
            field="kv",
        )
    if wishes.flash_attn == "off":
        raise UsageError(
            "--deterministic needs flash attention, which is off.",
            "--flash-attn on, or leave --deterministic out",
            field="flash_attn",
        )
    if wishes.gpu not in ("off", 0) and (gpus or wishes.gpu != "auto"):
        raise UsageError(
            "--deterministic holds on the CPU only: a GPU's kernels add up in another order for another batch.",
            "--gpu off, or leave --deterministic out",
            field="gpu",
        )
    return replace(wishes, kv=EXACT_KV, flash_attn="on", gpu="off")


def pool_cells(each_tokens: int, n_slots: int) -> int:
    """Return the cells of a pool of which every slot has a part of its own, for sequences of `each_tokens`."""
    return -(-each_tokens // CELL_PAD) * CELL_PAD * n_slots
