"""The engine's slots and cells: who holds which, and how many are left. The only ledger of "free".

Cells are counted in segments: a copied prefix shares its segments where the engine's copies
share memory, and gets new ones where they do not. Mutated by the engine's thread alone.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from localllm.runtime.engine import EngineSpec, PrefixRule
from localllm.runtime.types import Tokens


@dataclass(slots=True, eq=False)
class Segment:
    """A run of cells that one or more slots hold."""

    n_tokens: int
    n_holders: int = 1


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What `Rewind` needs to bring a slot back to `n_tokens`."""

    n_tokens: int
    blob: bytes


@dataclass(slots=True, eq=False)
class Slot:
    """One KV lane: positions [0, n_held), of which a window may have lost those below `first_held`.

    `is_settling`: rolled back on an engine with bounded rollback; not copied until its next forward.
    `used_s`: when it was last used (monotonic seconds).
    """

    id: int
    n_held: int = 0
    first_held: int = 0
    is_settling: bool = False
    segments: list[Segment] = field(default_factory=list)
    checkpoints: list[Checkpoint] = field(default_factory=list)
    used_s: float = 0.0


class Slots:
    """Hands slots out, keeps finished ones (retained, least recently used first), counts cells."""

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec
        self.used_cells = 0
        self._slots = [Slot(i) for i in range(spec.n_slots)]
        self.spare = self._slots[-1]  # never handed out: for the engine, and for texts to embed
        self._free = list(reversed(self._slots[:-1]))
        self._retained: dict[int, Slot] = {}  # in order of last use

    def __getitem__(self, slot_id: int) -> Slot:
        return self._slots[slot_id]

    @property
    def free_cells(self) -> int:
        """Cells that no slot holds."""
        return self.spec.pool_tokens - self.used_cells

    @property
    def has_free(self) -> bool:
        """Say whether an empty slot can be handed out."""
        return bool(self._free)

    @property
    def n_retained(self) -> int:
        """Slots kept for their prefix alone."""
        return len(self._retained)

    @property
    def retained_cells(self) -> int:
        """Cells that only retained slots hold."""
        if not self._retained:
            return 0
        needed = {id(s) for slot in self._slots if slot.id not in self._retained for s in slot.segments}
        alone = {id(s): s.n_tokens for slot in self._retained.values() for s in slot.segments if id(s) not in needed}
        return sum(alone.values())

    def frees_cells(self, slot: Slot) -> bool:
        """Say whether clearing a retained slot would free cells, or would once others that are retained go, too."""
        at_work = {id(s) for other in self._slots if other.id not in self._retained for s in other.segments}
        return any(id(s) not in at_work for s in slot.segments)

    def retained(self) -> Iterator[Slot]:
        """Yield the retained slots, the least recently used first."""
        return iter(tuple(self._retained.values()))

    def is_retained(self, slot: Slot) -> bool:
        """Say whether the slot is kept for its prefix and has no sequence."""
        return slot.id in self._retained

    def take_free(self) -> Slot | None:
        """Hand out an empty slot, if there is one."""
        return self._free.pop() if self._free else None

    def take_retained(self, slot: Slot) -> None:
        """Hand a retained slot, with what it holds, to a sequence."""
        del self._retained[slot.id]

    def retain(self, slot: Slot) -> None:
        """Keep what a finished sequence's slot holds."""
        slot.used_s = time.monotonic()
        self._retained[slot.id] = slot

    def touch(self, slot: Slot) -> None:
        """Make a retained slot the most recently used."""
        slot.used_s = time.monotonic()
        if slot.id in self._retained:
            self._retained[slot.id] = self._retained.pop(slot.id)

    def free(self, slot: Slot) -> None:
        """Take a slot back, its cells with it; idempotent."""
        self._retained.pop(slot.id, None)
        self.cut(slot, 0)
        if slot is not self.spare and slot not in self._free:
            self._free.append(slot)

    def grow(self, slot: Slot, n_tokens: int) -> None:
        """Count `n_tokens` new cells at the end of the slot."""
        last = slot.segments[-1] if slot.segments else None
        if last is not None and last.n_holders == 1:
            last.n_tokens += n_tokens
        else:
            slot.segments.append(Segment(n_tokens))
        slot.n_held += n_tokens
        self.used_cells += n_tokens

    def cut(self, slot: Slot, n_tokens: int) -> None:
        """Drop the slot's hold on everything from position `n_tokens` on."""
        self._split(slot, n_tokens)
        while slot.n_held > n_tokens:
            segment = slot.segments.pop()
            slot.n_held -= segment.n_tokens
            segment.n_holders -= 1
            if segment.n_holders == 0:
                self.used_cells -= segment.n_tokens
        slot.checkpoints = [c for c in slot.checkpoints if c.n_tokens <= n_tokens]
        if n_tokens == 0:
            slot.first_held, slot.is_settling = 0, False

    def copy(self, src: Slot, dst: Slot, n_tokens: int) -> None:
        """Give the empty `dst` the first `n_tokens` of `src`, checkpoints included."""
        if not self.spec.copy_shares_memory:
            self.grow(dst, n_tokens)
        else:
            self._split(src, n_tokens)
            for segment in src.segments:
                if dst.n_held == n_tokens:
                    break
                segment.n_holders += 1
                dst.segments.append(segment)
                dst.n_held += segment.n_tokens
        dst.first_held = src.first_held
        dst.checkpoints = [c for c in src.checkpoints if c.n_tokens <= n_tokens]

    def drop_checkpoint(self, blob: bytes) -> None:
        """Forget a checkpoint in every slot that keeps it."""
        for slot in self._slots:
            slot.checkpoints = [c for c in slot.checkpoints if c.blob is not blob]

    def check_integrity(self) -> None:
        """Raise AssertionError where the ledger does not add up; for tests."""
        segments = {id(s): s for slot in self._slots for s in slot.segments}
        assert self.used_cells == sum(s.n_tokens for s in segments.values())
        for slot in self._slots:
            assert slot.n_held == sum(s.n_tokens for s in slot.segments)
        for segment in segments.values():
            assert segment.n_holders == sum(segment in slot.segments for slot in self._slots)
        assert all(slot.n_held == 0 for slot in self._free)

    def _split(self, slot: Slot, n_tokens: int) -> None:
        """Make a segment end exactly at `n_tokens`, in every slot that holds it (its start is the same in all)."""
        end = 0
        for segment in slot.segments:
            end += segment.n_tokens
            if end > n_tokens > end - segment.n_tokens:
                tail = Segment(end - n_tokens, segment.n_holders)
                segment.n_tokens -= tail.n_tokens
                for holder in self._slots:
                    if segment in holder.segments:
                        holder.segments.insert(holder.segments.index(segment) + 1, tail)
                return


@dataclass(frozen=True, slots=True)
class Cut:
    """A usable prefix of a slot: `n_tokens` of it, through `checkpoint` where the engine cannot just cut."""

    n_tokens: int
    checkpoint: Checkpoint | None = None


def usable_cut(spec: EngineSpec, slot: Slot, n_common: int, can_take_over: bool) -> Cut:
    """Return the longest exact prefix of `slot` within its first `n_common` tokens (0 tokens = none).

    A settling slot cannot be copied; one that `can_take_over` is used as it is, or put back to a checkpoint.
    """
    n_common = min(n_common, slot.n_held)
    match spec.prefix_rule:
        case PrefixRule.ANY:
            return Cut(n_common)
        case PrefixRule.WINDOW:
            return Cut(n_common if keeps_window(spec, slot, n_common) else 0)
        case PrefixRule.CHECKPOINT:
            if n_common == slot.n_held and (can_take_over or not slot.is_settling):
                return Cut(n_common)
            if slot.is_settling and not can_take_over:
                return Cut(0)
            best = max((c for c in slot.checkpoints if c.n_tokens <= n_common), key=lambda c: c.n_tokens, default=None)
            return Cut(best.n_tokens, best) if best else Cut(0)


def keeps_window(spec: EngineSpec, slot: Slot, n_tokens: int) -> bool:
    """Say whether a slot has all that rows after its first `n_tokens` must see, as far as windows go."""
    return spec.prefix_rule is not PrefixRule.WINDOW or slot.first_held <= max(0, n_tokens - spec.window_tokens)


def common_prefix(a: Tokens, b: Tokens) -> int:
    """Return how many leading tokens `a` and `b` share, by halving slices (compared in C)."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
