"""Number types of the KV cache: their bytes, their spelling, and what each of them needs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from localllm.errors import UsageError
from localllm.models.gguf.types import TENSOR_TYPES, TensorType

ALL_TYPES: tuple[str, ...] = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")
"""The types that llama.cpp's KV cache takes: some of ggml's tensor types, in lower case."""

FLAG_TYPES: tuple[str, ...] = ("f16", "q8_0", "q4_0")
"""The types that `--kv` offers; the others are for the library and for measuring."""


def number_of(kv_type: str) -> int:
    """Return ggml's number of a KV type. Raises UsageError for an unknown one."""
    if kv_type not in ALL_TYPES:
        raise UsageError(f"{kv_type!r} is not a KV cache type.", f"choose one of: {', '.join(ALL_TYPES)}")
    return next(number for number, kind in TENSOR_TYPES.items() if kind.name.lower() == kv_type)


def packing_of(kv_type: str) -> TensorType:
    """Return how values of a KV type are packed. Raises UsageError for an unknown one."""
    return TENSOR_TYPES[number_of(kv_type)]


def row_bytes(kv_type: str, n_values: int) -> int:
    """Return the bytes of a row of `n_values`, a multiple of the type's block (rounded up if it is not)."""
    packing = packing_of(kv_type)
    return -(-n_values // packing.block_values) * packing.block_bytes


@dataclass(frozen=True, slots=True)
class KvTypes:
    """The types of the K and of the V cache.

    Raises: UsageError for a type that no cache has.
    """

    k: str = "f16"
    v: str = "f16"

    def __post_init__(self) -> None:
        number_of(self.k)
        number_of(self.v)

    @classmethod
    def parse(cls, text: str, allowed: tuple[str, ...] = FLAG_TYPES) -> KvTypes:
        """Read "q8_0" (both) or "q8_0:f16" (K:V). Raises UsageError for anything else."""
        parts = text.strip().lower().split(":")
        if len(parts) > 2 or any(part not in allowed for part in parts):
            raise UsageError(
                f"{text!r} is not a KV cache type.",
                f"--kv takes {'|'.join(allowed)}, for K and V together or apart as K:V (q8_0:f16)",
            )
        return cls(parts[0], parts[-1])

    def __str__(self) -> str:
        """Return the spelling that `parse` reads."""
        return self.k if self.k == self.v else f"{self.k}:{self.v}"

    @property
    def needs_flash_attention(self) -> bool:
        """A quantised V cache can only be read by flash attention."""
        return packing_of(self.v).is_quantized

    def check(
        self,
        *,
        head_sizes_k: Iterable[int],
        head_sizes_v: Iterable[int],
        flash_attn: bool,
        reads_v_from_k: bool = False,
    ) -> None:
        """Refuse a combination that the engine cannot create. `flash_attn` False = switched off.

        Raises: UsageError that names the ways out (a quantised V needs flash attention; blocks
        must divide the head size; a model that reads V out of K has one type).
        """
        if reads_v_from_k and self.k != self.v:
            raise UsageError(
                f"This model reads V out of its K cache, so the two cannot be {self.k} and {self.v}.",
                f"--kv {self.k}, or --kv f16",
            )
        if self.needs_flash_attention and not flash_attn:
            raise UsageError(
                f"A V cache of type {self.v} needs flash attention, which is off.",
                f"--flash-attn on, or keep V unquantised: --kv {KvTypes(self.k, 'f16')}",
            )
        for side, kv_type, sizes in (("K", self.k, head_sizes_k), ("V", self.v, head_sizes_v)):
            per_block = packing_of(kv_type).block_values
            bad = sorted({size for size in sizes if size % per_block})
            if bad:
                other = KvTypes("f16", self.v) if side == "K" else KvTypes(self.k, "f16")
                raise UsageError(
                    f"A {side} cache of type {kv_type} needs head sizes that {per_block} divides; "
                    f"this model has {', '.join(map(str, bad))}.",
                    f"--kv {other}, or --kv f16",
                )
