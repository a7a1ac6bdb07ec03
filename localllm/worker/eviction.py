"""Which loaded models make room for another, and which are no longer needed: pure, facts and times are given."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from localllm.errors import NotEnoughMemory, Unavailable
from localllm.runtime.config import AUTO_CTX_TOKENS, AUTO_POOL_SEQUENCES, LoadConfig

RESERVED_S = 1.0
"""How long a model that was just asked for is not unloaded."""

_RETRY_AFTER_S = 5
_TIER_SHARE = 4


@dataclass(frozen=True, slots=True)
class Held:
    """A loaded model, as far as making room is concerned. `used_s`: when it was last asked for anything."""

    name: str
    memory_bytes: int
    is_busy: bool
    is_pinned: bool
    used_s: float

    def may_go(self, now_s: float) -> bool:
        """Say whether nobody would miss it now; whoever was given it a moment ago is about to use it."""
        return not (self.is_busy or self.is_pinned) and now_s - self.used_s >= RESERVED_S


def least_used(held: Sequence[Held], now_s: float) -> str | None:
    """Return the model that goes first: unused for longest; None where none may go."""
    free = [one for one in held if one.may_go(now_s)]
    return min(free, key=lambda one: one.used_s).name if free else None


def make_room(need_bytes: int, held: Sequence[Held], limit_bytes: int, now_s: float) -> tuple[str, ...]:
    """Return the models to unload, least recently used first, so that `need_bytes` more fit the limit.

    Raises: Unavailable where only models at work stand in the way; NotEnoughMemory where it never fits.
    """
    n_over = sum(one.memory_bytes for one in held) + need_bytes - limit_bytes
    going = list[str]()
    for one in sorted((one for one in held if one.may_go(now_s)), key=lambda one: one.used_s):
        if n_over <= 0:
            break
        going.append(one.name)
        n_over -= one.memory_bytes
    if n_over <= 0:
        return tuple(going)
    pinned_bytes = sum(one.memory_bytes for one in held if one.is_pinned)
    if pinned_bytes + need_bytes <= limit_bytes:
        raise Unavailable(
            "Other models are at work in the memory that this one needs.",
            "try again in a moment",
            retry_after_s=_RETRY_AFTER_S,
        )
    raise NotEnoughMemory(
        f"The model needs about {_gb(need_bytes)}; of the {_gb(limit_bytes)} that --max-memory allows, models that "
        f"stay loaded take {_gb(pinned_bytes)}.",
        "raise --max-memory, or name fewer models at start",
    )


def tier_bytes(limit_bytes: int, model_bytes: Sequence[int]) -> int:
    """Return how much RAM each of these models may keep KV in: an equal part of what they leave, at most a quarter."""
    left_bytes = limit_bytes - sum(model_bytes)
    return max(0, min(limit_bytes // _TIER_SHARE, left_bytes // max(1, len(model_bytes))))


def unused(held: Sequence[Held], keep_alive_s: float, now_s: float) -> tuple[str, ...]:
    """Return the models that nobody used for `keep_alive_s`."""
    return tuple(one.name for one in held if one.may_go(now_s) and now_s - one.used_s >= keep_alive_s)


def due_in_s(held: Sequence[Held], keep_alive_s: float, now_s: float) -> float | None:
    """Return the seconds until one of these may have been unused for `keep_alive_s`; None where all stay."""
    used_s = [now_s if one.is_busy else one.used_s for one in held if not one.is_pinned]
    return max(0.0, min(used_s) + max(keep_alive_s, RESERVED_S) - now_s) if used_s else None


def estimate_bytes(path: Path, config: LoadConfig) -> int:
    """Return about what a worker with this model takes, from the file's header. Raises ModelRefused."""
    from localllm.models import memory
    from localllm.models.info import read_info
    from localllm.models.repack import repacked_types

    info = read_info(path)
    each = min(AUTO_CTX_TOKENS, info.n_ctx_train or AUTO_CTX_TOKENS)
    n_slots = config.parallel + config.retained + 1
    if config.deterministic:
        return memory.estimate(info, (config.ctx or each) * n_slots, memory.exact_shape(n_slots)).total_bytes
    feature = "asimddp" if platform.machine() in ("arm64", "aarch64") else "avx2"
    shape = memory.ContextShape(
        kv=config.kv,
        n_slots=n_slots,
        repacked=repacked_types(frozenset((feature,))),
        flash_attn=config.flash_attn != "off",
    )
    return memory.estimate(info, config.ctx or each * min(config.parallel, AUTO_POOL_SEQUENCES), shape).total_bytes


def _gb(n_bytes: int) -> str:
    return f"{n_bytes / 1e9:.2f} GB"
