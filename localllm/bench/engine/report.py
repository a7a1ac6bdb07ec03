"""Everything that one benchmark measured, and the figures that are looked for first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from localllm.bench.engine.rows import Row
from localllm.bench.stats.summaries import Estimate


@dataclass(frozen=True, slots=True)
class Report:
    """Everything one run measured, or as much of it as there was time for (`partial`).

    `bandwidth`: bytes of memory read a second, None where it was not measured. `method`: how each
    kind of number was taken, in a sentence. `notes`: what was left out, and why.
    """

    rows: tuple[Row, ...]
    fingerprint: Mapping[str, Any]
    bandwidth: Estimate | None = None
    help_s: Estimate | None = None
    partial: bool = False
    notes: tuple[str, ...] = ()
    method: Mapping[str, str] = field(default_factory=dict)

    def summary(self) -> dict[str, Any]:
        """Return the figures that a script looks for first; None where they were not measured."""
        single = self._first("overhead_ratio", n_parallel=1)
        several = self._several()
        begun = self._first("start_ratio", n_parallel=1)
        above = begun.get("peak_rss_bytes"), begun.get("bare_peak_rss_bytes")
        return {
            "overhead_ratio": single.get("overhead_ratio"),
            "overhead_ratio_low": single.get("overhead_ratio_low"),
            "overhead_ratio_high": single.get("overhead_ratio_high"),
            "overhead_ratio_parallel": several.get("overhead_ratio"),
            "overhead_ratio_parallel_low": several.get("overhead_ratio_low"),
            "overhead_ratio_parallel_high": several.get("overhead_ratio_high"),
            "start_ratio": begun.get("start_ratio"),
            "start_ratio_low": begun.get("start_ratio_low"),
            "start_ratio_high": begun.get("start_ratio_high"),
            "peak_rss_over_bare_bytes": above[0] - above[1] if above[0] and above[1] else None,
        }

    def _first(self, name: str, *, n_parallel: int) -> dict[str, Any]:
        found = (row.flat() for row in self.rows if name in row.extras and row.case.n_parallel == n_parallel)
        return next(found, {})

    def _several(self) -> dict[str, Any]:
        found = (row.flat() for row in self.rows if "overhead_ratio" in row.extras and row.case.n_parallel > 1)
        return next(found, {})
