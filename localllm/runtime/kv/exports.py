"""What is to be kept in the tiers of what slots hold.

On memory that the pool shares with the RAM tier a sequence is exported when it has ended; on devices with
memory of their own, and where a window would lose cells, as its blocks complete.
Mutated by the engine's thread alone; who runs a job is the loop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from localllm.runtime.engine import EngineSpec, PrefixRule
from localllm.runtime.kv.blocks import Block, Key
from localllm.runtime.kv.export_budget import ExportBudget
from localllm.runtime.kv.ram import Note
from localllm.runtime.kv.tiers import CutRule, Tiers
from localllm.runtime.metrics import RuntimeStats
from localllm.runtime.sequence import Sequence
from localllm.runtime.slots import Checkpoint, Slot

_PAUSE_S = 0.005  # at once, that those who wait for a token may be made to wait longer
_FIRST_GUESS_S = 0.001  # of a block's export, while nothing is known of this machine


@dataclass(frozen=True, slots=True)
class ExportJob:
    """One block to export from a slot; from a copy of it that is put back to `checkpoint`, where one is given.

    `is_last`: the slot itself is put back, for it is about to lose what comes after.
    """

    slot: int
    n_held: int
    block: Block
    note: Note
    checkpoint: Checkpoint | None = None
    is_last: bool = False


@dataclass(slots=True, eq=False)
class _Source:
    """A slot that holds what is worth keeping: the first `n_tokens` of `tokens`.

    `next_start`: where the next block to export begins, `due_start`: the same of those that a window is about to
    lose. `whole`: the key of its whole state. `is_done`: nothing
    is left to export, or it failed; what was exported may be gone again.
    """

    slot: Slot
    sequence: Sequence
    tokens: list[int]
    n_tokens: int
    note: Note
    is_running: bool
    next_start: int = 0
    due_start: int = 0
    states: deque[Checkpoint | None] = field(default_factory=deque)  # whole ones to export; None = as the slot is
    whole: Key = b""
    is_done: bool = False


class Exports:
    """The slots that still hold something which no tier has."""

    def __init__(self, spec: EngineSpec, tiers: Tiers, stats: RuntimeStats) -> None:
        self.budget = ExportBudget()
        self._tiers = tiers
        self._stats = stats
        self._spec = spec
        self._loses_cells = spec.prefix_rule is PrefixRule.WINDOW
        self._while_running = tiers.rule is not CutRule.WHOLE and (self._loses_cells or not spec.pool_is_host_memory)
        self._sources: dict[int, _Source] = {}
        self._rescued: dict[Key, ExportJob] = {}

    @property
    def has_work(self) -> bool:
        """Say whether a slot holds something of a sequence that has ended which is to be exported."""
        return bool(self._rescued) or any(not (s.is_done or s.is_running) for s in self._sources.values())

    def seated(self, sequence: Sequence) -> None:
        """Take note that a sequence has a slot: whatever that held before is its own now."""
        slot = sequence.slot
        assert slot is not None
        self._sources.pop(slot.id, None)
        if self._while_running and _is_kept(sequence) and self._tiers.is_on:
            note = _note(sequence, is_running=True)
            self._sources[slot.id] = _Source(slot, sequence, sequence.tokens, 0, note, is_running=True)

    def retired(self, slot: Slot, sequence: Sequence, n_tokens: int) -> None:
        """Take note that a slot is kept for the first `n_tokens` of a sequence alone."""
        before = self._sources.pop(slot.id, None)
        if not self._tiers.is_on or not n_tokens:
            return
        source = _Source(slot, sequence, sequence.tokens[:n_tokens], n_tokens, _note(sequence), is_running=False)
        if self._tiers.rule is CutRule.WHOLE:
            if n_tokens != slot.n_held:
                return
            self._restart(source)
        elif before is not None and before.sequence is sequence and not source.note.is_pinned:
            source.next_start, source.due_start = before.next_start, before.due_start
        self._sources[slot.id] = source

    def dropped(self, slot: Slot) -> None:
        """Take note that a slot is cleared. Idempotent."""
        self._sources.pop(slot.id, None)

    def is_safe(self, slot: Slot) -> bool:
        """Say whether a tier has all of what a retained slot holds, or was given it, where that is fleeting."""
        source = self._sources.get(slot.id)
        if source is not None and source.note.is_fleeting:
            return source.is_done and not source.states
        return source is not None and (source.is_done or not source.note.is_pinned) and self._could_return(source)

    def rescue(self, slot: Slot, n_left: int | None = None) -> bool:
        """Have what the tiers lack of a slot exported before the next edits, as far as the debt allows.

        `n_left`: of its tokens, which are all that those edits leave; None = they leave it as it is. True = something
        is on its way; `is_safe` says later whether it came there.
        """
        source, n_before, is_whole = self._sources.get(slot.id), len(self._rescued), self._tiers.rule is CutRule.WHOLE
        if source is None or (not is_whole and self._could_return(source)):
            return False
        if n_left is None and slot.is_settling:  # it cannot be copied
            return False
        if not source.note.is_fleeting:  # what a tier let go of is not worth another time
            self._restart(source)
        jobs = self._jobs(source) if n_left is None or not is_whole else self._last_jobs(source, n_left)
        while source.note.is_pinned or self.budget.allows(debt=True, pledged_s=len(self._rescued) * self._expected_s):
            job = next(jobs, None)
            if job is None:
                break
            self._rescued[job.block.key] = job
        return len(self._rescued) > n_before

    def take_rescued(self) -> list[ExportJob]:
        """Hand over what is to be exported before the edits that were recorded since the last call."""
        jobs, self._rescued = list(self._rescued.values()), {}
        return jobs

    def cleared(self) -> None:
        """Take note that the tiers hold nothing any more: what is at work is exported anew, from its beginning."""
        self._rescued.clear()
        for source in self._sources.values():
            self._restart(source)

    def due(self, busy: frozenset[int]) -> Iterator[ExportJob]:
        """Yield jobs that cannot wait, whatever the budget: what a window is about to lose, and what is pinned.

        Slots in `busy` have edits before them.
        """
        is_whole = self._tiers.rule is CutRule.WHOLE
        for source in list(self._sources.values()):
            if source.note.is_pinned and not source.is_done and not (is_whole and source.slot.id in busy):
                yield from self._jobs(source)
            elif self._loses_cells and not is_whole:
                yield from self._leaving(source)

    def next(self, busy: frozenset[int], *, is_quiet: bool) -> ExportJob | None:
        """Return the next job; None = there is none now.

        Slots in `busy` have edits before them. `is_quiet`: nobody waits for a next token, so it may take its time.
        """
        if not is_quiet and self._tiers.rule is CutRule.WHOLE and self._expected_s > _PAUSE_S:
            return None
        for source in list(self._sources.values()):
            if source.is_done or (self._tiers.rule is CutRule.WHOLE and source.slot.id in busy):
                continue
            job = next(self._jobs(source), None)
            if job is not None:
                return job
        return None

    def exported(self, job: ExportJob, blob: bytes, elapsed_s: float) -> None:
        """Keep what a job gave."""
        self._tiers.put(job.block, blob, job.note)
        self._stats.n_exported_blocks += 1
        self._stats.export_s += elapsed_s
        self.budget.spend(elapsed_s)

    def failed(self, job: ExportJob, elapsed_s: float) -> None:
        """Take note that a job gave nothing: what follows is of no use without it. Rescuing tries again."""
        self.budget.spend(elapsed_s)
        source = self._sources.get(job.slot)
        if source is None or source.note is not job.note:
            return
        source.is_done = True
        if self._tiers.rule is CutRule.WHOLE:
            source.states.appendleft(job.checkpoint)  # it lies in the slot alone
        else:
            source.next_start = min(source.next_start, job.block.start)

    def _could_return(self, source: _Source) -> bool:
        """Say whether the tiers could put back now all that a slot is kept for, its checkpoints among that."""
        if self._tiers.rule is CutRule.WHOLE:
            return not source.states and self._tiers.holds(source.whole)
        links = self._tiers.match(source.sequence.lookup, source.tokens, source.n_tokens)
        return bool(links) and links[-1].end == source.n_tokens

    def _restart(self, source: _Source) -> None:
        """Look at all of a slot again: what the tiers have is passed over."""
        source.next_start, source.due_start, source.is_done = 0, 0, False
        if self._tiers.rule is CutRule.WHOLE:
            before = [c for c in reversed(source.slot.checkpoints) if c.n_tokens < source.n_tokens]
            source.is_done = source.slot.is_settling  # until it is put back to a checkpoint
            source.states = deque(before if source.is_done else [None, *before])

    @property
    def _expected_s(self) -> float:
        stats = self._stats
        return stats.export_s / stats.n_exported_blocks if stats.n_exported_blocks else _FIRST_GUESS_S

    def _jobs(self, source: _Source) -> Iterator[ExportJob]:
        """Yield what is left to export of a slot, past what the tiers have; what was yielded counts as done."""
        if self._tiers.rule is CutRule.WHOLE:
            yield from self._whole_jobs(source)
            return
        while not source.is_done and source.next_start < (n_tokens := self._n_exportable(source)):
            start = source.next_start
            source.next_start = min(start + self._tiers.block_tokens, n_tokens)
            job = self._block_job(source, start, source.next_start)
            if job is not None:
                yield job
        source.is_done |= not source.is_running

    def _leaving(self, source: _Source) -> Iterator[ExportJob]:
        """Yield the blocks that a window has whole, and will not have for long: those before them can wait."""
        size = self._tiers.block_tokens
        source.due_start = max(source.due_start, -(-source.slot.first_held // size) * size)
        while not source.is_done and source.due_start < (n_tokens := self._n_exportable(source)):
            start = source.due_start
            source.due_start = min(start + size, n_tokens)
            job = self._block_job(source, start, source.due_start)
            if job is not None:
                yield job

    def _block_job(self, source: _Source, start: int, end: int) -> ExportJob | None:
        """Return the job of one block; None = a tier has it."""
        key = self._key(source, start, end)
        if key is not None and self._is_kept_already(source, key):
            return None
        block = source.sequence.lookup.chain.block(source.tokens, start, end)
        if self._is_kept_already(source, block.key):
            return None
        if self._loses_cells and source.slot.first_held > start:
            block = replace(block, is_bare=True)
        return ExportJob(source.slot.id, source.slot.n_held, block, source.note)

    def _whole_jobs(self, source: _Source) -> Iterator[ExportJob]:
        slot, chain = source.slot, source.sequence.lookup.chain
        while source.states:
            checkpoint = source.states.popleft()
            n_tokens = source.n_tokens if checkpoint is None else checkpoint.n_tokens
            block = chain.whole(source.tokens, n_tokens)
            if checkpoint is None:
                source.whole = block.key
            if not self._is_kept_already(source, block.key):
                yield ExportJob(slot.id, slot.n_held, block, source.note, checkpoint)
        source.is_done = True

    def _last_jobs(self, source: _Source, n_left: int) -> Iterator[ExportJob]:
        """Yield the jobs of a slot's states that go, the longest first: each is put back from the one before it."""
        for job in self._whole_jobs(source):
            if job.block.end > n_left:
                yield replace(job, is_last=True)

    def _is_kept_already(self, source: _Source, key: Key) -> bool:
        if source.note.is_pinned:
            return self._tiers.pin(key, source.note)
        return key in self._rescued or self._tiers.holds(key)

    def _n_exportable(self, source: _Source) -> int:
        """Return the end of what can be exported now: of a running sequence only whole blocks."""
        if not source.is_running:
            return source.n_tokens
        limit = min(source.slot.n_held, len(source.tokens))
        if self._spec.cut_tokens:
            limit = min(limit, source.sequence.n_prompt - 1) // self._spec.cut_tokens * self._spec.cut_tokens
        return limit // self._tiers.block_tokens * self._tiers.block_tokens

    def _key(self, source: _Source, start: int, end: int) -> Key | None:
        """Return a whole block's key without making its marks."""
        if end - start < self._tiers.block_tokens:
            return None
        chain = source.sequence.lookup.chain
        chain.extend(source.tokens[:end])
        return chain.keys[start // self._tiers.block_tokens]


def _is_kept(sequence: Sequence) -> bool:
    return sequence.run.cache != "off"


def _note(sequence: Sequence, *, is_running: bool = False) -> Note:
    """Return what is known of a sequence's blocks. They are pinned once its prompt is whole: not if it broke off."""
    run = sequence.run
    is_fleeting = run.is_private and bool(run.root[1])  # a salt that nothing goes to disk for is a connection's
    is_pinned = run.cache == "pin" and not is_fleeting and not is_running and sequence.n_generated > 0
    return Note(sequence.n_tokens, run.is_private, is_pinned, is_fleeting)
