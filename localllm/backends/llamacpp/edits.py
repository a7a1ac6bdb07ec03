"""Applies KV edits to a context: each is exact, or leaves a slot that is shorter, never wrong."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from localllm.backends.llamacpp.context import PARTIAL_ONLY, NativeContext
from localllm.backends.llamacpp.guard import Guard, GuardError, SlotState
from localllm.backends.llamacpp.state import BadBlob, BlobKind, unseal
from localllm.backends.llamacpp.streams import Streams
from localllm.runtime.engine import (
    Clear,
    CopyPrefix,
    Edit,
    EditOutcome,
    EditResult,
    ExportUnit,
    PrefixRule,
    Restore,
    Rewind,
    Truncate,
)

_OK, _NO_ROOM, _REFUSED = EditOutcome.OK, EditOutcome.NO_ROOM, EditOutcome.REFUSED


class SlotEditor:
    """The five edits, on the guard's slots and one native context."""

    def __init__(
        self, context: NativeContext, guard: Guard, engine_digest: bytes, *, rewinds: bool, streams: Streams | None
    ) -> None:
        self._context = context
        self._guard = guard
        self._digest = engine_digest
        self._rewinds = rewinds
        self._streams = streams
        self._rule = guard.spec.prefix_rule
        self._is_unified = guard.spec.copy_shares_memory

    def apply_all(self, edits: Sequence[Edit]) -> list[EditResult]:
        """Apply edits in order; one result each. Raises GuardError for a broken rule."""
        if self._streams is None:
            return [self.apply(edit) for edit in edits]
        results = list[EditResult]()
        for slot, run in itertools.groupby(edits, lambda edit: edit.slot if isinstance(edit, Restore) else None):
            same = tuple(run)
            for edit in same:
                self._streams.touched(edit.dst if isinstance(edit, CopyPrefix) else edit.slot)
            restores = [edit for edit in same if isinstance(edit, Restore)]
            results += self._streams.restore(restores) if slot is not None else [self.apply(edit) for edit in same]
        return results

    def apply(self, edit: Edit) -> EditResult:
        """Apply one edit and return what its slot holds now. Raises GuardError for a broken rule."""
        match edit:
            case Clear(slot):
                return self._cleared(slot, self._guard.any_slot(slot), _OK)
            case Truncate(slot, n_tokens):
                return self._truncate(slot, _not_negative(n_tokens))
            case CopyPrefix(src, dst, n_tokens):
                return self._copy(src, dst, _not_negative(n_tokens))
            case Restore():
                return self._restore(edit)
            case Rewind():
                return self._rewind(edit)

    def refresh(self, slot: int, state: SlotState) -> None:
        """Read anew from where on a windowed slot lacks no cell (a forward loses cells)."""
        state.first_held = max(self._first(slot, state.n_valid), min(state.gap_end, state.n_valid))

    def _first(self, slot: int, end: int) -> int:
        """Return the first position of a window that a slot has in the cache, `end` where it has none."""
        first = self._context.first_held(slot)
        return first if first >= 0 else end

    def _truncate(self, slot: int, n_tokens: int) -> EditResult:
        state = self._guard.slot(slot)
        if n_tokens == 0:
            return self._cleared(slot, state, _OK)
        if n_tokens >= state.n_valid:
            return _held(state)
        state = self._guard.truncating(slot)
        bounded = self._rule is PrefixRule.CHECKPOINT
        drop = state.n_valid - n_tokens
        allowed = self._guard.can_roll_back(state, drop) if bounded else self._guard.can_cut(state, n_tokens)
        if not allowed or not self._context.remove(slot, n_tokens):
            return self._cleared(slot, state, _REFUSED)
        self._guard.rolled_back(state, n_tokens)
        return self._checked(slot, state)

    def _copy(self, src: int, dst: int, n_tokens: int) -> EditResult:
        self._guard.slot(src)
        source, target = self._guard.settled(src, "copied"), self._guard.target(dst)
        if src == dst:
            raise GuardError(f"Slot {src} cannot be copied onto itself.")
        self._cleared(dst, target, _OK)  # native.md: a copy into a slot that is not empty is wrong
        n_tokens = min(n_tokens, source.n_valid)
        if not self._guard.can_cut(source, n_tokens):
            return _held(target, _REFUSED)
        if n_tokens == 0:
            return _held(target)
        if self._rule is PrefixRule.CHECKPOINT or not self._is_unified:
            if not self._copy_whole(src, dst):  # part of a stream aborts (N7), of a state is wrong
                return self._cleared(dst, target, _NO_ROOM)
            source.last_rows = 0  # a rollback now would move the copy too
            if n_tokens < source.n_valid and not self._context.remove(dst, n_tokens):
                return self._cleared(dst, target, _REFUSED)
        else:
            self._context.copy(src, dst, 0, n_tokens)
        target.reset(n_tokens, source.gap_end)
        return self._checked(dst, target)

    def _copy_whole(self, src: int, dst: int) -> bool:
        """Copy all of a slot. Between streams that waits for the next forward, and edits come before: so at once, but
        for windows, of whose cells a state has the last ones only.
        """
        if not self._is_unified and self._rule is not PrefixRule.WINDOW:
            return self._context.copy_now(src, dst)
        self._context.copy(src, dst, -1, -1)
        return True

    def _restore(self, edit: Restore) -> EditResult:
        state = self._guard.slot(edit.slot)
        if state.is_undefined or state.n_valid != edit.start or self._context.awaits_copy(edit.slot):
            return _held(state, _NO_ROOM)  # skipped; the blob is not to blame
        try:
            blob = unseal(edit.blob, BlobKind.POSITIONS, self._digest)
        except BadBlob:
            return _held(state, _REFUSED)
        is_whole = self._guard.spec.export_unit is ExportUnit.WHOLE
        if blob.start != edit.start or (is_whole and edit.start):
            return _held(state, _REFUSED)
        if blob.end > self._guard.spec.max_sequence_tokens:
            return _held(state, _NO_ROOM)  # another process may have a longer context
        into = edit.slot if is_whole else self._guard.free_spare()
        taken = self._context.write_state(into, blob.payload)
        n_held = self._context.n_held(into)
        if n_held == 0 and self._rule is PrefixRule.WINDOW and not is_whole:
            n_held = blob.end  # native code tells of window cells alone, and the block has none
        if taken != len(blob.payload) or n_held != blob.end:
            self._context.remove(into)
            return _held(state, _REFUSED if taken else _NO_ROOM)
        gap_end = state.gap_end
        if not is_whole:
            if self._rule is PrefixRule.WINDOW:  # a block has the cells of its own last window, or even fewer
                first = self._first(into, blob.end)
                gap_end = first if first > blob.start else gap_end
            self._context.copy(into, edit.slot, blob.start, blob.end)
            self._context.remove(into)
        state.reset(blob.end, gap_end)
        return self._checked(edit.slot, state)

    def _rewind(self, edit: Rewind) -> EditResult:
        state = self._guard.any_slot(edit.slot)
        try:
            blob = unseal(edit.checkpoint, BlobKind.CHECKPOINT, self._digest)
        except BadBlob:
            return self._cleared(edit.slot, state, _REFUSED)
        fits = blob.end == edit.n_tokens and 0 < edit.n_tokens <= state.n_valid and not state.is_undefined
        fits = fits and not self._context.awaits_copy(edit.slot)
        if not fits or not self._rewinds:
            return self._cleared(edit.slot, state, _REFUSED)
        if blob.payload:
            taken = self._context.write_state(edit.slot, blob.payload, PARTIAL_ONLY)
            if taken != len(blob.payload):
                return self._cleared(edit.slot, state, _REFUSED if taken else _NO_ROOM)
        if not self._context.remove(edit.slot, edit.n_tokens):
            return self._cleared(edit.slot, state, _REFUSED)
        state.reset(edit.n_tokens)
        return self._checked(edit.slot, state)

    def _checked(self, slot: int, state: SlotState) -> EditResult:
        """Compare with what native code says it holds; a slot that differs is cleared."""
        ends_bare = 0 < state.n_valid <= state.gap_end  # there native code tells of cells before those
        if not ends_bare and self._context.n_held(slot) != state.n_valid:
            return self._cleared(slot, state, _REFUSED)
        if self._rule is PrefixRule.WINDOW:
            self.refresh(slot, state)
        return _held(state)

    def _cleared(self, slot: int, state: SlotState, outcome: EditOutcome) -> EditResult:
        self._context.remove(slot)
        state.reset(0)
        return EditResult(0, 0, outcome)


def _held(state: SlotState, outcome: EditOutcome = _OK) -> EditResult:
    return EditResult(state.n_valid, state.first_held, outcome)


def _not_negative(n_tokens: int) -> int:
    if n_tokens < 0:
        raise GuardError(f"A slot cannot be cut to {n_tokens} tokens.")
    return n_tokens
