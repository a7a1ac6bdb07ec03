"""Collects what is measured while it is measured, so that an interrupted run keeps what it has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from localllm.bench.engine.report import Report
from localllm.bench.engine.rows import Row
from localllm.bench.stats.summaries import Estimate


@dataclass(slots=True)
class Recorder:
    """Everything measured so far; one owner, the thread that measures.

    `on_progress(what, done, total)` hears of every repetition.
    """

    on_progress: Callable[[str, int, int], None] = lambda what, done, total: None
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    fingerprint: dict[str, Any] = field(default_factory=dict)
    method: Mapping[str, str] = field(default_factory=dict)
    bandwidth: Estimate | None = None
    help_s: Estimate | None = None

    def repeat(
        self, name: str, n_reps: int, measure_once: Callable[[], Any], row_of: Callable[[list[Any], bool], Row]
    ) -> None:
        """Measure `n_reps` times and keep the row that `row_of(samples, partial)` makes.

        An interruption keeps the repetitions there are as a partial row, and goes on.
        """
        samples: list[Any] = []
        try:
            for rep in range(n_reps):
                self.on_progress(name, rep, n_reps)
                samples.append(measure_once())
            self.on_progress(name, n_reps, n_reps)
        except BaseException:
            if samples:
                self.rows.append(row_of(samples, True))
            raise
        self.rows.append(row_of(samples, False))

    def report(self, *, partial: bool) -> Report:
        """Return what there is; `partial`: the measurement did not come to its end."""
        return Report(
            rows=tuple(self.rows),
            fingerprint=dict(self.fingerprint),
            bandwidth=self.bandwidth,
            help_s=self.help_s,
            partial=partial,
            notes=tuple(self.notes),
            method=dict(self.method),
        )
