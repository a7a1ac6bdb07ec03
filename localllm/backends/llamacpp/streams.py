"""Blocks in and out of slots that have a stream of cells each.

Native code copies, gives and takes the cells of a stream only whole (native.md N7). So a slot's state is read
once for all its blocks and cut by us, and blocks are joined by us before they are put back.
"""

from __future__ import annotations

from collections.abc import Sequence

from localllm.backends.llamacpp.cells import Cells, UnknownLayout, join
from localllm.backends.llamacpp.context import NativeContext
from localllm.backends.llamacpp.guard import Guard
from localllm.backends.llamacpp.state import BadBlob, BlobKind, seal_parts, unseal
from localllm.errors import EngineError
from localllm.runtime.engine import EditOutcome, EditResult, Restore


class Streams:
    """Cuts and joins the states of slots. Holds the state that was read last, until its last block is taken."""

    def __init__(self, context: NativeContext, guard: Guard, engine_digest: bytes, *, has_v: bool) -> None:
        self._context = context
        self._guard = guard
        self._digest = engine_digest
        self._has_v = has_v
        self._slot = -1
        self._cells: Cells | None = None

    def export(self, slot: int, start: int, end: int) -> bytes:
        """Return positions [start, end) of a slot as bytes that `restore` takes. Raises: EngineError."""
        n_valid = self._guard.slot(slot).n_valid
        if self._slot != slot or self._cells is None:
            self._slot, self._cells = slot, self._read(slot, n_valid)
        blob = seal_parts(self._cells.cut(start, end), BlobKind.POSITIONS, self._digest, start, end)
        if end == n_valid:
            self._cells = None
        return blob

    def touched(self, slot: int) -> None:
        """Take note that a slot is about to change."""
        if slot == self._slot:
            self._cells = None

    def restore(self, edits: Sequence[Restore]) -> list[EditResult]:
        """Put blocks back, one after another, at the end of one slot. A block that does not fit is skipped."""
        slot = edits[0].slot
        state = self._guard.slot(slot)
        pieces, outcomes, end = list[Cells](), list[tuple[int, EditOutcome]](), state.n_valid
        for edit in edits:
            piece, outcome = self._piece(edit, end)
            if piece is not None:
                pieces.append(piece)
                end += piece.n_cells
            outcomes.append((end, outcome))
        if pieces and not self._write(slot, state.n_valid, pieces):
            self._context.remove(slot)
            state.reset(0)
            return [EditResult(0, 0, EditOutcome.NO_ROOM) for _ in edits]  # nobody knows whether a block is to blame
        if pieces:
            state.reset(end)
        return [EditResult(n_valid, 0, outcome) for n_valid, outcome in outcomes]

    def _piece(self, edit: Restore, end: int) -> tuple[Cells | None, EditOutcome]:
        """Return the cells of a block, if they follow on `end` tokens."""
        state = self._guard.slot(edit.slot)
        if state.is_undefined or edit.start != end:
            return None, EditOutcome.NO_ROOM  # skipped; the blob is not to blame
        try:
            blob = unseal(edit.blob, BlobKind.POSITIONS, self._digest)
            piece = Cells.read(blob.payload, has_v=self._has_v)
        except (BadBlob, UnknownLayout):
            return None, EditOutcome.REFUSED
        if blob.start != end or (piece.first, piece.n_cells) != (blob.start, blob.end - blob.start):
            return None, EditOutcome.REFUSED
        if blob.end > self._guard.spec.max_sequence_tokens:
            return None, EditOutcome.NO_ROOM  # another process may have a longer context
        return piece, EditOutcome.OK

    def _write(self, slot: int, n_valid: int, pieces: list[Cells]) -> bool:
        """Give a slot what it holds and the pieces after that; False = native code did not take it."""
        try:
            before = [self._read(slot, n_valid)] if n_valid else []
            state = join([*before, *pieces], self._context.n_slots)
        except (UnknownLayout, EngineError):
            return False
        n_tokens = n_valid + sum(piece.n_cells for piece in pieces)
        taken = self._context.write_state(slot, memoryview(state))
        return taken == len(state) and self._context.n_held(slot) == n_tokens

    def _read(self, slot: int, n_valid: int) -> Cells:
        try:
            cells = Cells.read(memoryview(self._context.read_state(slot, 0)), has_v=self._has_v)
        except UnknownLayout as error:
            raise EngineError(f"The state of slot {slot} cannot be taken apart: {error}.") from error
        if (cells.first, cells.n_cells) != (0, n_valid):
            raise EngineError(
                f"The state of slot {slot} has {cells.n_cells} cells from {cells.first} on, not {n_valid}."
            )
        return cells
