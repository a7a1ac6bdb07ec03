"""The engine seam: what the runtime asks of any backend (llama.cpp, MLX, the fake one).

Sequence level: a *slot* is an engine KV lane; an engine holds, per slot, the KV of one token
sequence at contiguous positions 0..n-1. One thread owns an engine; only `tokenizer` may be
called from any thread. What an engine can do is said once, in its frozen `spec`.

Rules on every engine, checked by the llama.cpp guard and by FakeEngine:
- rows of a slot start where its valid tokens end: no gaps, no overlap;
- at most one `Truncate` of a slot between two forwards, where rollback is bounded by at most
  min(max_rollback_tokens, rows of its last forward - 1) tokens;
- a slot is *pending* from a rejected row until its `Truncate` and, where rollback is bounded,
  until its next forward; a pending slot is not copied and not checkpointed;
- the destination of `CopyPrefix` is cleared first, by the engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from localllm.models.tokenizer import Tokenizer
from localllm.runtime.types import Tokens


class PrefixRule(Enum):
    """Where a held sequence may be cut so that the part before stays exact."""

    ANY = "any"
    WINDOW = "window"  # at n only while first_held <= max(0, n - window_tokens)
    CHECKPOINT = "checkpoint"  # only where a checkpoint was taken, or whole


class ExportUnit(Enum):
    """What `export` can cut out of a slot."""

    BLOCK = "block"
    WHOLE = "whole"


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """Frozen facts of a loaded engine.

    `pool_tokens`: KV cells shared by all slots. `n_slots`: running + retained + one spare (the
    last id, for export, restore and texts to embed). `max_embed_tokens`: of one text; `max_embed_rows`:
    of one `embed` (all of a text where the model is not causal). `max_rollback_tokens`: None = any,
    K, or 0 = no drafts. `copy_shares_memory`: a copied prefix costs no cells.
    `ragged_rows`: slots may bring different numbers of rows to one forward.
    `pool_is_host_memory`: the cells lie in the memory that the RAM tier would use.
    `cut_tokens`: a prefix is only reused up to a multiple of it, and never beyond the prompt it was computed
    for (bit-identical engines); 0 = anywhere that `prefix_rule` allows. There a forward is one chunk of one
    prompt, which begins at a multiple and ends at the next, or before the prompt's last token; or else it has
    at most `exact_rows` rows.
    `joins_blocks`: what is put back into a slot costs as much as all that the slot then holds, so better at once.
    `fingerprint`: everything that decides KV bytes (model hash, build, KV types, rope, ...).
    """

    n_vocab: int
    n_slots: int
    pool_tokens: int
    max_batch_tokens: int
    max_sequence_tokens: int
    max_embed_tokens: int
    max_embed_rows: int
    max_rollback_tokens: int | None = None
    prefix_rule: PrefixRule = PrefixRule.ANY
    window_tokens: int = 0
    copy_shares_memory: bool = True
    export_unit: ExportUnit = ExportUnit.BLOCK
    ragged_rows: bool = True
    mixes_prefill_and_decode: bool = True
    kv_types: tuple[str, str] = ("f16", "f16")
    adapters: tuple[str, ...] = ()
    has_hidden_states: bool = False
    pool_is_host_memory: bool = True
    cut_tokens: int = 0
    exact_rows: int = 1
    joins_blocks: bool = False
    fingerprint: str = ""


@dataclass(frozen=True, slots=True)
class CopyPrefix:
    """Clear `dst`, then give it the first `n_tokens` of `src` (which stays as it is)."""

    src: int
    dst: int
    n_tokens: int


@dataclass(frozen=True, slots=True)
class Truncate:
    """Drop everything from position `n_tokens` on."""

    slot: int
    n_tokens: int


@dataclass(frozen=True, slots=True)
class Clear:
    """Empty the slot."""

    slot: int


@dataclass(frozen=True, slots=True)
class Restore:
    """Append an exported `blob` that begins at `start`; skipped unless the slot holds exactly `start`."""

    slot: int
    start: int
    blob: bytes


@dataclass(frozen=True, slots=True)
class Rewind:
    """Put a checkpoint taken at `n_tokens` back and drop what came after, exactly."""

    slot: int
    checkpoint: bytes
    n_tokens: int


Edit: TypeAlias = CopyPrefix | Truncate | Clear | Restore | Rewind


class EditOutcome(Enum):
    """How an edit went. A failed edit leaves a slot that is shorter, never wrong."""

    OK = "ok"
    NO_ROOM = "no_room"
    REFUSED = "refused"  # the blob, or a cut that this engine cannot make


@dataclass(frozen=True, slots=True)
class EditResult:
    """What the edited slot (the destination of a copy) holds now: positions first_held..n_valid-1."""

    n_valid: int
    first_held: int = 0
    outcome: EditOutcome = EditOutcome.OK


@dataclass(frozen=True, slots=True)
class BatchItem:
    """The rows one slot brings to a forward: `tokens` at positions start, start+1, ...

    Logits are wanted for the last `n_logits` of them (0 for a prefill chunk that is not the last).
    """

    slot: int
    start: int
    tokens: Tokens
    n_logits: int


@dataclass(frozen=True, slots=True)
class Batch:
    """One forward's work: at most one item a slot; one adapter set for all."""

    items: tuple[BatchItem, ...]
    adapter: str | None = None

    @property
    def n_rows(self) -> int:
        """Token positions in this forward."""
        return sum(len(item.tokens) for item in self.items)


@dataclass(frozen=True, slots=True)
class EmbedChunk:
    """The next rows of one text on the spare slot: positions start, start+1, ...; `is_last`: it ends there."""

    start: int
    tokens: Tokens
    is_last: bool


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a forward gave.

    `logits`: float32 [n_logit_rows, n_vocab], rows in the order of the items; valid until the
    next forward. `first_held`: by slot of the batch (a window loses cells here).
    """

    logits: NDArray[np.float32]
    first_held: Mapping[int, int]
    hidden: NDArray[np.float32] | None = None


class NoRoom(Exception):
    """A forward found no KV cells; nothing was changed. A smaller plan is the answer."""


class Engine(Protocol):
    """A loaded model with its KV slots. All methods are called by one thread."""

    spec: EngineSpec
    tokenizer: Tokenizer

    def edit(self, edits: Sequence[Edit]) -> list[EditResult]:
        """Apply KV edits in order; one result per edit."""
        ...

    def forward(self, batch: Batch) -> StepOutput:
        """Run one step.

        Raises: NoRoom (nothing changed); EngineError (the slots of this batch are undefined and
        must be cleared).
        """
        ...

    def export(self, slot: int, start: int, end: int) -> bytes:
        """Return positions [start, end) of `slot` as bytes that `Restore` takes."""
        ...

    def checkpoint(self, slot: int) -> bytes:
        """Return the part of the slot's state that cannot be cut, at its present length."""
        ...

    def embed(self, chunk: EmbedChunk) -> NDArray[np.float32] | None:
        """Run rows of a text; return its pooled embedding, float32 [n_embd], after the last ones.

        The spare slot must be empty before a text's first chunk, and is again after its last; `Clear`
        gives a text up. Raises: NoRoom (nothing changed); EngineError (the spare slot must be cleared).
        """
        ...

    def close(self) -> None:
        """Free everything native; idempotent."""
        ...
