"""Tells when a worker's engine makes no progress: pure, times are given."""

from __future__ import annotations

from dataclasses import dataclass

from localllm.worker.board import BoardState

STEPS_ALLOWED = 10
MAX_ALLOWED_S = 3600.0
_N_TICKS = 8
_MAX_TICK_S = 1.0
_LEAST_LOAD_S = 5.0
_MAX_LOAD_S, _SLOWEST_BYTES_PER_S = 600.0, 5e6


def allowed_s(limit_s: float, expected_s: float | None) -> float:
    """Return how long a step may take: the larger of the limit and ten times what is expected of it."""
    wanted_s = STEPS_ALLOWED * (expected_s or 0.0)
    return max(limit_s, min(wanted_s, MAX_ALLOWED_S) if wanted_s > 0 else 0.0)


def is_overdue(board: BoardState, now_s: float, limit_s: float) -> bool:
    """Say whether a step is under way that takes too long."""
    return board.is_running and now_s - board.started_s > allowed_s(limit_s, board.expected_s)


@dataclass(frozen=True, slots=True)
class Sight:
    """What can be seen of a worker. `n_engine_frames`: frames about requests that the engine has.

    `is_engine_asked`: it has such requests, or a ping; `is_asked`: it has those, or some to prepare.
    """

    board: BoardState
    n_frames: int
    n_engine_frames: int
    is_engine_asked: bool
    is_asked: bool


class Watchdog:
    """Compares what is seen of one worker now with what was seen before.

    Within a step, its start counts. Between steps, an engine that was asked moves on or tells
    something; answers of other threads are no sign of it. Time in which nobody looked is forgiven:
    whoever watches was stopped itself.
    """

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self.tick_s = min(_MAX_TICK_S, limit_s / _N_TICKS)
        self._last: Sight | None = None
        self._looked_s = self._engine_moved_s = self._moved_s = self._forgiven_s = 0.0

    def begin(self, now_s: float) -> None:
        """Work was asked for where there was none: time counts from here."""
        self._last = None
        self._looked_s = self._engine_moved_s = self._moved_s = now_s

    def look(self, now_s: float, sight: Sight) -> bool:
        """Take in what is seen, and say whether the worker is stuck."""
        last, self._last = self._last, sight
        was_away = now_s - self._looked_s > 4 * self.tick_s + 1.0
        self._looked_s = now_s
        if was_away:
            self._forgiven_s = now_s
        if last is None or was_away or _step(sight) != _step(last) or sight.n_engine_frames != last.n_engine_frames:
            self._engine_moved_s = self._moved_s = now_s
        if last is not None and not last.is_engine_asked:
            self._engine_moved_s = now_s
        if last is not None and sight.n_frames != last.n_frames:
            self._moved_s = now_s
        if not sight.is_asked:
            return False
        if sight.board.is_running:
            board = sight.board
            return now_s - max(board.started_s, self._forgiven_s) > allowed_s(self.limit_s, board.expected_s)
        since_s = self._engine_moved_s if sight.is_engine_asked else self._moved_s
        return now_s - since_s > self.limit_s


class LoadWatch:
    """Tells when a load is stuck: no processor time was used for the limit, or it takes absurdly long."""

    def __init__(self, limit_s: float, size_bytes: int, now_s: float) -> None:
        self.tick_s = min(_MAX_TICK_S, limit_s / _N_TICKS)
        self._limit_s = max(limit_s, _LEAST_LOAD_S)
        self._end_s = now_s + _MAX_LOAD_S + size_bytes / _SLOWEST_BYTES_PER_S
        self._moved_s = now_s
        self._used_s: float | None = None

    def look(self, now_s: float, used_s: float | None) -> bool:
        """Take in the processor time used so far (None: not known), and say whether the load is stuck."""
        if used_s is None or used_s != self._used_s:
            self._moved_s = now_s
        self._used_s = used_s
        return now_s - self._moved_s > self._limit_s or now_s > self._end_s


def _step(sight: Sight) -> tuple[int, bool]:
    return sight.board.step, sight.board.is_running
