"""Our state of one generation, and of the request whose choices are generated together.

A sequence is described by how many of its tokens are computed (`n_computed`, the slot's fact)
against how many it has (`n_tokens`), so prefill, decode, a prefix hit and a preemption are one
arithmetic: [0, n_computed) held by the slot · [n_computed, n_tokens) to run.
Owned and mutated by the engine's thread once submitted.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from enum import Enum

from localllm.runtime import events
from localllm.runtime.answers import Recollection
from localllm.runtime.detokenizer import Detokenizer
from localllm.runtime.events import Event, FinishReason, TokenLogprob
from localllm.runtime.kv.blocks import NO_ROOT, Root
from localllm.runtime.kv.tiers import Link, Lookup
from localllm.runtime.sampler import Sampler
from localllm.runtime.slots import Slot
from localllm.runtime.stop import StopMatcher
from localllm.runtime.stream import EventSink
from localllm.runtime.types import CacheUse, Tokens


class Phase(Enum):
    """Where a sequence stands."""

    QUEUED = "queued"
    WAITING_PREFIX = "waiting_prefix"  # another sequence is computing its prefix
    RESTORING = "restoring"  # its prefix is being put back from a tier
    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"


@dataclass(slots=True)
class Timeline:
    """When a request's phases ended (monotonic seconds), and time spent in parts of them (ms)."""

    submitted_s: float = field(default_factory=time.monotonic)
    admitted_s: float | None = None
    first_token_s: float | None = None
    spent_ms: dict[str, float] = field(default_factory=dict)

    def add(self, part: str, elapsed_s: float) -> None:
        """Count time spent in a part: template, tokenise, match, sample."""
        self.spent_ms[part] = self.spent_ms.get(part, 0.0) + elapsed_s * 1000

    def timings_ms(self) -> dict[str, float]:
        """Return every phase in ms up to now: queue, prefill, decode, total, and the parts."""
        now_s = time.monotonic()
        admitted_s = self.admitted_s or now_s
        first_s = self.first_token_s or now_s
        phases = {
            "queue": (admitted_s - self.submitted_s) * 1000,
            "prefill": (first_s - admitted_s) * 1000,
            "decode": (now_s - first_s) * 1000,
            "total": (now_s - self.submitted_s) * 1000,
        }
        return {name: round(ms, 3) for name, ms in {**self.spent_ms, **phases}.items()}


@dataclass(slots=True, eq=False)
class RequestRun:
    """One request at work: its choices or its texts to embed, where its events go, and what it has cost so far.

    `is_lone`: it runs while nothing else does. May be set until it is queued. `reuse_prefix` False: its
    prompt is computed once for its choices, whatever is held of it. `cache`, `is_private`: as in the options;
    `root`: what its KV may be shared with. `recollection` takes note of what was generated.
    """

    request_id: str
    client: str
    priority: int
    seed: int
    max_tokens: int
    stream: EventSink
    timeline: Timeline
    is_lone: bool = False
    reuse_prefix: bool = True
    cache: CacheUse = "on"
    is_private: bool = False
    root: Root = NO_ROOT
    recollection: Recollection | None = None
    sequences: list[Sequence] = field(default_factory=list)
    embedding: Embedding | None = None
    outbox: list[Event] = field(default_factory=list)
    cached_tokens: Mapping[str, int] | None = None  # by tier; None until its first sequence is at work
    n_completion_tokens: int = 0
    n_accepted_draft_tokens: int = 0
    n_rejected_draft_tokens: int = 0

    @property
    def n_prompt_tokens(self) -> int:
        """Prompt tokens, counted once for all choices; those of all texts to embed."""
        return sum(len(ids) for ids in self.inputs)

    @property
    def inputs(self) -> tuple[Tokens, ...]:
        """What preparing made of the request: the ids of its prompt, or of each text to embed."""
        if self.embedding is not None:
            return self.embedding.texts
        return tuple(s.tokens[: s.n_prompt] for s in self.sequences[:1])

    @property
    def is_finished(self) -> bool:
        """Say whether every choice, or text, has ended."""
        return all(s.phase is Phase.FINISHED for s in self.sequences) and (
            self.embedding is None or self.embedding.is_finished
        )

    def seated(self) -> None:
        """Take note that a first sequence or text has left the queue."""
        if self.timeline.admitted_s is None:
            self.timeline.admitted_s = time.monotonic()

    def admit(self, cached_tokens: Mapping[str, int]) -> bool:
        """Tell that computing begins, and what was held already, by tier; False = that was told before."""
        self.seated()
        if self.cached_tokens is not None:
            return False
        self.cached_tokens = cached_tokens
        self.outbox.append(events.Admitted(self.n_prompt_tokens, cached_tokens, self.seed, self.max_tokens))
        return True

    def close(self) -> None:
        """Tell usage and the end."""
        self.outbox.append(
            events.Usage(
                prompt_tokens=self.n_prompt_tokens,
                completion_tokens=self.n_completion_tokens,
                cached_tokens=self.cached_tokens or {"device": 0},
                accepted_draft_tokens=self.n_accepted_draft_tokens,
                rejected_draft_tokens=self.n_rejected_draft_tokens,
                timings_ms=self.timeline.timings_ms(),
            )
        )
        self.outbox.append(events.Done())

    def flush(self) -> bool:
        """Hand what happened in this step to the reader, at once; say whether anything did."""
        told, self.outbox = self.outbox, []
        if told:
            self.stream.put(told)
        return bool(told)


@dataclass(slots=True, eq=False)
class Embedding:
    """The texts of a request, embedded one after another: those before `index` are done.

    `n_computed` tokens of the text at `index` are on the spare slot.
    """

    run: RequestRun
    texts: tuple[Tokens, ...]
    index: int = 0
    n_computed: int = 0

    @property
    def text(self) -> Tokens:
        """The text that is next, or at work."""
        return self.texts[self.index]

    @property
    def is_finished(self) -> bool:
        """Say whether no text is left."""
        return self.index >= len(self.texts)

    def finish(self) -> None:
        """Leave the rest of the texts undone."""
        self.index = len(self.texts)


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice of a request.

    `tokens` = prompt + accepted. `cuts` are prompt positions where a chunk must end and a
    checkpoint be taken (engines whose state cannot be cut). `slot` is set while it runs. `lookup`: what
    the tiers may know of it; `restoring`: what is put back of that, after the `n_device` tokens that its
    slot began with; `links`: those of them that are still to come. `n_lost`: tokens that were computed when
    it was preempted.
    """

    run: RequestRun
    choice: int
    tokens: list[int]
    n_prompt: int
    sampler: Sampler
    detokenizer: Detokenizer
    stop: StopMatcher
    eog_ids: frozenset[int]
    lookup: Lookup
    n_logprobs: int | None = None
    cuts: set[int] = field(default_factory=set)
    phase: Phase = Phase.QUEUED
    slot: Slot | None = None
    order: int = 0  # of admission: the youngest is preempted first
    links: tuple[Link, ...] = ()
    restoring: tuple[Link, ...] = ()
    n_device: int = 0
    n_lost: int = 0

    @property
    def n_tokens(self) -> int:
        """Prompt and accepted tokens."""
        return len(self.tokens)

    @property
    def n_computed(self) -> int:
        """Tokens whose KV the slot holds."""
        return self.slot.n_held if self.slot is not None else 0

    @property
    def cached_tokens(self) -> dict[str, int]:
        """What its slot holds of what was known when it was seated, by tier."""
        n_held = self.n_computed
        cached = {"device": min(self.n_device, n_held)}
        for link in self.restoring:
            n_tokens = min(link.end, n_held) - max(link.block.start, cached["device"])
            if n_tokens > 0:
                cached[link.tier] = cached.get(link.tier, 0) + n_tokens
        return cached

    @property
    def n_generated(self) -> int:
        """Accepted tokens: the position of the next one in the answer."""
        return len(self.tokens) - self.n_prompt

    def take(self, ids: Seq[int], logprobs: Seq[TokenLogprob]) -> int:
        """Append accepted tokens and tell their text, until one of them ends the answer.

        Returns how many were taken (the rest of an accepted draft after the end is dropped).
        """
        for n_taken, token in enumerate(ids, start=1):
            self.tokens.append(token)
            self.run.n_completion_tokens += 1
            if token in self.eog_ids:
                self.finish("stop")
                return n_taken
            text, matched = self.stop.push(self.detokenizer.push(token))
            told = (logprobs[n_taken - 1],) if logprobs else ()
            self.run.outbox.append(events.Token(self.choice, text, (token,), told))
            if matched is not None:
                self.finish("stop", matched)
            elif self.n_generated >= self.run.max_tokens:
                self.finish("length")
            if self.phase is Phase.FINISHED:
                return n_taken
        return len(ids)

    def finish(self, reason: FinishReason, stop: str | None = None) -> None:
        """End this choice: tell the text held back (a cut character is dropped), then the reason."""
        self.phase = Phase.FINISHED
        if self.run.recollection is not None:
            self.run.recollection.keep(self.tokens[self.n_prompt :])
        if stop is None:
            text = self.stop.flush()
            if text:
                self.run.outbox.append(events.Token(self.choice, text, ()))
            if self.stop.matched is not None:  # a match that had waited for a longer one
                reason, stop = "stop", self.stop.matched
        self.run.outbox.append(events.Finished(self.choice, reason, stop))
