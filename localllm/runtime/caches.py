"""The caches of a loaded model as people see them: what is known of a prompt, and why not more; counted; cleared."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Protocol, TypeVar

from localllm.errors import Unavailable, UsageError
from localllm.runtime.answers import AnswerMemory
from localllm.runtime.engine import EngineSpec, PrefixRule
from localllm.runtime.events import Event
from localllm.runtime.kv import survey
from localllm.runtime.kv.asking import ask_once
from localllm.runtime.kv.explain import MESSAGES, CacheStats, Cleared, Explanation, Reason, divergence
from localllm.runtime.kv.tiers import Tiers
from localllm.runtime.prepare import ModelFacts, prepare
from localllm.runtime.scheduler import Scheduler
from localllm.runtime.sequence import RequestRun, Sequence
from localllm.runtime.slots import common_prefix
from localllm.runtime.types import ChatRequest, EmbeddingRequest, GenerationRequest, Request

T = TypeVar("T")
_DAYS_BACK = 7
_MORE_TOKENS = 16  # that have to be held, but not for this request, to be a reason: all prompts begin alike
_POLL_S = 0.01
_STUCK_S = 10.0  # after which nothing more is waited for that is being written: a disk may hang
_ANSWER_S = 60.0  # that people wait for an answer about what lies on disk


@dataclass(frozen=True, slots=True)
class Known:
    """What is found of a sequence that nobody has submitted. Positions in tokens of its prompt.

    `by_tier`: what it would begin with; `n_matched`: what the tiers could put back; `n_slots` and
    `n_blocks`: what slots and blocks hold, usable or not; `n_coming`: what a running sequence computes.
    """

    by_tier: Mapping[str, int]
    n_matched: int
    n_slots: int
    n_blocks: int
    n_coming: int
    age_s: float | None

    @property
    def n_usable(self) -> int:
        """Leading tokens that would not be computed."""
        return sum(self.by_tier.values())

    @property
    def n_held(self) -> int:
        """Leading tokens that are held, usable or not."""
        return max(self.n_slots, self.n_blocks, self.n_usable)


class OnEngine(Protocol):
    """Runs a question on the engine's thread between two steps, and returns its answer."""

    def __call__(self, question: Callable[[], T]) -> T:
        """Return what `question` returns. Raises: what it raises; Unavailable."""
        ...


class Caches:
    """Looks at the caches of one model. Thread safe; not for the engine's thread."""

    def __init__(
        self,
        facts: ModelFacts,
        spec: EngineSpec,
        tiers: Tiers,
        scheduler: Scheduler,
        answers: AnswerMemory | None,
        on_engine: OnEngine,
    ) -> None:
        self._facts = facts
        self._spec = spec
        self._tiers = tiers
        self._scheduler = scheduler
        self._answers = answers
        self._on_engine = on_engine

    def explain(self, request: Request) -> Explanation:
        """Return what is known of a request's prompt, and why not more; nothing is computed.

        Raises: what refuses the request; Unavailable where the disk does not answer.
        """
        if isinstance(request, EmbeddingRequest):
            raise UsageError("Texts to embed are never cached.", "give one prompt", field="prompt")
        return _in_time(lambda: self._explain(request))

    def kept(self, request: GenerationRequest, wait_s: float) -> dict[str, int]:
        """Return how many of a prompt's leading tokens each tier holds; wait for what is still to be written.

        Raises: what refuses the request; Unavailable where the disk does not answer.
        """
        return _in_time(lambda: self._kept(request, wait_s))

    def _explain(self, request: GenerationRequest) -> Explanation:
        run = self._run(request, self._facts)
        sequence = run.sequences[0]
        known = self._known(sequence)
        is_off = request.options.cache == "off" or not request.options.reuse_prefix
        reason = "off" if is_off else self._reason(request, sequence, known)
        if is_off:
            known = replace(known, by_tier={}, age_s=None)
        at = known.n_held
        return Explanation(
            n_prompt_tokens=sequence.n_prompt,
            reason=reason,
            message=MESSAGES[reason],
            known_tokens=known.by_tier,
            n_held_tokens=known.n_held,
            tier=next((tier for tier in ("disk", "ram", "device") if known.by_tier.get(tier)), ""),
            age_s=known.age_s,
            diverges_at=divergence(self._facts.tokenizer, sequence.tokens, at)
            if at < sequence.n_prompt - (reason == "complete")
            else None,
        )

    def _kept(self, request: GenerationRequest, wait_s: float) -> dict[str, int]:
        sequence = self._run(request, self._facts).sequences[0]
        end_s = time.monotonic() + wait_s
        self._wait_kept(end_s)
        self._tiers.write_pins(end_s)  # what the disk did not take before, it may take now
        self._wait_kept(end_s)
        n_slots = self._on_engine(lambda: self._scheduler.prospect(sequence)).n_held
        return {"device": n_slots, **survey.kept_tokens(self._tiers, sequence.run.root, sequence.tokens)}

    def stats(self) -> CacheStats:
        """Return what is held and what was done, at once."""
        counted, tiers, disk = replace(self._scheduler.stats), self._tiers.stats(), self._tiers.disk
        return CacheStats(
            pool_tokens=self._spec.pool_tokens,
            used_cells=counted.used_cells,
            retained_cells=counted.retained_cells,
            n_retained_slots=counted.n_retained_slots,
            n_device_evictions=counted.n_evictions,
            ram_limit_bytes=tiers.ram_limit_bytes,
            ram_bytes=tiers.ram_bytes,
            n_ram_blocks=tiers.n_ram_blocks,
            n_ram_evictions=tiers.n_ram_evicted,
            prompt_tokens={
                "computed": counted.n_prompt_tokens_computed,
                "device": counted.n_prompt_tokens_device,
                "ram": counted.n_prompt_tokens_ram,
                "disk": counted.n_prompt_tokens_disk,
            },
            n_exported_blocks=counted.n_exported_blocks,
            export_s=counted.export_s,
            n_restored_blocks=counted.n_restored_blocks,
            restore_s=counted.restore_s,
            n_refused_blocks=counted.n_refused_blocks,
            disk=None if disk is None else asdict(disk.stats()),
        )

    def clear(self) -> Cleared:
        """Forget all that is kept of requests that have ended: slots, RAM, and this engine's files, pinned ones too.

        Raises: Unavailable where the disk does not answer: what lies there may still do so then.
        """
        held = self._on_engine(self._clear_held)
        if self._answers is not None:
            self._answers.clear()
        files = _in_time(self._tiers.clear)
        self._on_engine(self._clear_held)  # what was taken from there, or ended, meanwhile
        return replace(held, n_disk_blocks=files.n_disk_blocks, disk_bytes=files.disk_bytes)

    def _clear_held(self) -> Cleared:
        """Empty what is retained, and RAM. On the engine's thread: nothing is put there, or taken, meanwhile."""
        n_cells = self._scheduler.clear_retained()
        return replace(self._tiers.clear_ram(), n_device_cells=n_cells)

    def _run(self, request: GenerationRequest, facts: ModelFacts) -> RequestRun:
        """Return a request as it would be queued, but that it would use the caches. Raises what refuses it."""
        options = replace(request.options, n=1, cache="on", reuse_prefix=True)
        return prepare(replace(request, options=options), facts, self._spec, _Nobody(), None, self._answers)

    def _known(self, sequence: Sequence) -> Known:
        run, tiers, tokens = sequence.run, self._tiers, sequence.tokens
        sequence.lookup = tiers.look_up(run.root, tokens, reads=False)
        found = self._on_engine(lambda: self._scheduler.prospect(sequence))
        by_tier, age_s = dict[str, int](), None
        if found.n_device:
            by_tier["device"] = found.n_device
            age_s = 0.0 if found.used_s is None else time.monotonic() - found.used_s
        for link in found.links:
            by_tier[link.tier] = by_tier.get(link.tier, 0) + link.n_used
            used_s = tiers.places(link.block.key).get(link.tier)
            age_s = None if used_s is None else time.time() - used_s
        links = tiers.match(sequence.lookup, tokens, sequence.n_tokens - 1)
        return Known(
            by_tier=by_tier,
            n_matched=links[-1].end if links else 0,
            n_slots=found.n_held,
            n_blocks=survey.held_tokens(tiers, run.root, tokens) if tiers.is_on else 0,
            n_coming=found.n_coming,
            age_s=None if age_s is None else max(0.0, age_s),
        )

    def _reason(self, request: GenerationRequest, sequence: Sequence, known: Known) -> Reason:
        """Return why no more of a prompt is known. Whatever is told was found, not guessed."""
        n_most, n_usable = sequence.n_tokens - 1, known.n_usable
        if self._spec.cut_tokens:
            n_most -= n_most % self._spec.cut_tokens
        if n_usable >= n_most:
            return "complete"
        if known.n_coming > n_usable:
            return "in_progress"
        if known.n_held >= min(n_most, n_usable + _MORE_TOKENS):
            return self._rule_broken(known)
        if self._was_evicted(sequence, known):
            return "evicted"
        n_more, spec, root = known.n_held + _MORE_TOKENS, self._spec, sequence.run.root
        if any(self._known(other).n_held >= n_more for other in self._with_other_adapters(request)):
            return "adapter"
        if survey.is_held_elsewhere(self._tiers, spec.fingerprint, self._facts.name, root, sequence.tokens, n_more):
            return "other_settings"
        return "template_date" if self._is_of_other_day(request, sequence, known) else "never_seen"

    def _rule_broken(self, known: Known) -> Reason:
        """Return what keeps a request from using all that is held."""
        if known.n_matched > known.n_usable:
            return "too_little"
        n_next_end = (known.n_usable // self._tiers.block_tokens + 1) * self._tiers.block_tokens
        in_block = known.n_slots <= known.n_usable and known.n_blocks < n_next_end
        if self._spec.prefix_rule is PrefixRule.CHECKPOINT:
            return "checkpoint"
        if self._spec.prefix_rule is PrefixRule.WINDOW and not in_block:
            return "window"
        return "block_end"

    def _was_evicted(self, sequence: Sequence, known: Known) -> bool:
        ends = {sequence.n_tokens, sequence.n_tokens - 1, *sequence.cuts}
        return survey.was_evicted(self._tiers, sequence.run.root, sequence.tokens, known.n_held, ends)

    def _with_other_adapters(self, request: GenerationRequest) -> Iterator[Sequence]:
        """Yield the sequence under every other adapter set, with the isolation salt that it has."""
        for adapter in ("", *self._spec.adapters):
            run = self._run(request, self._facts)
            own, salt = run.root
            if adapter != own:
                run.root = (adapter, salt)
                yield run.sequences[0]

    def _is_of_other_day(self, request: GenerationRequest, sequence: Sequence, known: Known) -> bool:
        """Say whether the prompt as it was written some days ago is known beyond where it became another."""
        template = self._facts.template
        if not isinstance(request, ChatRequest) or template is None or not template.tells_date:
            return False
        for days in range(1, _DAYS_BACK + 1):
            then = self._run(request, replace(self._facts, template=template.as_of(days))).sequences[0]
            n_common = common_prefix(then.tokens, sequence.tokens)
            n_after_date = len(then.tokens) - common_prefix(then.tokens[:n_common:-1], sequence.tokens[:n_common:-1])
            if known.n_held <= n_common < len(then.tokens) and self._known(then).n_held >= n_after_date + _MORE_TOKENS:
                return True
        return False

    def _wait_kept(self, end_s: float) -> None:
        """Wait for what is on its way into a tier, for as long as it gets on."""
        seen, moved_s = (0, 0), time.monotonic()
        while (left := self._left_to_keep()) and time.monotonic() < min(end_s, moved_s + _STUCK_S):
            if left != seen:
                seen, moved_s = left, time.monotonic()
            time.sleep(_POLL_S)

    def _left_to_keep(self) -> tuple[int, int] | None:
        """Return what changes while ended requests' blocks go into a tier; None = all are there."""
        disk, has_exports = self._tiers.disk, self._on_engine(lambda: self._scheduler.exports.has_work)
        waiting_bytes = 0 if disk is None else disk.stats().waiting_bytes
        return (waiting_bytes, self._scheduler.stats.n_exported_blocks) if has_exports or waiting_bytes else None


def _in_time(question: Callable[[], T]) -> T:
    """Return what `question` returns. Raises: what it raises; Unavailable where the disk holds it up for ever."""
    try:
        return ask_once(question, _ANSWER_S)
    except TimeoutError:
        raise Unavailable("The folder of the disk tier does not answer.", "localllm doctor") from None


class _Nobody:
    """Where the events of a request go that is never queued."""

    request_id = ""

    def put(self, batch: Iterable[Event]) -> None:
        """Nothing comes."""
