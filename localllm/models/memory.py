"""What a model will take in memory, from its header alone, before anything is loaded.

Terms of `MemoryEstimate` are resident bytes of the whole process on the CPU. Weights, KV and state
are exact; buffers, vocabulary and interpreter are fitted to measured processes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from localllm.errors import NotEnoughMemory
from localllm.models.info import ModelInfo
from localllm.models.kv_types import KvTypes, row_bytes
from localllm.models.layers import Layer
from localllm.models.repack import repacked_bytes, tied_copy_bytes

USABLE_SHARE = 0.9
"""Of the available memory, what an estimate may reach: the rest is for everything else."""

CELL_PAD = 256
_F32 = 4
_PROCESS_BYTES = 48_000_000
_VOCABULARY_ENTRY_BYTES = 170
_BUFFER_BYTES = 3_000_000
_MASK_BYTES = 6


@dataclass(frozen=True, slots=True)
class ContextShape:
    """How a model is loaded and its context opened, as far as memory depends on it beyond the length.

    `n_slots` sequences, `n_ubatch` rows a graph. `repacked`: the tensor types that are copied into a
    faster layout. `n_rs_seq`: snapshots a slot of recurrent state.
    """

    kv: KvTypes = KvTypes()
    n_slots: int = 2
    n_ubatch: int = 512
    repacked: frozenset[str] = frozenset()
    flash_attn: bool = True
    kv_unified: bool = True
    swa_full: bool = False
    n_rs_seq: int = 0
    use_mmap: bool = True


EXACT_KV = KvTypes("q8_0", "q8_0")
"""With other types, attention adds up by threads and rows."""

EXACT_CHUNK_TOKENS = 64
"""Where chunks of a prompt end, if results are to repeat: longer ones are hardly faster, and a hit is cut to one."""


def exact_shape(n_slots: int) -> ContextShape:
    """Return the shape of a context whose results repeat to the last bit: each slot has a part of its own."""
    n_ubatch = max(EXACT_CHUNK_TOKENS, n_slots)
    return ContextShape(EXACT_KV, n_slots, n_ubatch=n_ubatch, kv_unified=False, swa_full=True)


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Resident bytes by what they are for.

    `weights`: the mapped file as far as it stays in use. `repacked`: their second copy. `kv`: all
    cells. `state`: recurrent state with its snapshots. `load_peak`: the process while it loads,
    when the whole file is resident and no context exists yet.
    """

    n_ctx: int
    weights_bytes: int
    repacked_bytes: int
    kv_bytes: int
    state_bytes: int
    compute_bytes: int
    output_bytes: int
    vocabulary_bytes: int
    process_bytes: int
    load_peak_bytes: int

    @property
    def running_bytes(self) -> int:
        """The process once its context is full."""
        return (
            self.weights_bytes
            + self.repacked_bytes
            + self.kv_bytes
            + self.state_bytes
            + self.compute_bytes
            + self.output_bytes
            + self.vocabulary_bytes
            + self.process_bytes
        )

    @property
    def total_bytes(self) -> int:
        """The most that is resident at any time."""
        return max(self.running_bytes, self.load_peak_bytes)


def estimate(info: ModelInfo, n_ctx: int, shape: ContextShape = ContextShape()) -> MemoryEstimate:
    """Return what the model takes with a context of `n_ctx` tokens in all."""
    weights, repacked = _weights(info, shape)
    process = _PROCESS_BYTES + _BUFFER_BYTES
    vocabulary = _VOCABULARY_ENTRY_BYTES * (info.n_vocab + info.n_merges)
    return MemoryEstimate(
        n_ctx=n_ctx,
        weights_bytes=weights,
        repacked_bytes=repacked,
        kv_bytes=kv_bytes(info, n_ctx, shape),
        state_bytes=state_bytes(info, shape),
        compute_bytes=_compute(info, n_ctx, shape),
        output_bytes=3 * shape.n_slots * info.n_vocab * _F32,
        vocabulary_bytes=vocabulary,
        process_bytes=process,
        load_peak_bytes=process + vocabulary + repacked + (info.size_bytes if shape.use_mmap else weights),
    )


def kv_bytes_per_token(info: ModelInfo, kv: KvTypes = KvTypes()) -> int:
    """Return the KV bytes that one token writes in all layers (those with a window forget it again)."""
    return sum(_layer_token_bytes(layer, kv) for layer in info.layers)


def kv_bytes(info: ModelInfo, n_ctx: int, shape: ContextShape = ContextShape()) -> int:
    """Return the exact bytes of the KV cells: full layers hold `n_ctx` of them, window layers fewer."""
    full, window = _cells(info, n_ctx, shape)
    return sum(_layer_token_bytes(layer, shape.kv) * (window if layer.is_windowed else full) for layer in info.layers)


def state_bytes(info: ModelInfo, shape: ContextShape) -> int:
    """Return the exact bytes of recurrent state: a row a slot, and its snapshots where there are any."""
    snapshots = shape.n_rs_seq if info.can_roll_back_state else 0
    values = sum(layer.conv_values + layer.state_values for layer in info.layers)
    return values * _F32 * shape.n_slots * (1 + snapshots)


def largest_ctx(info: ModelInfo, budget_bytes: int, shape: ContextShape = ContextShape()) -> int:
    """Return the largest context in tokens whose estimate is within the budget, 0 if none is.

    A multiple of 256 (or the trained length), and never longer than the model was trained for. Where every
    slot has a part of its own, it is the length of one.
    """
    n_parts = 1 if shape.kv_unified else shape.n_slots
    return _largest(lambda n_ctx: estimate(info, n_ctx * n_parts, shape).total_bytes, info.n_ctx_train, budget_bytes)


def require(info: ModelInfo, n_ctx: int, shape: ContextShape, *, available_bytes: int) -> MemoryEstimate:
    """Return the estimate if it fits in the usable share of `available_bytes`.

    Raises: NotEnoughMemory with the estimate, what is available and the largest context that fits.
    """
    need = estimate(info, n_ctx, shape)
    budget = int(available_bytes * USABLE_SHARE)
    if need.total_bytes <= budget:
        return need
    fits = largest_ctx(info, budget, shape)
    hint = f"--ctx {fits} is the largest context that fits" if fits else "close other programs, or run a smaller model"
    if fits and shape.kv == KvTypes():
        hint += "; --kv q8_0 halves the KV cache"
    raise NotEnoughMemory(
        f"{info.path.name} with a context of {n_ctx:,} tokens needs about {_gb(need.total_bytes)} "
        f"(weights {_gb(need.weights_bytes + need.repacked_bytes)}, KV {_gb(need.kv_bytes + need.state_bytes)}); "
        f"{_gb(available_bytes)} is available, of which {USABLE_SHARE:.0%} may be used.",
        hint,
        needed_bytes=need.total_bytes,
        available_bytes=available_bytes,
        largest_ctx=fits,
    )


def _largest(total: Callable[[int], int], most: int, budget: int) -> int:
    if total(most) <= budget:
        return most
    low, high = 0, most // CELL_PAD
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if total(middle * CELL_PAD) <= budget else (low, middle - 1)
    return low * CELL_PAD


def _pad(n_cells: int) -> int:
    return -(-n_cells // CELL_PAD) * CELL_PAD


def _cells(info: ModelInfo, n_ctx: int, shape: ContextShape) -> tuple[int, int]:
    """Return the cells of full layers and of window layers, over all streams."""
    n_streams = 1 if shape.kv_unified else shape.n_slots
    each = _pad(n_ctx // n_streams)
    windows = info.window_tokens * (shape.n_slots // n_streams)
    window = each if shape.swa_full else _pad(min(each, windows + shape.n_ubatch))
    return each * n_streams, window * n_streams


def _layer_token_bytes(layer: Layer, kv: KvTypes) -> int:
    return row_bytes(kv.k, layer.k_values) + row_bytes(kv.v, layer.v_values)


def _weights(info: ModelInfo, shape: ContextShape) -> tuple[int, int]:
    """Return (bytes that stay mapped, bytes of the copies).

    A file stays mapped from the first to the last tensor that is used where it lies.
    """
    mapped = copied = first = 0
    for n_tensors in info.part_tensors:
        part = info.tensors[first : first + n_tensors]
        first += n_tensors
        copies = [repacked_bytes(tensor, shape.repacked) for tensor in part]
        copied += sum(copies)
        stay = [tensor for tensor, copy in zip(part, copies, strict=True) if not copy]
        if shape.use_mmap and stay:
            mapped += max(tensor.offset + tensor.n_bytes for tensor in stay) - min(tensor.offset for tensor in stay)
        else:
            mapped += sum(tensor.n_bytes for tensor in stay)
    return mapped, copied + tied_copy_bytes(info.tensors, shape.repacked)


def _compute(info: ModelInfo, n_ctx: int, shape: ContextShape) -> int:
    """Return what graphs touch: activations of a micro-batch, masks, scores without flash attention."""
    full, window = _cells(info, n_ctx, shape)
    width = info.n_ff * max(1, info.n_expert_used)
    channels = max((layer.conv_values for layer in info.layers), default=0)
    state = max((layer.state_values for layer in info.layers), default=0)
    activations = _F32 * shape.n_ubatch * (3 * width + 4 * info.n_embd + channels) + 2 * _F32 * shape.n_slots * state
    attended = full + (window if info.window_tokens else 0) if any(layer.k_values for layer in info.layers) else 0
    masks = _MASK_BYTES * shape.n_ubatch * attended
    scores = 0 if shape.flash_attn else _F32 * shape.n_ubatch * info.n_head * full
    return activations + masks + scores


def _gb(n_bytes: int) -> str:
    return f"{n_bytes / 1e9:.2f} GB"
