"""The step board: a small shared file where a worker says what its engine's thread is computing.

It is readable after the worker's death, however that came: the supervisor's watchdog, `/health` and
the poison rule look here. The state is written by turns into one of two halves, each with its number
and a checksum, so a write that was cut short leaves the state before it.
"""

from __future__ import annotations

import fcntl
import math
import mmap
import os
import struct
import sys
import tempfile
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

HALF_BYTES = 4096
MAX_NUMBERS = 500
"""The most request numbers a step is told with; there are never so many rows in one."""

_HEAD = struct.Struct("<IQQIIdd")  # checksum of what follows; turn, step, is_running, n_numbers, started_s, expected_s
_CHECKSUM = struct.Struct("<I")
_N_TRIES = 100  # a reader that meets two writes in a row looks again


@dataclass(frozen=True, slots=True)
class BoardState:
    """What the engine's thread is at: forward number `step`, under way or not.

    `started_s`: time.monotonic() when it began. `expected_s`: how long it should take, where known.
    `numbers`: the requests in it, while it is under way.
    """

    step: int = 0
    is_running: bool = False
    started_s: float = 0.0
    expected_s: float | None = None
    numbers: tuple[int, ...] = ()


class StepBoard:
    """One writer, any number of readers, in processes that hold the same file."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self._turn = 0
        self._state = BoardState()

    @classmethod
    def create(cls) -> tuple[StepBoard, int]:
        """Return an empty board and its file, to be inherited by the worker and closed by the caller."""
        fd = _shared_file(2 * HALF_BYTES)
        return cls.attach(fd), fd

    @classmethod
    def attach(cls, fd: int) -> StepBoard:
        """Return the board in an open file, which may be closed afterwards. Raises OSError, ValueError."""
        return cls(mmap.mmap(fd, 2 * HALF_BYTES))

    def began(self, numbers: Sequence[int], expected_s: float | None) -> None:
        """Write that the next step begins, for these requests."""
        told = tuple(numbers[:MAX_NUMBERS])
        self._write(BoardState(self._state.step + 1, True, time.monotonic(), expected_s, told))

    def ended(self) -> None:
        """Write that the step came back."""
        state = self._state
        self._write(BoardState(state.step, False, state.started_s, state.expected_s))

    def read(self) -> BoardState:
        """Return the newest state that was written whole."""
        for _ in range(_N_TRIES):
            halves = [half for half in (self._half(0), self._half(1)) if half is not None]
            if halves:
                return max(halves, key=lambda half: half[0])[1]
            time.sleep(0)
        return BoardState()  # nothing was ever written

    def close(self) -> None:
        """Let go of the memory."""
        self._memory.close()

    def _write(self, state: BoardState) -> None:
        self._turn += 1
        self._state = state
        expected_s = math.nan if state.expected_s is None else state.expected_s
        n_numbers = len(state.numbers)
        data = bytearray(_HEAD.size + 8 * n_numbers)
        _HEAD.pack_into(data, 0, 0, self._turn, state.step, state.is_running, n_numbers, state.started_s, expected_s)
        struct.pack_into(f"<{n_numbers}Q", data, _HEAD.size, *state.numbers)
        _CHECKSUM.pack_into(data, 0, _checksum(data))
        at = HALF_BYTES * (self._turn % 2)
        self._memory[at : at + len(data)] = bytes(data)

    def _half(self, index: int) -> tuple[int, BoardState] | None:
        """Return one half's turn and state; None for one that is empty or being written."""
        data = self._memory[HALF_BYTES * index : HALF_BYTES * (index + 1)]
        checksum, turn, step, is_running, n_numbers, started_s, expected_s = _HEAD.unpack_from(data)
        end = _HEAD.size + 8 * n_numbers
        if turn == 0 or n_numbers > MAX_NUMBERS or checksum != _checksum(data[:end]):
            return None
        numbers = struct.unpack_from(f"<{n_numbers}Q", data, _HEAD.size)
        known_s = None if math.isnan(expected_s) else expected_s
        return turn, BoardState(step, bool(is_running), started_s, known_s, numbers)


def _checksum(data: bytes | bytearray) -> int:
    return zlib.crc32(memoryview(data)[_CHECKSUM.size :])


def _shared_file(n_bytes: int) -> int:
    """Return an open file without a name that nobody can shrink (a reader would die of that, where it is possible)."""
    if sys.platform == "linux":
        fd = os.memfd_create("localllm-board", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, n_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    else:
        with tempfile.TemporaryFile() as file:
            file.truncate(n_bytes)
            fd = os.dup(file.fileno())
    return fd
