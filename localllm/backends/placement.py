"""Decides how a model is loaded, from facts and wishes alone: pure, so tables of machines can test it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from localllm.backends.cpu.probe import CpuFacts
from localllm.backends.exact import EXACT_ROWS, exact_wishes, pool_cells
from localllm.backends.llamacpp.devices import Device
from localllm.errors import UsageError
from localllm.models.info import ModelInfo
from localllm.models.kv_types import KvTypes
from localllm.models.memory import (
    CELL_PAD,
    EXACT_CHUNK_TOKENS,
    USABLE_SHARE,
    ContextShape,
    MemoryEstimate,
    estimate,
    exact_shape,
    kv_bytes,
    largest_ctx,
    require,
    state_bytes,
)
from localllm.models.repack import repacked_types
from localllm.runtime.config import AUTO_CTX_TOKENS, AUTO_POOL_SEQUENCES, FlashAttn, LoadConfig

MAX_SLOTS = 256  # LLAMA_MAX_SEQ
_MIN_CTX_TOKENS = 512
_CPU_BATCH, _GPU_BATCH = 512, 2048
_UNIFIED_PREFIX = "MTL"  # of Metal's devices: it calls them GPUs, but their memory is the machine's
_EXACT_NOTE = f"deterministic: prompts in chunks of {EXACT_CHUNK_TOKENS}, no repacked weights, a context for each slot"


@dataclass(frozen=True, slots=True)
class Machine:
    """The facts that placement looks at. `repacking_is_safe`: what the native library is trusted with."""

    cpu: CpuFacts
    devices: tuple[Device, ...] = ()
    available_bytes: int = 0
    repacking_is_safe: bool = True

    @property
    def gpus(self) -> tuple[Device, ...]:
        """The devices that layers can be offloaded to."""
        return tuple(device for device in self.devices if device.kind in ("gpu", "igpu"))


@dataclass(frozen=True, slots=True)
class Placement:
    """How a model is loaded and its context opened. `notes`: what was decided and why, a line each.

    `n_gpu_layers` counts the output layer too (llama.cpp's count). `n_ctx`: cells of the pool;
    `max_sequence_tokens`: the longest sequence in it. `n_slots`: running, retained and the spare.
    `pool_is_host_memory`: the cells lie in the machine's own memory. `cut_tokens`, `exact_rows`: as in the
    engine's spec. `shape`: the same, as far as memory depends on it.
    """

    n_gpu_layers: int
    n_ctx: int
    max_sequence_tokens: int
    n_slots: int
    n_batch: int
    n_ubatch: int
    n_threads: int
    flash_attn: FlashAttn
    kv: KvTypes
    kv_unified: bool
    swa_full: bool
    pool_is_host_memory: bool
    cut_tokens: int
    exact_rows: int
    use_mmap: bool
    repack: bool
    shape: ContextShape
    memory: MemoryEstimate
    notes: tuple[str, ...]


def place(
    info: ModelInfo, machine: Machine, wishes: LoadConfig = LoadConfig(), need_tokens: int | None = None
) -> Placement:
    """Return the placement of a model on a machine. `need_tokens` sizes an automatic context.

    Raises: UsageError for wishes that cannot be honoured; NotEnoughMemory before anything is loaded.
    """
    is_exact = wishes.deterministic
    if is_exact:
        wishes = exact_wishes(wishes, machine.gpus)
    repacking = shape_for(wishes, machine.cpu)
    shape = replace(repacking, repacked=frozenset())
    if shape.n_slots > MAX_SLOTS:
        raise UsageError(
            f"{shape.n_slots} sequences are too many: the engine holds {MAX_SLOTS}.", "use fewer in parallel"
        )
    _check_kv(info, wishes)
    flash_attn: FlashAttn = (
        "on" if wishes.flash_attn == "auto" and wishes.kv.needs_flash_attention else wishes.flash_attn
    )
    room = _Room(info, machine)
    n_ctx, ctx_notes = _context(room, shape, wishes, need_tokens)
    n_gpu_layers = _gpu_layers(room, shape, wishes, n_ctx)
    repack, repack_notes = (False, (_EXACT_NOTE,)) if is_exact else _repack(room, repacking, n_ctx)
    shape = repacking if repack else shape
    memory = room.require(n_ctx, shape) if n_gpu_layers == 0 else estimate(info, n_ctx, shape)
    n_cells = max(n_ctx, shape.n_slots)  # a row of every slot must fit: llama.cpp asserts that
    longest = wishes.ctx or n_ctx // shape.n_slots if is_exact else n_ctx
    n_batch = shape.n_ubatch if is_exact else _GPU_BATCH if n_gpu_layers else _CPU_BATCH
    return Placement(
        n_gpu_layers=n_gpu_layers,
        n_ctx=n_cells,
        max_sequence_tokens=min(longest, info.n_ctx_train or longest),
        n_slots=shape.n_slots,
        n_batch=min(n_batch, n_cells),
        n_ubatch=min(shape.n_ubatch, n_cells),
        n_threads=wishes.threads or machine.cpu.default_threads,
        flash_attn=flash_attn,
        kv=wishes.kv,
        kv_unified=shape.kv_unified,
        swa_full=shape.swa_full,
        pool_is_host_memory=_is_host_memory(machine, n_gpu_layers),
        cut_tokens=EXACT_CHUNK_TOKENS if is_exact else 0,
        exact_rows=min(EXACT_ROWS, wishes.parallel) if is_exact else 1,
        use_mmap=True,
        repack=repack,
        shape=shape,
        memory=memory,
        notes=(_where(info, machine, n_gpu_layers, wishes.kv), *ctx_notes, *repack_notes),
    )


def shape_for(wishes: LoadConfig, cpu: CpuFacts) -> ContextShape:
    """Return what memory depends on under these wishes; the weights are repacked as this CPU allows."""
    n_slots = wishes.parallel + wishes.retained + 1
    if wishes.deterministic:  # a part of the pool for each slot, in which nobody else's cells come and go
        exact_wishes(wishes, ())
        return exact_shape(n_slots)
    return ContextShape(
        kv=wishes.kv,
        n_slots=n_slots,
        repacked=repacked_types(cpu.features),
        flash_attn=wishes.flash_attn != "off",
    )


@dataclass(frozen=True, slots=True)
class _Room:
    """A model on a machine: what fits."""

    info: ModelInfo
    machine: Machine

    def require(self, n_ctx: int, shape: ContextShape) -> MemoryEstimate:
        return require(self.info, n_ctx, shape, available_bytes=self.machine.available_bytes)

    def fits(self, n_ctx: int, shape: ContextShape) -> bool:
        return estimate(self.info, n_ctx, shape).total_bytes <= USABLE_SHARE * self.machine.available_bytes

    def largest(self, shape: ContextShape) -> int:
        return largest_ctx(self.info, int(USABLE_SHARE * self.machine.available_bytes), shape)


def _check_kv(info: ModelInfo, wishes: LoadConfig) -> None:
    wishes.kv.check(
        head_sizes_k=info.head_sizes_k,
        head_sizes_v=info.head_sizes_v,
        flash_attn=wishes.flash_attn != "off",
        reads_v_from_k=info.reads_v_from_k,
    )


def _context(
    room: _Room, shape: ContextShape, wishes: LoadConfig, need_tokens: int | None
) -> tuple[int, tuple[str, ...]]:
    """Return the pool's cells, and why if that is not what was asked for."""
    if wishes.deterministic:
        return _exact_context(room, shape, wishes, need_tokens)
    trained = room.info.n_ctx_train
    if wishes.ctx is not None:
        if 0 < trained * wishes.parallel < wishes.ctx:
            times = f"{wishes.parallel} times " if wishes.parallel > 1 else ""
            raise UsageError(
                f"--ctx {wishes.ctx} is beyond {times}the {trained} tokens that {room.info.name} was trained for.",
                f"--ctx {trained * wishes.parallel}",
            )
        return wishes.ctx, ()
    each = _auto_tokens(room, need_tokens)
    wanted = -(-each // CELL_PAD) * CELL_PAD if each < (trained or each + CELL_PAD) else each
    if need_tokens is None:
        wanted *= min(wishes.parallel, AUTO_POOL_SEQUENCES)
    if room.fits(wanted, shape):
        return wanted, ()
    n_ctx = min(wanted, room.largest(shape))
    if n_ctx < min(wanted, _MIN_CTX_TOKENS):
        room.require(wanted, shape)  # raises with the numbers
    return n_ctx, (f"context cut to {n_ctx} tokens, which is what fits in memory",)


def _exact_context(
    room: _Room, shape: ContextShape, wishes: LoadConfig, need_tokens: int | None
) -> tuple[int, tuple[str, ...]]:
    """Return the cells of a pool in which every slot has a part of its own, as long as the context."""
    trained = room.info.n_ctx_train
    if wishes.ctx is not None and 0 < trained < wishes.ctx:
        raise UsageError(
            f"--ctx {wishes.ctx} is beyond the {trained} tokens that {room.info.name} was trained for: "
            "with --deterministic it is the length of each sequence.",
            f"--ctx {trained}",
        )
    each = wishes.ctx or _auto_tokens(room, need_tokens)
    wanted = pool_cells(each, shape.n_slots)
    if wishes.ctx is not None or room.fits(wanted, shape):
        return wanted, ()
    fits = min(each, room.largest(shape))
    if fits < min(each, _MIN_CTX_TOKENS):
        room.require(wanted, shape)  # raises with the numbers
    return pool_cells(fits, shape.n_slots), (f"context cut to {fits} tokens, which is what fits in memory",)


def _auto_tokens(room: _Room, need_tokens: int | None) -> int:
    """Return the context of each sequence where nobody says how long, as far as the model was trained for it."""
    each = AUTO_CTX_TOKENS if need_tokens is None else max(need_tokens, _MIN_CTX_TOKENS)
    return min(each, room.info.n_ctx_train or each)


def _is_host_memory(machine: Machine, n_gpu_layers: int) -> bool:
    """Say whether the pool lies in the memory that everything else uses, too."""
    gpus = machine.gpus if n_gpu_layers else ()
    return all(device.kind == "igpu" or device.name.startswith(_UNIFIED_PREFIX) for device in gpus)


def _gpu_layers(room: _Room, shape: ContextShape, wishes: LoadConfig, n_ctx: int) -> int:
    info, machine = room.info, room.machine
    every = info.n_layers + 1
    if wishes.gpu in ("off", 0) or (wishes.gpu == "auto" and not machine.gpus):
        return 0
    if not machine.gpus:
        raise UsageError(
            f"--gpu {wishes.gpu}: the native library reports no GPU here.",
            "--gpu off, or install a GPU build of llama-cpp-python: localllm doctor",
        )
    if wishes.gpu == "all":
        return every
    if isinstance(wishes.gpu, int):
        return min(wishes.gpu, every)
    need = info.size_bytes + kv_bytes(info, n_ctx, shape) + state_bytes(info, shape)
    free = USABLE_SHARE * sum(device.free_bytes for device in machine.gpus)
    return every if need <= free else int(every * free / need)


def _repack(room: _Room, repacking: ContextShape, n_ctx: int) -> tuple[bool, tuple[str, ...]]:
    if not room.machine.repacking_is_safe:
        return False, ("weights are not repacked: this llama.cpp build can die in its AMX code",)
    if not room.fits(n_ctx, repacking):
        return False, ("weights are not repacked: their second copy does not fit in memory",)
    return True, ()


def _where(info: ModelInfo, machine: Machine, n_gpu_layers: int, kv: KvTypes) -> str:
    if not n_gpu_layers:
        return f"{info.n_layers}/{info.n_layers} layers on CPU, KV {kv} on CPU"
    names = "+".join(device.name for device in machine.gpus)
    on_gpu = min(n_gpu_layers, info.n_layers)
    kv_place = names if on_gpu == info.n_layers else f"{names} and CPU"
    return f"{on_gpu}/{info.n_layers} layers on {names}, KV {kv} on {kv_place}"
