"""What a step costs on this machine: learned from the steps that ran, asked before the next.

A step's time is kept per bucket of rows (powers of two) and of used cells (multiples of 4 096),
as the median of the newest samples, so one disturbed step decides nothing.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable

_SAMPLES = 9
_CELLS_PER_BUCKET = 4096
_SHARE_PER_CELL = 0.02 / 512  # of a step's time, that a foreign cell costs on a CPU (between decode and prefill)
_MOST_CHEAPER = 16  # times, that a foreign cell may be found to cost less
_DEARER = 1.75  # times a smaller bucket's row, that a row may cost
_LEAST_RESTORES = 3  # before they may tell that putting back does not pay
_CHEAPER = 8  # times, that a token is put back sooner than it is computed, as far as is not known better
_PROBE_S = 60.0  # after which putting back is tried again although it did not pay


class StepCost:
    """Online table of step times. Estimates are in seconds; None = nothing known yet."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._samples: dict[tuple[int, int], deque[float]] = {}
        self._restores: deque[float] = deque(maxlen=_SAMPLES)  # seconds a token
        self._restored_s = 0.0  # when, the last time

    def observe(self, n_rows: int, used_cells: int, elapsed_s: float) -> None:
        """Learn from one step of `n_rows` rows (its time is kept per row)."""
        key = (_row_bucket(n_rows), used_cells // _CELLS_PER_BUCKET)
        self._samples.setdefault(key, deque(maxlen=_SAMPLES)).append(elapsed_s / n_rows)

    def estimate_s(self, n_rows: int, used_cells: int) -> float | None:
        """Return the expected time of a step, from the nearest bucket that has samples.

        A bucket of fewer rows overestimates (rows get cheaper together), so a guess is cautious; for
        nearly the same reason no bucket costs much more a row than a smaller one, so a disturbed one is
        seen through (nearly: on CPUs 32 rows cost half as much again a row as 8).
        """
        if not self._samples:
            return None
        rows, cells = _row_bucket(n_rows), used_cells // _CELLS_PER_BUCKET
        nearest = min(self._samples, key=lambda key: (abs(key[0] - rows), abs(key[1] - cells)))
        smaller = (key for key in self._samples if key[0] < nearest[0] and key[1] == nearest[1])
        per_row_s = min([_median(self._samples[nearest]), *(_DEARER * _median(self._samples[key]) for key in smaller)])
        return per_row_s * (1 << nearest[0] if nearest[0] > rows else n_rows)

    def rows_within(self, target_s: float, used_cells: int, cap_rows: int, first_guess: int) -> int:
        """Return the largest number of rows (a power of two, or `cap_rows`) expected within `target_s`."""
        if not self._samples:
            return min(cap_rows, first_guess)
        rows = cap_rows
        while rows > 1 and (self.estimate_s(rows, used_cells) or 0.0) > target_s:
            rows = 1 << ((rows - 1).bit_length() - 1)  # the next power of two below
        return rows

    def observe_restore(self, n_tokens: int, elapsed_s: float) -> None:
        """Learn from putting `n_tokens` back from a tier."""
        self._restores.append(elapsed_s / n_tokens)
        self._restored_s = self._clock()

    def restore_s(self, n_tokens: int) -> float | None:
        """Return the expected time of putting `n_tokens` back; None = nothing known yet."""
        return _median(self._restores) * n_tokens if self._restores else None

    def restore_pays(self, n_put: int, n_saved: int, used_cells: int) -> bool:
        """Say whether putting `n_put` tokens back beats computing `n_saved`, by the fast ones of the newest restores.

        What is not done teaches nothing. So while little is known of this machine, and again now and then, it is
        done unless far more is put back than saved.
        """
        compute_s = self.estimate_s(n_saved, used_cells)
        if compute_s is not None and len(self._restores) >= _LEAST_RESTORES:
            if sorted(self._restores)[(len(self._restores) - 1) // 4] * n_put < compute_s:
                return True
            if self._clock() - self._restored_s < _PROBE_S:
                return False
        return n_put <= _CHEAPER * n_saved

    def cells_within(self, share: float) -> int:
        """Return how many cells that no row needs may lie in the cache, at a cost of `share` of a step's time.

        A figure from CPUs at large, moved only as far as this machine's own steps clearly speak against it.
        """
        spans = [self._share_per_cell(rows) for rows in {rows for rows, _ in self._samples}]
        low = max((span[0] for span in spans if span), default=0.0)
        high = max((span[1] for span in spans if span), default=_SHARE_PER_CELL)
        return int(share / max(low, min(high, _SHARE_PER_CELL), _SHARE_PER_CELL / _MOST_CHEAPER))

    def _share_per_cell(self, rows: int) -> tuple[float, float] | None:
        """Return the least and the most that a cell may cost of a step of so many rows; None = nothing to tell by.

        Told by the steps with the fewest and with the most used cells: by the slow quarter of one kind against
        the fast quarter of the other, so that a machine which drifts says little, and nothing that is wrong.
        """
        full = {cells: sorted(s) for (r, cells), s in self._samples.items() if r == rows and len(s) == _SAMPLES}
        if len(full) < 2:
            return None
        few, many, at = full[min(full)], full[max(full)], _SAMPLES // 4
        if not (few[at] > 0 and many[-1 - at] < float("inf")):
            return None
        n_cells = (max(full) - min(full)) * _CELLS_PER_BUCKET
        return (many[at] / few[-1 - at] - 1) / n_cells, (many[-1 - at] / few[at] - 1) / n_cells

    def lone_row_share(self, n_rows: int, used_cells: int) -> float | None:
        """Return the time of a one-row step as a share of computing `n_rows` rows at once."""
        alone = self._samples.get((0, used_cells // _CELLS_PER_BUCKET))
        together_s = self.estimate_s(n_rows, used_cells)
        return _median(alone) / together_s if alone and together_s else None


def _row_bucket(n_rows: int) -> int:
    """Return the power of two at or below `n_rows`."""
    return n_rows.bit_length() - 1


def _median(samples: Iterable[float]) -> float:
    """Return the upper median (`statistics` costs a start 10 ms of imports)."""
    ordered = sorted(samples)
    return ordered[len(ordered) // 2]
