"""Takes blocks out of the engine between its steps and gives them to the tiers."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace

from localllm.runtime.engine import Clear, CopyPrefix, Engine, Rewind
from localllm.runtime.kv.exports import ExportJob, Exports

logger = logging.getLogger("localllm.runtime.kv")


class Exporter:
    """Runs the jobs of `Exports` on an engine. The engine's thread alone calls it."""

    def __init__(self, engine: Engine, exports: Exports) -> None:
        self._engine = engine
        self._exports = exports
        self._ran_s = time.perf_counter()

    def run(self, *, is_idle: bool, is_quiet: bool, edited: frozenset[int], is_wanted: Callable[[], bool]) -> None:
        """Export what cannot wait, then as much as the time allows.

        `is_idle`: nobody runs or waits, so all may be exported until the thread `is_wanted`. `is_quiet`: nobody
        waits for a next token; else one block is all. Slots in `edited` have edits before them.
        """
        exports, now_s = self._exports, time.perf_counter()
        exports.budget.earn(now_s - self._ran_s)
        self._ran_s = now_s
        for job in exports.due(edited):
            self._keep(job)
        while is_idle or exports.budget.allows(debt=False):
            due = exports.next(edited, is_quiet=is_quiet)
            if due is None:
                return
            self._keep(due)
            if not is_quiet or (is_idle and is_wanted()):
                return

    def rescue(self) -> None:
        """Export what the edits that come next would lose."""
        failed = set[int]()
        for job in self._exports.take_rescued():
            if job.slot not in failed and not self._keep(job):
                failed.add(job.slot)  # what follows is of no use alone

    def _keep(self, job: ExportJob) -> bool:
        """Export one block; False = it failed, and is not kept."""
        started_s = time.perf_counter()
        try:
            blob = self._export(job)
        except Exception as error:
            logger.warning("a block was not kept: %s", type(error).__name__)
            blob = None
        elapsed_s = time.perf_counter() - started_s
        if blob is None:
            self._exports.failed(job, elapsed_s)
        else:
            self._exports.exported(job, blob, elapsed_s)
        return blob is not None

    def _export(self, job: ExportJob) -> bytes | None:
        """Return a block's bytes; None = there was no room for the copy that it is taken from."""
        if job.checkpoint is None:
            return self._engine.export(job.slot, job.block.start, job.block.end)
        back = Rewind(job.slot, job.checkpoint.blob, job.block.end)
        if job.is_last:
            (rewound,) = self._engine.edit((back,))
            return self._engine.export(job.slot, 0, job.block.end) if rewound.n_valid == job.block.end else None
        spare = self._engine.spec.n_slots - 1
        try:
            copied, rewound = self._engine.edit((CopyPrefix(job.slot, spare, job.n_held), replace(back, slot=spare)))
            is_right = copied.n_valid == job.n_held and rewound.n_valid == job.block.end
            return self._engine.export(spare, 0, job.block.end) if is_right else None
        finally:
            self._engine.edit((Clear(spare),))
