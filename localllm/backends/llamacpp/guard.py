"""Checks every call before native code sees it: what kills the process, and what is silently wrong.

The guard knows, per slot, how many tokens are valid and what its last forward allows; it never
calls native code itself. A broken rule is the caller's mistake and raises GuardError; whether a
cut is possible is a question (`can_cut`), answered by the model's prefix rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from localllm.errors import EngineError
from localllm.runtime.engine import Batch, BatchItem, EmbedChunk, EngineSpec, PrefixRule


class GuardError(EngineError):
    """A call that would kill the process, or be silently wrong, was stopped before native code."""

    code = "engine_misuse"


@dataclass(slots=True)
class SlotState:
    """What one slot holds, and what may be done to it.

    `first_held..n_valid-1` are in the cache. `last_rows`: rows of its last forward that a bounded
    rollback may still reach. `gap_end`: before it, cells of a window may be missing between others,
    which blocks that were put back did not bring. `is_pending`: rolled back, and not run since.
    `is_undefined`: a forward failed half way; only clearing helps.
    """

    n_valid: int = 0
    first_held: int = 0
    last_rows: int = 0
    gap_end: int = 0
    is_pending: bool = False
    is_undefined: bool = False

    def reset(self, n_valid: int, gap_end: int = 0) -> None:
        """Set what the slot holds after an edit that leaves nothing to roll back."""
        self.n_valid, self.first_held, self.last_rows, self.gap_end = n_valid, 0, 0, gap_end
        self.is_pending = self.is_undefined = False


class Guard:
    """Owns the slots' states and every check. `spec` is the engine's own."""

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec
        self.slots = tuple(SlotState() for _ in range(spec.n_slots))
        self.spare = spec.n_slots - 1
        self._bounded = spec.max_rollback_tokens is not None

    def slot(self, index: int) -> SlotState:
        """Return the state of a slot that callers may use. Raises GuardError for any other id."""
        if not 0 <= index < self.spare:
            raise GuardError(f"Slot {index} is not one of the {self.spare} usable slots.")
        return self.slots[index]

    def batch(self, batch: Batch) -> None:
        """Check a forward: sizes, slots, contiguous positions, ids (native.md: N4, N9, -1)."""
        if batch.adapter is not None:
            raise GuardError(f"This engine has no adapter {batch.adapter!r}.")
        if not 0 < batch.n_rows <= self.spec.max_batch_tokens:
            raise GuardError(f"A forward takes 1 to {self.spec.max_batch_tokens} rows, not {batch.n_rows}.")
        if self.spec.cut_tokens and batch.n_rows > self.spec.exact_rows:
            self._chunk(batch.items)
        seen = 0
        for item in batch.items:
            state = self.slot(item.slot)
            if seen & (1 << item.slot):
                raise GuardError(f"Slot {item.slot} has two items in one forward.")
            seen |= 1 << item.slot
            self._item(item, state)

    def embedding(self, chunk: EmbedChunk) -> BatchItem:
        """Return the rows of a chunk of a text, checked, on the spare slot. Raises GuardError."""
        state, n_rows, spec = self.slots[self.spare], len(chunk.tokens), self.spec
        if not 0 < n_rows <= spec.max_embed_rows or chunk.start + n_rows > spec.max_embed_tokens:
            raise GuardError(
                f"An embedding takes {spec.max_embed_tokens} tokens, {spec.max_embed_rows} at once; "
                f"not {n_rows} from {chunk.start} on."
            )
        if state.is_undefined or chunk.start != state.n_valid:
            raise GuardError(f"The text to embed has {state.n_valid} tokens so far; none can start at {chunk.start}.")
        self.tokens(chunk.tokens)
        return BatchItem(self.spare, chunk.start, chunk.tokens, n_rows)

    def free_spare(self) -> int:
        """Return the spare slot, which is empty. Raises GuardError while a text is on it."""
        state = self.slots[self.spare]
        if state.n_valid or state.is_undefined:
            raise GuardError("The spare slot is in use: a text is being embedded.")
        return self.spare

    def any_slot(self, index: int) -> SlotState:
        """Return the state of a slot that may be cleared, rewound or saved: the spare one too."""
        return self.slots[self.spare] if index == self.spare else self.slot(index)

    def target(self, index: int) -> SlotState:
        """Return the state of a slot that may be copied to: the spare one too, unless a text is on it."""
        return self.slots[self.free_spare()] if index == self.spare else self.slot(index)

    def tokens(self, tokens: Sequence[int]) -> None:
        """Check that every id is in the vocabulary. Raises GuardError."""
        if min(tokens) < 0 or max(tokens) >= self.spec.n_vocab:
            raise GuardError(f"A token id is outside the vocabulary of {self.spec.n_vocab}.")

    def can_cut(self, state: SlotState, n_tokens: int) -> bool:
        """Say whether the first `n_tokens` of a slot stand on their own: for a cut, or a copy."""
        if n_tokens == 0:
            return True
        if n_tokens == state.n_valid:
            return not self.lacks_window(state)
        if self.spec.prefix_rule is PrefixRule.WINDOW:
            return state.first_held <= max(0, n_tokens - self.spec.window_tokens)
        return self.spec.prefix_rule is PrefixRule.ANY

    def lacks_window(self, state: SlotState) -> bool:
        """Say whether blocks that were put back left cells out that the slot's next row must see."""
        return min(state.gap_end, state.n_valid) > max(0, state.n_valid - self.spec.window_tokens)

    def can_roll_back(self, state: SlotState, n_tokens: int) -> bool:
        """Say whether `n_tokens` at the end may be dropped from a slot whose rollback is bounded."""
        limit = self.spec.max_rollback_tokens or 0
        return 0 <= n_tokens <= min(limit, state.last_rows - 1)

    def settled(self, index: int, verb: str) -> SlotState:
        """Return the state of a slot that may be copied or saved. Raises GuardError if it is pending."""
        state = self.any_slot(index)
        if state.is_pending or state.is_undefined:
            raise GuardError(f"Slot {index} cannot be {verb} before it is run again or cleared.")
        return state

    def truncating(self, index: int) -> SlotState:
        """Return the state of a slot that may be cut now. Raises GuardError for a second cut in a row."""
        state = self.slot(index)
        if state.is_undefined or (self._bounded and state.is_pending):
            raise GuardError(f"Slot {index} cannot be cut again before it is run or cleared.")
        return state

    def advanced(self, item: BatchItem) -> SlotState:
        """Note the rows of a forward that succeeded, and return the slot's state."""
        state = self.slots[item.slot]
        n_rows = len(item.tokens)
        state.n_valid += n_rows
        state.last_rows = n_rows
        state.is_pending = False
        return state

    def rolled_back(self, state: SlotState, n_tokens: int) -> None:
        """Note a cut to `n_tokens`; where rollback is bounded the slot is pending until it runs."""
        state.n_valid = n_tokens
        state.last_rows = 0
        state.is_pending = self._bounded

    def _chunk(self, items: Sequence[BatchItem]) -> None:
        """Check that rows of which none counts for itself are one chunk between two cuts."""
        start, n_rows, cut_tokens = items[0].start, len(items[0].tokens), self.spec.cut_tokens
        if len(items) > 1 or start % cut_tokens or n_rows > cut_tokens:
            raise GuardError(
                f"An exact forward is one chunk between multiples of {cut_tokens}, or at most {self.spec.exact_rows} "
                f"rows; not {n_rows} rows from {start} on in {len(items)} slots."
            )

    def _item(self, item: BatchItem, state: SlotState) -> None:
        n_rows = len(item.tokens)
        if n_rows == 0 or not 0 <= item.n_logits <= n_rows:
            raise GuardError(f"Slot {item.slot}: {item.n_logits} logit rows of {n_rows} rows.")
        if state.is_undefined:
            raise GuardError(f"Slot {item.slot} must be cleared before it runs again.")
        if item.start != state.n_valid:
            raise GuardError(f"Slot {item.slot} holds {state.n_valid} tokens; rows cannot start at {item.start}.")
        if self.lacks_window(state):
            raise GuardError(f"Slot {item.slot} lacks cells of its window before {item.start}.")
        if item.start + n_rows > self.spec.max_sequence_tokens:
            raise GuardError(f"Slot {item.slot} would exceed {self.spec.max_sequence_tokens} tokens.")
        self.tokens(item.tokens)
