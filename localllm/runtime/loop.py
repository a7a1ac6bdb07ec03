"""The engine's thread: one step after another, asleep while there is nothing to do.

Liveness: every accepted request gets exactly one terminal event. A step that raises fails the
requests in it; a loop that dies fails all of them and says so (`is_alive`).
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from localllm.errors import EngineError, LocalLLMError, Unavailable
from localllm.runtime.cost import StepCost
from localllm.runtime.draft.base import Draft, Drafter
from localllm.runtime.draft.off import Off
from localllm.runtime.engine import EditResult, Engine, NoRoom, Restore, StepOutput
from localllm.runtime.events import TokenLogprob
from localllm.runtime.hooks import NO_WATCH, StepWatch
from localllm.runtime.inbox import Cancel, Close, Inbox, Message, Ping, Submit, TierReady
from localllm.runtime.kv.exporter import Exporter
from localllm.runtime.logprobs import logprobs
from localllm.runtime.plan import PlannedItem, StepPlan
from localllm.runtime.scheduler import Scheduler
from localllm.runtime.sequence import Phase, RequestRun, Sequence

logger = logging.getLogger("localllm.runtime")
T = TypeVar("T")
_LAST_EXPORTS_S = 1.0
_STUCK_WAIT_S = 0.05  # between plans that came out empty although someone waits


class EngineLoop:
    """Owns the engine. Everyone else sends messages to `inbox`."""

    def __init__(
        self,
        engine: Engine,
        scheduler: Scheduler,
        cost: StepCost,
        drafter: Drafter | None = None,
        watch: StepWatch = NO_WATCH,
    ) -> None:
        self.inbox = Inbox()
        self.engine = engine
        self.scheduler = scheduler
        self.cost = cost
        self.drafter: Drafter = drafter or Off()
        self.watch = watch
        self.death: LocalLLMError | None = None
        self._closing = False
        self._wait_s: float | None = None
        self._exporter = Exporter(engine, scheduler.exports)
        self._thread = threading.Thread(target=self._run, name="localllm-engine", daemon=True)

    @property
    def is_alive(self) -> bool:
        """Say whether submitted work will be done."""
        return self._thread.is_alive() and not self._closing and self.death is None

    def start(self) -> None:
        """Begin to work, until `close` or the end of the process."""
        self._thread.start()
        atexit.register(self.close)  # else the process takes its memory down under a forward, and crashes

    def wait_ended(self) -> None:
        """Wait until the thread has ended."""
        self._thread.join()

    def close(self) -> None:
        """End the loop and free the engine; requests at work fail. Idempotent, waits for the step at work."""
        self.inbox.put(Close())
        self._thread.join()
        atexit.unregister(self.close)

    def step(self) -> None:
        """Run one engine step: messages, draft, plan, edit, forward, accept and commit, checkpoint, exports."""
        for message in self.inbox.receive(self._wait_s):
            self._apply(message)
        plan, started_s = None, time.perf_counter()
        try:
            plan = self.scheduler.plan(self._drafts())  # pure Python; all reservation happens here
            if plan is not None:
                with self._watched(plan.runs, self._expected_s(plan)):
                    plan = self.scheduler.settle(plan, self._edit(plan))
                    output = self._forward(plan)
                self._commit(plan, output)
        except NoRoom:
            assert plan is not None
            self.scheduler.shrink(plan)  # the no-room table
        except Exception as error:
            if plan is None:
                raise
            self.scheduler.fail(plan, _engine_error(error))  # these requests only; their slots are cleared
        embedded = self._embed(time.perf_counter() - started_s)
        self._ask_drafter(self._forget_ended, None)
        self._export()
        if self.scheduler.is_idle:
            edits_wait_s = _STUCK_WAIT_S if self.scheduler.edited_slots else None  # what ended last is told too
            self._wait_s = 0 if self.scheduler.exports.has_work else edits_wait_s
        else:
            self._wait_s = 0 if plan is not None or embedded else _STUCK_WAIT_S

    def _apply(self, message: Message) -> None:
        match message:
            case Submit(run) if self._closing:
                self.scheduler.submit(run)
                self.scheduler.fail_request(run, Unavailable("The model is being closed."))
            case Submit(run):
                self.scheduler.submit(run)
            case Cancel(sink):
                self.scheduler.cancel(sink)
            case Ping(callback):
                if self.death is None:
                    callback()
            case TierReady():
                pass  # it has woken the loop
            case Close():
                self._closing = True
                self.scheduler.fail_all(Unavailable("The model was closed before the answer was complete."))

    def _drafts(self) -> Mapping[Sequence, Draft]:
        decoding, budget = self.scheduler.decoding, self.scheduler.spec.max_batch_tokens
        drafts = self._ask_drafter(lambda: self.drafter.propose(decoding, budget), list[Draft]())
        return dict(zip(decoding, drafts, strict=False))

    def _forget_ended(self) -> None:
        for sequence in self.scheduler.take_ended():
            self.drafter.forget(sequence)

    def _ask_drafter(self, ask: Callable[[], T], otherwise: T) -> T:
        """Return what the drafter says; one that fails is switched off, the requests go on."""
        try:
            return ask()
        except Exception as error:
            logger.warning("drafting is switched off: %s", type(error).__name__)
            self.drafter = Off()
            return otherwise

    @contextlib.contextmanager
    def _watched(self, runs: tuple[RequestRun, ...], expected_s: float | None) -> Iterator[None]:
        """Tell the watch whose step is in native code, and for how long it should be."""
        self.watch.began(runs, expected_s)
        try:
            yield
        finally:
            self.watch.ended()

    def _expected_s(self, plan: StepPlan) -> float | None:
        return self.cost.estimate_s(plan.batch.n_rows, self.scheduler.stats.used_cells) if plan.items else None

    def _embed(self, spent_s: float) -> bool:
        """Run a chunk of a text to embed, after a step that took `spent_s`; False = there is none."""
        planned = self.scheduler.plan_embedding(spent_s)
        if planned is None:
            return False
        started_s = time.perf_counter()
        try:
            with self._watched((planned.run,), planned.expected_s):
                vector = self.engine.embed(planned.chunk)
            self.scheduler.embedded(planned, vector, time.perf_counter() - started_s)
        except NoRoom:
            self.scheduler.defer_embedding(planned)
        except Exception as error:
            self.scheduler.fail_request(planned.run, _engine_error(error))
        return True

    def _export(self) -> None:
        """Give the tiers what slots hold and they lack, as far as nobody waits for it."""
        scheduler = self.scheduler
        if scheduler.may_export:
            self._exporter.run(
                is_idle=scheduler.is_idle,
                is_quiet=scheduler.is_quiet,
                edited=scheduler.edited_slots,
                is_wanted=lambda: self.inbox.has_messages,
            )

    def _edit(self, plan: StepPlan) -> list[EditResult]:
        """Keep what the plan's edits would lose, then apply them; learn what putting back costs."""
        self._exporter.rescue()
        started_s = time.perf_counter()
        results = self.engine.edit(plan.edits)
        put_back = [r.n_valid - e.start for e, r in zip(plan.edits, results, strict=True) if isinstance(e, Restore)]
        if put_back:
            elapsed_s = time.perf_counter() - started_s
            self._observe_restores([n_tokens for n_tokens in put_back if n_tokens > 0], elapsed_s)
            for run in {id(s.run): s.run for s in plan.restoring}.values():
                run.timeline.add("restore", elapsed_s)
        return results

    def _observe_restores(self, n_tokens: list[int], elapsed_s: float) -> None:
        """Learn what it takes to put blocks of so many tokens back."""
        self.scheduler.stats.n_restored_blocks += len(n_tokens)
        self.scheduler.stats.restore_s += elapsed_s
        if n_tokens:
            self.cost.observe_restore(sum(n_tokens), elapsed_s)

    def _forward(self, plan: StepPlan) -> StepOutput | None:
        """Run the rows and learn what they cost; None = the plan had only edits."""
        if not plan.items:
            return None
        started_s = time.perf_counter()
        output = self.engine.forward(plan.batch)
        self.cost.observe(plan.batch.n_rows, self.scheduler.stats.used_cells, time.perf_counter() - started_s)
        return output

    def _commit(self, plan: StepPlan, output: StepOutput | None) -> None:
        """Give each item its rows of logits, [n_logits, n_vocab]; keep the checkpoints that were planned."""
        row = 0
        for planned in plan.items if output is not None else ():
            assert output is not None
            logits = output.logits[row : row + planned.item.n_logits]
            row += planned.item.n_logits
            try:
                n_taken = self._accept(planned, logits) if planned.item.n_logits else 0
            except LocalLLMError as error:
                self.scheduler.fail_request(planned.sequence.run, error)
                continue
            if planned.sequence.slot is not None:  # else an earlier choice of its request failed
                self.scheduler.commit(planned, n_taken, output.first_held.get(planned.item.slot, 0))
            if planned.takes_checkpoint:
                self.scheduler.checkpointed(planned.sequence, self.engine.checkpoint(planned.item.slot))
        self.scheduler.stepped(plan)

    def _accept(self, planned: PlannedItem, logits: NDArray[np.float32]) -> int:
        """Sample, or verify a draft; return how many tokens the sequence took."""
        sequence, started_s = planned.sequence, time.perf_counter()
        ids = sequence.sampler.accept(logits, planned.draft, position=sequence.n_generated, context=sequence.tokens)
        n_top, told = sequence.n_logprobs, list[TokenLogprob]()
        if n_top is not None:
            told = [logprobs(row, token, n_top, self.engine.tokenizer) for row, token in zip(logits, ids, strict=False)]
        n_taken = sequence.take(ids, told)
        timeline = sequence.run.timeline
        timeline.add("sample", time.perf_counter() - started_s)
        if timeline.first_token_s is None:
            timeline.first_token_s = time.monotonic()
        if sequence.phase is not Phase.FINISHED:
            self._ask_drafter(lambda: self.drafter.accepted(sequence, ids), None)
        return n_taken

    def _run(self) -> None:
        """Step until closed; whatever escapes a step ends every request, and the engine is freed."""
        try:
            while not self._closing:
                self.step()
        except BaseException as error:  # whatever it is, nobody may be left waiting
            _log("the engine's thread died", error)
            self.death = _engine_error(error)
            self.scheduler.tell_all(self.death)
        self._closing = True
        for message in self.inbox.receive(0):
            self._apply(message)
        self._close_tiers()
        try:
            self.engine.close()
        except Exception as error:
            _log("the engine could not be freed", error)

    def _close_tiers(self) -> None:
        """Keep what slots hold, as far as that is quick, and let the disk tier write what it may."""
        try:
            if self.death is None and self.scheduler.tiers.disk is not None:
                end_s = time.monotonic() + _LAST_EXPORTS_S
                self._exporter.rescue()
                self.engine.edit(self.scheduler.take_edits())
                self._exporter.run(
                    is_idle=True, is_quiet=True, edited=frozenset(), is_wanted=lambda: time.monotonic() > end_s
                )
            self.scheduler.tiers.close()
        except Exception as error:
            _log("the tiers could not be closed", error)


def _log(what: str, error: BaseException) -> None:
    """Say what failed and where, without the error's own text: that might quote a prompt."""
    logger.error("%s: %s\n%s", what, type(error).__name__, "".join(traceback.format_tb(error.__traceback__)))


def _engine_error(error: BaseException) -> EngineError:
    """Return the failure as requests are told it: no text of theirs can be in it."""
    return error if isinstance(error, EngineError) else EngineError(f"A step failed ({type(error).__name__}).")
