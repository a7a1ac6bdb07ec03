"""Runs requests through the real loop on a FakeEngine, on this thread, and knows the right answers."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from localllm.runtime.config import RuntimeConfig
from localllm.runtime.cost import StepCost
from localllm.runtime.draft.base import Draft, Drafted, Drafter
from localllm.runtime.engine import EngineSpec, ExportUnit, PrefixRule
from localllm.runtime.inbox import Cancel, Submit
from localllm.runtime.kv.tiers import Tiers, no_tiers
from localllm.runtime.loop import EngineLoop
from localllm.runtime.prepare import ModelFacts, prepare
from localllm.runtime.sampling_params import Sampling
from localllm.runtime.scheduler import Scheduler
from localllm.runtime.sequence import Phase, RequestRun
from localllm.runtime.stream import Answer, TokenStream, collect
from localllm.runtime.types import CompletionRequest, EmbeddingRequest, GenerationOptions, Request
from tests.fake_engine import EOS, SPEC, FakeEngine, next_token

SPECS: dict[str, EngineSpec] = {
    "any": SPEC,
    "unshared copies": replace(SPEC, copy_shares_memory=False),
    "window": replace(SPEC, prefix_rule=PrefixRule.WINDOW, window_tokens=24),
    "recurrent": replace(SPEC, prefix_rule=PrefixRule.CHECKPOINT, max_rollback_tokens=0, export_unit=ExportUnit.WHOLE),
    "hybrid": replace(SPEC, prefix_rule=PrefixRule.CHECKPOINT, max_rollback_tokens=3, export_unit=ExportUnit.WHOLE),
    "own memory": replace(SPEC, pool_is_host_memory=False),
    "equal rows": replace(SPEC, ragged_rows=False),
    "prefill apart": replace(SPEC, mixes_prefill_and_decode=False),
    "everything hard": replace(
        SPEC,
        prefix_rule=PrefixRule.CHECKPOINT,
        max_rollback_tokens=0,
        export_unit=ExportUnit.WHOLE,
        copy_shares_memory=False,
        ragged_rows=False,
        mixes_prefill_and_decode=False,
    ),
}


class HalfRight:
    """A drafter that knows the answer and lies at every third position."""

    def __init__(self, n_tokens: int = 4) -> None:
        self._n_tokens = n_tokens

    def propose(self, sequences: Sequence[Drafted], budget: int) -> list[Draft]:
        """Draft the true continuation with a mistake now and then."""
        return [Draft(tuple(self._guess(list(s.tokens)))) for s in sequences]

    def accepted(self, sequence: Drafted, tokens: Sequence[int]) -> None:
        """Learn nothing."""

    def forget(self, sequence: Drafted) -> None:
        """Keep nothing."""

    def _guess(self, tokens: list[int]) -> list[int]:
        guessed: list[int] = []
        for _ in range(self._n_tokens):
            token = next_token([*tokens, *guessed])
            guessed.append(token if (len(tokens) + len(guessed)) % 3 else 33)
        return guessed


class Watch:
    """Notes whose step it was, and checks that no step begins in another or beside one that runs alone."""

    def __init__(self) -> None:
        self.steps: list[tuple[str, ...]] = []
        self.expected_s: list[float | None] = []
        self.n_published = 0
        self._is_inside = False

    def began(self, runs: tuple[RequestRun, ...], expected_s: float | None) -> None:
        """Note the requests of a step."""
        assert not self._is_inside
        assert len(runs) < 2 or not any(run.is_lone for run in runs)
        self._is_inside = True
        self.steps.append(tuple(run.request_id for run in runs))
        self.expected_s.append(expected_s)

    def ended(self) -> None:
        """Note that it came back."""
        assert self._is_inside
        self._is_inside = False

    def published(self) -> None:
        """Count."""
        self.n_published += 1

    def between(self, request_id: str) -> set[str]:
        """Return the requests that had a step between the first and the last one of this request."""
        mine = [at for at, step in enumerate(self.steps) if request_id in step]
        return {name for step in self.steps[mine[0] : mine[-1] + 1] for name in step} - {request_id} if mine else set()


class RestoringPays(StepCost):
    """The fake engine computes faster than anything could be put back; real ones do not."""

    def restore_pays(self, n_put: int, n_saved: int, used_cells: int) -> bool:
        """Say so."""
        return True


class Bench:
    """A loop without its thread: `step` it, or run it until nothing is left to do."""

    def __init__(
        self,
        engine: FakeEngine | None = None,
        config: RuntimeConfig = RuntimeConfig(),
        drafter: Drafter | None = None,
        sampling: Sampling = Sampling(temperature=0.0),
        tiers: Tiers | None = None,
    ) -> None:
        self.engine = engine or FakeEngine()
        self.tiers = tiers or no_tiers(self.engine.spec)
        self.cost = StepCost() if tiers is None else RestoringPays()
        self.watch = Watch()
        self.scheduler = Scheduler(self.engine.spec, config, self.cost, self.watch.published, self.tiers)
        self.loop = EngineLoop(self.engine, self.scheduler, self.cost, drafter, self.watch)
        self.facts = ModelFacts("fake", self.engine.tokenizer, None, sampling, lambda: SPEC.max_sequence_tokens)
        self._ids = itertools.count()

    def submit(self, prompt: Sequence[int], *, is_lone: bool = False, **options: object) -> TokenStream:
        """Queue a prompt of token ids."""
        request = CompletionRequest(
            tuple(prompt),
            GenerationOptions(**{"max_tokens": 20, "seed": 1, **options}),
            request_id=f"r{next(self._ids)}",
        )
        return self._queue(request, is_lone)

    def embed(self, texts: Sequence[Sequence[int]], *, is_lone: bool = False, **options: object) -> TokenStream:
        """Queue texts of token ids to embed."""
        request = EmbeddingRequest(
            tuple(tuple(text) for text in texts),
            GenerationOptions(**options),  # type: ignore[arg-type]
            request_id=f"e{next(self._ids)}",
        )
        return self._queue(request, is_lone)

    def _queue(self, request: Request, is_lone: bool) -> TokenStream:
        stream = TokenStream(request.request_id, lambda stream: self.loop.inbox.put(Cancel(stream)))
        run = prepare(request, self.facts, self.engine.spec, stream, self.tiers)
        run.is_lone = is_lone
        self.loop.inbox.put(Submit(run))
        return stream

    def step(self) -> None:
        """One step of the loop, without sleeping, then the ledger's own check."""
        self.loop._wait_s = 0
        self.loop.step()
        assert not getattr(self.engine, "broken", None), self.engine.broken
        self.scheduler._room.slots.check_integrity()

    def run(self, *, at_most: int = 5000, each_step: Callable[[int], None] = lambda n: None) -> None:
        """Step until idle."""
        self.step()
        for n in range(at_most):
            if self.scheduler.is_idle:
                return
            each_step(n)
            self.step()
            if any(sequence.phase is Phase.RESTORING for sequence in self.scheduler._running):
                time.sleep(0.0005)  # blocks are still being read
        raise AssertionError("the scheduler does not come to an end")

    def answer_beside(self, prompt: Sequence[int], **options: object) -> Answer:
        """Run one prompt to its end while others go on."""
        stream = self.submit(prompt, **options)
        while not stream._ended:
            self.step()
        return collect(stream)

    def answer(self, prompt: Sequence[int], **options: object) -> Answer:
        """Run one prompt to its end."""
        stream = self.submit(prompt, **options)
        self.run()
        return collect(stream)


def truth(prompt: Sequence[int], max_tokens: int = 20) -> tuple[int, ...]:
    """Return the ids that a greedy answer must have (the end token is not told)."""
    tokens = list(prompt)
    for _ in range(max_tokens):
        token = next_token(tokens)
        if token == EOS:
            break
        tokens.append(token)
    return tuple(tokens[len(prompt) :])
