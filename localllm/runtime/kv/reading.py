"""Reads blocks from disk on a thread of its own, some way ahead of the engine that takes them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence

from localllm.runtime.kv.blocks import Block, Key

_AHEAD_BYTES = 64 << 20  # read for one sequence and not yet taken


class Reading:
    """The blocks that one sequence waits for, in the order in which it takes them. Made by `Reader.begin`."""

    def __init__(self, blocks: Sequence[Block], changed: threading.Condition) -> None:
        self._changed = changed
        self._waiting = deque(blocks)
        self._known = {block.key for block in blocks}
        self._arrived: dict[Key, bytes | None] = {}
        self._held_bytes = 0
        self.is_stopped = False

    def take(self, block: Block) -> bytes | None:
        """Return a block's bytes, once; None = it is still to come. Raises: KeyError where it cannot be had."""
        with self._changed:
            if block.key in self._arrived:
                blob = self._arrived.pop(block.key)
                self._known.discard(block.key)
                if blob is None:
                    raise KeyError(block.key)
                self._held_bytes -= len(blob)
                self._changed.notify_all()
                return blob
            if self.is_stopped:
                raise KeyError(block.key)
            if block.key not in self._known:
                self._known.add(block.key)
                self._waiting.appendleft(block)
                self._changed.notify_all()
            return None

    def stop(self) -> None:
        """Read no more, and let go of what was read. Idempotent."""
        with self._changed:
            self.is_stopped = True
            self._waiting.clear()
            self._arrived.clear()
            self._held_bytes = 0

    def next(self) -> Block | None:
        """Return the block to read now; None = enough lies ready. Called under the condition."""
        return self._waiting.popleft() if self._waiting and self._held_bytes < _AHEAD_BYTES else None

    def arrived(self, block: Block, blob: bytes | None) -> None:
        """Lay bytes ready; None = there are none. Called under the condition."""
        if not self.is_stopped:
            self._arrived[block.key] = blob
            self._held_bytes += len(blob or b"")

    @property
    def is_done(self) -> bool:
        """Say whether nothing is left to read."""
        return self.is_stopped or not self._waiting


class Reader:
    """One thread that reads for all sequences, a block of each in turn. `wake` is called after each."""

    def __init__(self, read: Callable[[Block], bytes | None], wake: Callable[[], None]) -> None:
        self._read = read
        self._wake = wake
        self._changed = threading.Condition()
        self._readings: deque[Reading] = deque()
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def begin(self, blocks: Sequence[Block]) -> Reading:
        """Begin to read blocks in this order."""
        reading = Reading(blocks, self._changed)
        with self._changed:
            if self._is_closed:
                reading.is_stopped = True
                return reading
            self._readings.append(reading)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="localllm-kv-read", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        return reading

    def close(self) -> None:
        """End the thread; what is still waited for cannot be had. Idempotent."""
        with self._changed:
            self._is_closed = True
            readings, self._readings = list(self._readings), deque()
            self._changed.notify_all()
        for reading in readings:
            reading.stop()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                found = self._next()
                while found is None:
                    if self._is_closed:
                        return
                    self._changed.wait()
                    found = self._next()
            reading, block = found
            blob = self._read(block)
            with self._changed:
                reading.arrived(block, blob)
            self._wake()

    def _next(self) -> tuple[Reading, Block] | None:
        """Return the next block of the next reading that wants one; those that are done, or held up, give way."""
        for _ in range(len(self._readings)):
            reading = self._readings.popleft()
            if reading.is_stopped:
                continue
            self._readings.append(reading)
            block = reading.next()
            if block is not None:
                return reading, block
        return None
