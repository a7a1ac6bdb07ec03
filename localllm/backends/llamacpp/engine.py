"""The llama.cpp engine: KV edits, forwards, states and embeddings of one context, behind the guard."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from localllm.backends.llamacpp.batch import BatchPacker
from localllm.backends.llamacpp.context import PARTIAL_ONLY, NativeContext
from localllm.backends.llamacpp.edits import SlotEditor
from localllm.backends.llamacpp.exactness import rows_agree
from localllm.backends.llamacpp.facts import NOT_REWINDABLE, spec_of
from localllm.backends.llamacpp.guard import Guard, GuardError
from localllm.backends.llamacpp.model import LlamaModel
from localllm.backends.llamacpp.pooling import Pooling, RunningPool, pooling_of
from localllm.backends.llamacpp.settings import ContextSettings
from localllm.backends.llamacpp.state import HEADER_BYTES, BlobKind, digest, seal, seal_parts
from localllm.backends.llamacpp.streams import Streams
from localllm.errors import EngineError
from localllm.models.tokenizer import Tokenizer
from localllm.runtime.engine import (
    Batch,
    BatchItem,
    Clear,
    Edit,
    EditResult,
    EmbedChunk,
    EngineSpec,
    ExportUnit,
    NoRoom,
    PrefixRule,
    StepOutput,
)


class LlamaEngine:
    """An `Engine` over one native context. It owns the context; the model goes with its last context."""

    spec: EngineSpec
    tokenizer: Tokenizer

    def __init__(self, model: LlamaModel, settings: ContextSettings) -> None:
        self._model = model
        self._context = NativeContext(model, settings)
        self._packer = BatchPacker(model.native, self._context.n_batch)
        self.spec = spec_of(model, self._kept_exact(settings), self._context)
        self.tokenizer = model.tokenizer
        self._guard = Guard(self.spec)
        self._digest = digest(self.spec.fingerprint)
        rewinds = model.info.architecture not in NOT_REWINDABLE
        self._streams: Streams | None = None
        if self.spec.joins_blocks:
            has_v = not model.info.reads_v_from_k
            self._streams = Streams(self._context, self._guard, self._digest, has_v=has_v)
        self._editor = SlotEditor(self._context, self._guard, self._digest, rewinds=rewinds, streams=self._streams)
        self._pool = RunningPool(Pooling.MEAN)  # of the text on the spare slot
        self._has_window = self.spec.prefix_rule is PrefixRule.WINDOW
        self._is_closed = False

    def edit(self, edits: Sequence[Edit]) -> list[EditResult]:
        """Apply KV edits in order; one result per edit. Raises GuardError for a broken rule."""
        self._check_open()
        return self._editor.apply_all(edits)

    def forward(self, batch: Batch) -> StepOutput:
        """Run one step; the logits are a view into native memory until the next forward.

        Raises: NoRoom (nothing changed); GuardError before, EngineError after native code.
        """
        self._check_open()
        self._guard.batch(batch)
        if self._streams is not None:
            for item in batch.items:
                self._streams.touched(item.slot)
        native_batch, n_logits = self._packer.pack(batch.items)
        code = self._context.decode(native_batch)
        if code:
            self._failed(code, batch.items)
        for item in batch.items:
            self._guard.advanced(item)
        return StepOutput(self._context.logits(n_logits), self._first_held(batch.items))

    def export(self, slot: int, start: int, end: int) -> bytes:
        """Return positions [start, end) of `slot` as bytes that `Restore` takes.

        Raises: GuardError where the span is not held, or not whole where it must be.
        """
        self._check_open()
        state = self._guard.any_slot(slot)
        if not 0 <= start < end <= state.n_valid:
            raise GuardError(f"Slot {slot} holds {state.n_valid} tokens, not [{start}, {end}).")
        if self.spec.export_unit is ExportUnit.WHOLE:
            self._guard.settled(slot, "exported")
            self._refuse_copying(slot)
            if (start, end) != (0, state.n_valid):
                raise GuardError(f"Slot {slot} can only be exported whole.")
            return seal(self._context.read_state(slot, HEADER_BYTES), BlobKind.POSITIONS, self._digest, start, end)
        if self._streams is not None:
            return self._streams.export(slot, start, end)
        spare = self._guard.free_spare()
        self._context.copy(slot, spare, start, end)
        try:
            buffer = self._context.read_state(spare, HEADER_BYTES)
        finally:
            self._context.remove(spare)
        return seal(buffer, BlobKind.POSITIONS, self._digest, start, end)

    def checkpoint(self, slot: int) -> bytes:
        """Return the part of the slot's state that cannot be cut, at its present length.

        Raises: GuardError while the slot is pending, or empty.
        """
        self._check_open()
        state = self._guard.settled(slot, "checkpointed")
        if state.n_valid == 0:
            raise GuardError(f"Slot {slot} is empty.")
        self._refuse_copying(slot)
        first, n_valid = state.first_held, state.n_valid
        if self.spec.prefix_rule is PrefixRule.ANY:
            return seal_parts((), BlobKind.CHECKPOINT, self._digest, first, n_valid)
        state_bytes = self._context.read_state(slot, HEADER_BYTES, PARTIAL_ONLY)
        return seal(state_bytes, BlobKind.CHECKPOINT, self._digest, first, n_valid)

    def embed(self, chunk: EmbedChunk) -> NDArray[np.float32] | None:
        """Run rows of a text on the spare slot; return its pooled embedding, float32 [n_embd], after the last.

        Raises: NoRoom (nothing changed); GuardError before, EngineError after native code.
        """
        self._check_open()
        item = self._guard.embedding(chunk)
        if chunk.start == 0:
            self._pool = RunningPool(pooling_of(self._model))
        native_batch, n_rows = self._packer.pack((item,))
        self._context.set_embeddings(True)
        try:
            code = self._context.decode(native_batch)
        finally:
            self._context.set_embeddings(False)
        if code:
            self._failed(code, (item,))
        self._guard.advanced(item)
        self._pool.add(self._context.embeddings(n_rows))
        if not chunk.is_last:
            return None
        self._editor.apply(Clear(item.slot))
        return self._pool.result()

    def interrupt(self) -> None:
        """Stop the running forward early, on CPU devices; it raises EngineError. Any thread may call it."""
        self._context.interrupt()

    def close(self) -> None:
        """Free the context, and the model with its last context; idempotent."""
        self._is_closed = True
        self._context.close()

    def _kept_exact(self, settings: ContextSettings) -> ContextSettings:
        """Return settings with as many exact rows as this machine's kernels give equal bits for."""
        n_rows = settings.exact_rows
        try:
            is_kept = n_rows == 1 or rows_agree(self._context, self._packer, self._model.n_vocab, n_rows)
        except BaseException:
            self._context.close()
            raise
        return settings if is_kept else replace(settings, exact_rows=1)

    def _first_held(self, items: tuple[BatchItem, ...]) -> dict[int, int]:
        if not self._has_window:
            return dict.fromkeys((item.slot for item in items), 0)
        held = {}
        for item in items:
            state = self._guard.slots[item.slot]
            self._editor.refresh(item.slot, state)
            held[item.slot] = state.first_held
        return held

    def _refuse_copying(self, slot: int) -> None:
        if self._context.awaits_copy(slot):
            raise EngineError(f"The cells of slot {slot} are copied by the next forward only.")

    def _failed(self, code: int, items: tuple[BatchItem, ...]) -> None:
        """Turn llama_decode's code into an exception; only 1 and -1 leave everything as it was."""
        if code == 1:
            raise NoRoom
        self._context.resume()
        reason = self._model.native.log.reason() or "no reason given"
        if code == -1:
            raise EngineError(f"llama.cpp refused the batch: {reason}")
        for item in items:
            state = self._guard.slots[item.slot]
            state.n_valid = self._context.n_held(item.slot)
            state.is_undefined = True
        if code == 2:
            raise EngineError("The forward was interrupted.")
        raise EngineError(f"llama.cpp failed in a forward (code {code}): {reason}")

    def _check_open(self) -> None:
        if self._is_closed:
            raise EngineError("The engine is closed.")
