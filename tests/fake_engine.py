"""An engine without a model: its next token is a hash of the tokens *actually in its cache*.

So a KV mistake changes the answer. It checks the rules of `runtime/engine.py` and raises
`RuleBroken` where the scheduler breaks one; it can have any spec, lose its window, run out of
room, refuse copies and restores, fail a forward, or follow a script.
"""

from __future__ import annotations

import itertools
import os
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from localllm.errors import EngineError
from localllm.models.chat_template import ChatTemplate
from localllm.models.info import Kind, ModelInfo
from localllm.models.layers import Layer
from localllm.runtime.config import RuntimeConfig
from localllm.runtime.engine import (
    Batch,
    BatchItem,
    Clear,
    CopyPrefix,
    Edit,
    EditOutcome,
    EditResult,
    EmbedChunk,
    EngineSpec,
    ExportUnit,
    NoRoom,
    PrefixRule,
    Restore,
    Rewind,
    StepOutput,
    Truncate,
)
from localllm.runtime.hooks import NO_HOOKS, Hooks
from localllm.runtime.loaded_model import LoadedModel
from localllm.runtime.prepare import ModelFacts
from localllm.runtime.sampling_params import Sampling
from localllm.runtime.service import Service
from localllm.worker.protocol import Load
from tests.byte_tokenizer import ByteTokenizer

BOS, EOS, USER, ASSISTANT, FIM_PREFIX, FIM_SUFFIX, FIM_MIDDLE = range(256, 263)
FIM = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
SPECIALS = dict(enumerate(("<s>", "</s>", "<|user|>", "<|assistant|>", *FIM), start=256))
N_VOCAB = 263
N_EMBD = 8
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'assistant' %}<|assistant|>{{ m.content }}</s>{% else %}<|user|>{{ m.content }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPEC = EngineSpec(
    n_vocab=N_VOCAB,
    n_slots=9,
    pool_tokens=4096,
    max_batch_tokens=256,
    max_sequence_tokens=4096,
    max_embed_tokens=1024,
    max_embed_rows=64,
    fingerprint="fake",
)


class RuleBroken(AssertionError):
    """The runtime broke a rule of the engine seam."""


def fake_tokenizer() -> ByteTokenizer:
    """Return the tokenizer of every fake engine."""
    return ByteTokenizer(tuple(SPECIALS.values()), bos=SPECIALS[BOS], eos=SPECIALS[EOS], add_bos=True, fim=FIM)


@dataclass
class FakeSlot:
    """What one lane holds."""

    tokens: list[int] = field(default_factory=list)
    first_held: int = 0
    last_rows: int = 0
    truncated: bool = False
    settling: bool = False
    is_short: bool = False  # an edit of it failed: what was planned on it may ask for more than it holds
    cells: list[int] = field(default_factory=list)  # one id a token; a copy that shares memory shares them


def next_token(tokens: Sequence[int]) -> int:
    """Return the greedy token after `tokens`: printable, now and then the end."""
    mixed = zlib.crc32(np.asarray(tokens, np.int32).tobytes())
    return EOS if mixed % 97 == 0 else 32 + mixed % 95


def _digest(tokens: Sequence[int]) -> int:
    return zlib.crc32(np.asarray(tokens, np.int32).tobytes()) & 0x7FFFFFFF


def fake_embedding(tokens: Sequence[int]) -> np.ndarray:
    """Return the vector of a text, not of length 1: float32 [N_EMBD]."""
    seed = zlib.crc32(np.asarray(tokens, np.int32).tobytes())
    return np.random.default_rng(seed).normal(0, 3, N_EMBD).astype(np.float32)


def endless_token(tokens: Sequence[int]) -> int:
    """Return the greedy token after `tokens`, never the end."""
    return 32 + zlib.crc32(np.asarray(tokens, np.int32).tobytes()) % 95


class FakeEngine:
    """An `Engine` whose cache is a list of tokens. Each knob makes one thing go wrong or differ.

    `refuses`: the copies, truncations and rewinds that this engine cannot make after all.
    `room_tokens`: the cells there really are, where the spec promises more. `records`: keep what was
    done in `batches`, `edits` and `computed`, which grow for ever.
    """

    def __init__(
        self,
        spec: EngineSpec = SPEC,
        *,
        script: Callable[[Sequence[int]], int] = next_token,
        noise: float = 1.0,
        fail_copies: bool = False,
        fail_forwards: Iterable[int] = (),
        fail_edits: Iterable[int] = (),
        short_rooms: Iterable[int] = (),
        fail_embeds: Iterable[int] = (),
        short_embeds: Iterable[int] = (),
        on_forward: Callable[[Batch], None] | None = None,
        refuses: Callable[[Edit], bool] = lambda edit: False,
        room_tokens: int | None = None,
        records: bool = True,
    ) -> None:
        self.spec = spec
        self.tokenizer = fake_tokenizer()
        self.slots = [FakeSlot() for _ in range(spec.n_slots)]
        self.batches: list[Batch] = []
        self.edits: list[Edit] = []
        self.embeds: list[EmbedChunk] = []
        self.computed: list[tuple[int, int]] = []  # (slot, position) of every row ever run
        self.broken: list[str] = []
        self.n_no_room = 0
        self.n_checkpoints = self.n_exported = self.n_restored = 0
        self.closed = False
        self._script = script
        self._noise = np.random.default_rng(7).normal(0, noise, (64, spec.n_vocab)).astype(np.float32)
        self._fail_copies = fail_copies
        self._fail_forwards = set(fail_forwards)
        self._fail_edits = set(fail_edits)
        self._short_rooms = set(short_rooms)
        self._fail_embeds = set(fail_embeds)
        self._short_embeds = set(short_embeds)
        self._on_forward = on_forward
        self._refuses = refuses
        self._room_tokens = spec.pool_tokens if room_tokens is None else room_tokens
        self._records = records
        self._n_forwards = self._n_edits = self._n_embeds = 0
        self._cell_ids = itertools.count()

    # --- edits

    def edit(self, edits: Sequence[Edit]) -> list[EditResult]:
        """Apply edits in order, checking the rules."""
        return [self._edit(edit) for edit in edits]

    def _edit(self, edit: Edit) -> EditResult:
        self._n_edits += 1
        if self._records:
            self.edits.append(edit)
        if self._n_edits in self._fail_edits:
            raise EngineError("the fake engine fails here")
        if isinstance(edit, (CopyPrefix, Truncate, Rewind)) and self._refuses(edit):
            self.slots[edit.dst if isinstance(edit, CopyPrefix) else edit.slot] = FakeSlot(is_short=True)
            return EditResult(0, outcome=EditOutcome.REFUSED)
        match edit:
            case CopyPrefix(src, dst, n_tokens):
                return self._copy(src, dst, n_tokens)
            case Truncate(slot, n_tokens):
                return self._truncate(self.slots[slot], n_tokens)
            case Clear(slot):
                self.slots[slot] = FakeSlot()
                return EditResult(0)
            case Restore():
                return self._restore(self.slots[edit.slot], edit)
            case Rewind(slot, checkpoint, n_tokens):
                return self._rewind(self.slots[slot], checkpoint, n_tokens)

    def _copy(self, src: int, dst: int, n_tokens: int) -> EditResult:
        source = self.slots[src]
        self.slots[dst] = FakeSlot()
        self._check(src != dst, "a slot is copied onto itself")
        self._check(n_tokens <= len(source.tokens) or source.is_short, "a copy is longer than its source")
        self._check(not source.settling, "a pending slot is copied")
        n_tokens = min(n_tokens, len(source.tokens))
        if source.is_short and not self._keeps_window(source, n_tokens):  # what was planned would have been right
            self.slots[dst].is_short = True
            return EditResult(0, outcome=EditOutcome.REFUSED)
        self._check_cut(source, n_tokens)
        if self._fail_copies or (not self.spec.copy_shares_memory and self.used_cells() + n_tokens > self._room_tokens):
            self.slots[dst].is_short = True
            self.n_no_room += 1
            return EditResult(0, outcome=EditOutcome.NO_ROOM)
        cells = source.cells[:n_tokens] if self.spec.copy_shares_memory else self._new_cells(n_tokens)
        copied = replace(source, tokens=source.tokens[:n_tokens], cells=cells, truncated=False, last_rows=0)
        self.slots[dst] = copied
        return EditResult(n_tokens, copied.first_held)

    def _truncate(self, slot: FakeSlot, n_tokens: int) -> EditResult:
        n_dropped = len(slot.tokens) - n_tokens
        bound = self.spec.max_rollback_tokens
        if slot.is_short and n_dropped < 0:
            return EditResult(len(slot.tokens), slot.first_held)
        self._check(n_dropped >= 0, "a truncation makes a slot longer")
        if bound is not None and n_dropped:
            self._check(not slot.truncated, "two truncations between two forwards")
            self._check(n_dropped <= min(bound, slot.last_rows - 1), "a rollback beyond what the engine can do")
            slot.truncated = slot.settling = True
        elif n_dropped:
            self._check_cut(slot, n_tokens)
        del slot.tokens[n_tokens:], slot.cells[n_tokens:]
        slot.first_held = min(slot.first_held, n_tokens)
        return EditResult(n_tokens, slot.first_held)

    def _check_cut(self, slot: FakeSlot, n_tokens: int) -> None:
        self._check(self._keeps_window(slot, n_tokens), "a window model is cut where its window is gone")
        if self.spec.prefix_rule is PrefixRule.CHECKPOINT:
            self._check(n_tokens == len(slot.tokens), "a state that cannot be cut is cut")

    def _keeps_window(self, slot: FakeSlot, n_tokens: int) -> bool:
        is_window = self.spec.prefix_rule is PrefixRule.WINDOW
        return not is_window or slot.first_held <= max(0, n_tokens - self.spec.window_tokens)

    def _restore(self, slot: FakeSlot, edit: Restore) -> EditResult:
        if len(slot.tokens) != edit.start:
            return EditResult(len(slot.tokens), slot.first_held, EditOutcome.NO_ROOM)
        start, n_missing, before, *tokens = np.frombuffer(edit.blob, np.int32).tolist()
        self._check(before == _digest(slot.tokens), "a block is put back after other tokens than it was computed after")
        self._check(start == edit.start, "a block is put back elsewhere than where it was")
        is_free = self.spec.export_unit is ExportUnit.WHOLE or not self.slots[-1].tokens
        self._check(is_free, "a block is put back through a slot that is in use")
        self._check(self.spec.export_unit is ExportUnit.BLOCK or start == 0, "a whole state is put after another")
        if self._refuses(edit):
            slot.is_short = True
            return EditResult(len(slot.tokens), slot.first_held, EditOutcome.REFUSED)
        if self.used_cells() + len(tokens) > self._room_tokens:
            slot.is_short = True
            self.n_no_room += 1
            return EditResult(len(slot.tokens), slot.first_held, EditOutcome.NO_ROOM)
        slot.tokens += tokens
        slot.cells += self._new_cells(len(tokens))
        self.n_restored += len(tokens)
        if n_missing:
            slot.first_held = max(slot.first_held, start + n_missing)
        if self.spec.prefix_rule is PrefixRule.WINDOW:
            slot.first_held = max(slot.first_held, len(slot.tokens) - self.spec.window_tokens)
        return EditResult(len(slot.tokens), slot.first_held)

    def _rewind(self, slot: FakeSlot, checkpoint: bytes, n_tokens: int) -> EditResult:
        held = np.frombuffer(checkpoint, np.int32).tolist()
        if slot.is_short and n_tokens > len(slot.tokens):
            slot.tokens.clear()
            slot.cells.clear()
            return EditResult(0, outcome=EditOutcome.REFUSED)
        self._check(held == slot.tokens[:n_tokens], "a checkpoint of other tokens is put back")
        del slot.tokens[n_tokens:], slot.cells[n_tokens:]
        slot.settling = slot.truncated = False
        slot.last_rows = 0
        return EditResult(n_tokens, slot.first_held)

    # --- forward

    def forward(self, batch: Batch) -> StepOutput:
        """Run the rows; logits peak at the script's token, with seeded noise around it."""
        self._n_forwards += 1
        if self._on_forward is not None:
            self._on_forward(batch)
        self._check_batch(batch)
        if self._n_forwards in self._short_rooms or self.used_cells() + batch.n_rows > self._room_tokens:
            self.n_no_room += 1
            raise NoRoom
        if self._n_forwards in self._fail_forwards:
            raise EngineError("the fake engine fails here")
        if self._records:
            self.batches.append(batch)
            self.computed += [(i.slot, i.start + n) for i in batch.items for n in range(len(i.tokens))]
        rows, first_held = [], {}
        for item in batch.items:
            slot = self.slots[item.slot]
            slot.cells += self._new_cells(len(item.tokens))
            for i, token in enumerate(item.tokens):
                slot.tokens.append(token)
                if i >= len(item.tokens) - item.n_logits:
                    rows.append(self._logits(slot.tokens))
            slot.last_rows, slot.truncated, slot.settling = len(item.tokens), False, False
            slot.is_short = False
            if self.spec.prefix_rule is PrefixRule.WINDOW:  # lost: what was outside as the rows came in
                slot.first_held = max(slot.first_held, item.start - self.spec.window_tokens)
            first_held[item.slot] = slot.first_held
        logits = np.array(rows, np.float32) if rows else np.zeros((0, self.spec.n_vocab), np.float32)
        return StepOutput(logits, first_held)

    def _check_batch(self, batch: Batch) -> None:
        spec = self.spec
        self._check(0 < batch.n_rows <= spec.max_batch_tokens, "a batch of the wrong size")
        self._check(len({i.slot for i in batch.items}) == len(batch.items), "two items of one slot")
        for item in batch.items:
            slot = self.slots[item.slot]
            self._check(0 <= item.slot < spec.n_slots - 1, "a slot that is not the scheduler's")
            self._check(item.start == len(slot.tokens), "rows do not start where the slot ends")
            self._check(self._keeps_window(slot, item.start), "rows run without their window")
            self._check(len(item.tokens) > 0 and 0 <= item.n_logits <= len(item.tokens), "odd rows")
            self._check(item.start + len(item.tokens) <= spec.max_sequence_tokens, "beyond the longest sequence")
            self._check(all(0 <= t < spec.n_vocab for t in item.tokens), "an id outside the vocabulary")
        if not spec.ragged_rows:
            self._check(len({len(i.tokens) for i in batch.items}) == 1, "ragged rows")
        if spec.cut_tokens and batch.n_rows > spec.exact_rows:
            item, *others = batch.items
            is_chunk = item.start % spec.cut_tokens == 0 and len(item.tokens) <= spec.cut_tokens and not others
            self._check(is_chunk, "rows that are no chunk between two cuts")
        if not spec.mixes_prefill_and_decode:
            kinds = {i.n_logits == len(i.tokens) for i in batch.items}
            self._check(len(kinds) == 1, "prefill and decode in one forward")

    def _logits(self, tokens: Sequence[int]) -> np.ndarray:
        token = self._script(tokens)
        row = self._noise[zlib.crc32(np.asarray(tokens, np.int32).tobytes()) % 64].copy()
        row[token] = row.max() + 1.0
        return row

    def used_cells(self) -> int:
        """Count the cells that are held, shared ones once."""
        return len({cell for slot in self.slots for cell in slot.cells})

    def _new_cells(self, n_cells: int) -> list[int]:
        return [next(self._cell_ids) for _ in range(n_cells)]

    # --- the rest of the protocol

    def export(self, slot: int, start: int, end: int) -> bytes:
        """Return where a span begins, how many of its window's cells are gone, what came before it, and its tokens."""
        held = self.slots[slot]
        self._check(0 <= start < end <= len(held.tokens), "what is not held is exported")
        whole = (start, end) == (0, len(held.tokens)) and not held.settling
        self._check(self.spec.export_unit is ExportUnit.BLOCK or whole, "a part of a whole is exported")
        if slot != self.spec.n_slots - 1:
            self._check(not self.slots[-1].tokens, "a block is exported through a slot that is in use")
        self.n_exported += end - start
        n_missing = max(0, min(end, held.first_held) - start)
        before = _digest(held.tokens[:start])
        return np.asarray([start, n_missing, before, *held.tokens[start:end]], np.int32).tobytes()

    def checkpoint(self, slot: int) -> bytes:
        """Return the tokens so far: enough to tell a wrong rewind."""
        self._check(not self.slots[slot].settling, "a pending slot is checkpointed")
        self.n_checkpoints += 1
        return np.asarray(self.slots[slot].tokens, np.int32).tobytes()

    def embed(self, chunk: EmbedChunk) -> np.ndarray | None:
        """Run rows on the spare slot; the vector is a hash of all tokens that are there at the end."""
        spare, spec = self.slots[-1], self.spec
        item = BatchItem(spec.n_slots - 1, chunk.start, chunk.tokens, len(chunk.tokens))
        if self._on_forward is not None:
            self._on_forward(Batch((item,)))
        self._check(0 < len(chunk.tokens) <= spec.max_embed_rows, "too many rows to embed")
        self._check(chunk.start == len(spare.tokens), "a text goes on where it is not")
        self._check(chunk.start + len(chunk.tokens) <= spec.max_embed_tokens, "a text that is too long")
        self._n_embeds += 1
        if self._n_embeds in self._fail_embeds:
            spare.tokens.append(-1)  # undefined: only clearing helps
            raise EngineError("the fake engine fails here")
        if self._n_embeds in self._short_embeds or self.used_cells() + len(chunk.tokens) > self._room_tokens:
            self.n_no_room += 1
            raise NoRoom
        if self._records:
            self.embeds.append(chunk)
        spare.tokens += chunk.tokens
        spare.cells += self._new_cells(len(chunk.tokens))
        if not chunk.is_last:
            return None
        vector = fake_embedding(spare.tokens)
        self.slots[-1] = FakeSlot()
        return vector

    def close(self) -> None:
        """Note that it was closed."""
        self.closed = True

    def _check(self, holds: bool, what: str) -> None:
        if not holds:
            self.broken.append(what)
            raise RuleBroken(what)


def fake_info(name: str = "fake", path: Path = Path("fake.gguf")) -> ModelInfo:
    """Return the facts of a model that is not there."""
    return ModelInfo(
        path=path,
        files=(path,),
        kind=Kind.MODEL,
        architecture="llama",
        name=name,
        size_bytes=1_000_000,
        n_params=500_000,
        quant="F16",
        n_ctx_train=SPEC.max_sequence_tokens,
        n_embd=N_EMBD,
        n_vocab=N_VOCAB,
        n_merges=0,
        n_ff=16,
        n_expert=0,
        n_expert_used=0,
        layers=(Layer(2, 2, 4, 4, 8, 8),),
        window_tokens=0,
        is_causal=True,
        is_embedding_only=False,
        learned_positions=False,
        can_roll_back_state=False,
        chat_template=TEMPLATE,
        chat_templates={},
        license=None,
        quantiser=None,
        imatrix=None,
        source_url=None,
        sampling_defaults={},
        tensors=(),
        part_tensors=(0,),
    )


def fake_parts(
    engine: FakeEngine,
    *,
    name: str = "fake",
    path: Path = Path("fake.gguf"),
    sampling: Sampling = Sampling(temperature=0.0),
    template: str | None = TEMPLATE,
) -> tuple[LoadedModel, ModelFacts]:
    """Return what a Service over a FakeEngine is made of, beside the engine."""
    tokenizer = engine.tokenizer
    compiled = (
        ChatTemplate(template, specials=tokenizer.vocabulary.specials, bos="<s>", eos="</s>") if template else None
    )
    facts = ModelFacts(name, tokenizer, compiled, sampling, largest_ctx=lambda: engine.spec.max_sequence_tokens)
    model = LoadedModel(
        name=name,
        path=path,
        sha256="f" * 64,
        info=fake_info(name, path),
        n_ctx=engine.spec.pool_tokens,
        n_slots=engine.spec.n_slots,
        sampling=sampling,
        is_deterministic=engine.spec.cut_tokens > 0,
    )
    return model, facts


def fake_service(
    engine: FakeEngine | None = None,
    *,
    config: RuntimeConfig = RuntimeConfig(),
    sampling: Sampling = Sampling(temperature=0.0),
    template: str | None = TEMPLATE,
    drafter: Any = None,
    hooks: Hooks = NO_HOOKS,
) -> Service:
    """Return a Service over a FakeEngine, with a chat template of its own."""
    engine = engine or FakeEngine()
    model, facts = fake_parts(engine, sampling=sampling, template=template)
    return Service(model, facts, engine, config, drafter, hooks)


def parts(load: Load) -> tuple[LoadedModel, ModelFacts, FakeEngine]:
    """Build a worker's model on a FakeEngine: what `LOCALLLM_ENGINE=tests.fake_engine:parts` names.

    `FAKE_STEP_MS`: each forward takes so long. `FAKE_NO_EOS=1`: no answer ends by itself.
    """
    step_s = float(os.environ.get("FAKE_STEP_MS", "0")) / 1000
    script = endless_token if os.environ.get("FAKE_NO_EOS") == "1" else next_token
    engine = FakeEngine(script=script, on_forward=lambda batch: time.sleep(step_s), records=False)
    model, facts = fake_parts(engine, name=load.name, path=Path(load.model))
    return model, facts, engine
