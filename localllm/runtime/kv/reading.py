"""Reads blocks from disk on a thread of its own, some way ahead of the engine that takes them."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence

from localllm.runtime.kv.blocks import Block, Key

logger = logging.getLogger("localllm.runtime.kv")

_AHEAD_BYTES = 64 << 20  # read for one sequence and not yet taken
_AT_WORK_BYTES = 16 << 20  # the same for one that the engine is taking from, however much others have
_LAST_READ_S = 1.0  # that closing waits for the read at work: a disk may hang


class Reading:
    """The blocks that one sequence will take, in that order. Made by `Reader.begin`; who lets go of it stops it."""

    def __init__(self, blocks: Sequence[Block], changed: threading.Condition) -> None:
        self._changed = changed
        self._order = deque(blocks)
        self._wanted = {block.key for block in blocks}
        self._arrived: dict[Key, bytes] = {}
        self._lost = set[Key]()
        self._awaited: Block | None = None
        self._is_stopped = False
        self.asked_s = 0.0  # when the engine first asked for what it still waits for (monotonic seconds)
        self.is_at_work = False  # the engine has begun to take
        self.held_bytes = 0

    def take(self, block: Block) -> bytes | None:
        """Return a block's bytes, once; None = it is still to come. Raises: KeyError where it cannot be had."""
        with self._changed:
            self.is_at_work = True
            blob = self._arrived.pop(block.key, None)
            if blob is None and (self._is_stopped or block.key in self._lost):
                raise KeyError(block.key)
            if blob is None:
                self._wanted.add(block.key)
                if self._awaited is None or self._awaited.key != block.key:
                    self._awaited, self.asked_s = block, time.monotonic()
            else:
                self.held_bytes -= len(blob)
                self._awaited = None
            self._changed.notify_all()
            return blob

    def skip(self, key: Key) -> None:
        """Let go of a block that was had otherwise."""
        with self._changed:
            self.held_bytes -= len(self._arrived.pop(key, b""))
            self._wanted.discard(key)
            self._changed.notify_all()

    def stop(self) -> None:
        """Read no more, and let go of what was read. Idempotent."""
        with self._changed:
            self._is_stopped = True
            self._order.clear()
            self._wanted.clear()
            self._arrived.clear()
            self._awaited, self.held_bytes = None, 0

    # --- for the reader, under the condition

    @property
    def awaited(self) -> Block | None:
        """The block that the engine asked for in vain."""
        return self._awaited

    def ahead(self, limit_bytes: int) -> Block | None:
        """Return the next block to read ahead; None = there is none, or so many bytes lie ready."""
        while self._order and self._order[0].key not in self._wanted:
            self._order.popleft()
        return self._order[0] if self._order and self.held_bytes < limit_bytes else None

    def missing(self, other: Reading) -> None:
        """Share what lies ready for another sequence."""
        for key in self._wanted & other._arrived.keys():
            self.arrived(key, other._arrived[key])

    def arrived(self, key: Key, blob: bytes | None) -> bool:
        """Take the bytes of a block, if it is wanted; None = there are none. Say whether the engine waits for it."""
        if key in self._wanted and blob is None:
            self._lose(key)
        elif key in self._wanted and blob is not None:
            self._arrived[key] = blob
            self.held_bytes += len(blob)
        return self.had(key)

    def had(self, key: Key) -> bool:
        """Take note that a block need not be read any more. Say whether the engine waits for it."""
        self._wanted.discard(key)
        was_awaited = self._awaited is not None and self._awaited.key == key
        if was_awaited:
            self._awaited = None
        return was_awaited

    def _lose(self, key: Key) -> None:
        """Give up a block that cannot be had, and what would follow it."""
        self._lost.add(key)
        start = next((block.start for block in self._order if block.key == key), None)
        for block in self._order:
            if start is not None and block.start > start:
                self._wanted.discard(block.key)


class Reader:
    """One thread that reads for all sequences: what was asked for in vain, in that order, else for those at work
    first, else for who came first.

    `read`: returns a block's bytes, None = it cannot be had. `is_held`: says that a block need not be read any
    more. `wake`: called when a block has come (or cannot) that the engine asked for in vain. `ahead_bytes`: read
    and not yet taken, of all sequences together; a little more for those at work.
    """

    def __init__(
        self,
        read: Callable[[Block], bytes | None],
        is_held: Callable[[Key], bool],
        wake: Callable[[], None],
        ahead_bytes: int,
    ) -> None:
        self._read = read
        self._is_held = is_held
        self._wake = wake
        self._ahead_bytes = ahead_bytes
        self._changed = threading.Condition()
        self._readings: list[weakref.ref[Reading]] = []
        self._chores = deque[Callable[[], None]]()
        self._read_s = 0.0  # when a read last came to its end (monotonic seconds)
        self._is_closed = False
        self._thread: threading.Thread | None = None

    @property
    def held_bytes(self) -> int:
        """What was read and not yet taken; what two sequences wait for counts twice."""
        with self._changed:
            return sum(reading.held_bytes for reading in self._alive())

    def begin(self, blocks: Sequence[Block]) -> Reading:
        """Begin to read blocks in this order."""
        reading = Reading(blocks, self._changed)
        with self._changed:
            is_closed = self._is_closed
            if not is_closed:
                for other in self._alive():
                    reading.missing(other)
                self._readings.append(weakref.ref(reading))
                self._start()
        if is_closed:
            reading.stop()
        return reading

    def waited_s(self, reading: Reading) -> float:
        """Return for how long the engine has waited for a block while nothing was read for anybody."""
        with self._changed:
            return 0.0 if reading.awaited is None else time.monotonic() - max(reading.asked_s, self._read_s)

    def later(self, chore: Callable[[], None]) -> None:
        """Have something done that touches the disk; before anything is read."""
        with self._changed:
            self._chores.append(chore)
            if not self._is_closed:
                self._start()

    def stop_all(self) -> None:
        """Let go of everything that was read and is to be read."""
        with self._changed:
            readings, self._readings = self._alive(), []
        for reading in readings:
            reading.stop()

    def close(self) -> None:
        """End the thread; what is still waited for cannot be had. Idempotent."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self.stop_all()
        if self._thread is not None:
            self._thread.join(_LAST_READ_S)

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="localllm-kv-read", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def _alive(self) -> list[Reading]:
        found = [reading for ref in self._readings if (reading := ref()) is not None]
        if len(found) < len(self._readings):
            self._readings = [weakref.ref(reading) for reading in found]
        return found

    def _run(self) -> None:
        while True:
            with self._changed:
                work = self._work()
                while work is None:
                    if self._is_closed:
                        return
                    self._changed.wait()
                    work = self._work()
            try:
                work()
            except Exception as error:  # whatever it is, what comes after must still be done
                logger.warning("what is kept on disk could not be asked for: %s", type(error).__name__)
            del work  # and with it the bytes that it read

    def _work(self) -> Callable[[], None] | None:
        """Return what to do now. Called under the condition."""
        if self._chores:
            return self._chores.popleft()
        block = None if self._is_closed else self._next()
        return None if block is None else lambda: self._fetch(block)

    def _fetch(self, block: Block) -> None:
        """Read a block for all who want it, unless it came here otherwise; whatever fails, none of them waits on."""
        blob, is_held = None, False
        try:
            is_held = self._is_held(block.key)
            blob = None if is_held else self._read(block)
        finally:
            with self._changed:
                readings, self._read_s = self._alive(), time.monotonic()
                waits = [r.had(block.key) if is_held else r.arrived(block.key, blob) for r in readings]
            if any(waits):
                self._wake()

    def _next(self) -> Block | None:
        """Return the block to read now."""
        readings = self._alive()
        awaiting = [reading for reading in readings if reading.awaited is not None]
        if awaiting:
            return min(awaiting, key=lambda reading: reading.asked_s).awaited
        is_full = sum(reading.held_bytes for reading in readings) >= self._ahead_bytes
        at_work = [reading for reading in readings if reading.is_at_work]
        others = [] if is_full else [reading for reading in readings if not reading.is_at_work]
        limit_bytes = _AT_WORK_BYTES if is_full else _AHEAD_BYTES
        ahead = (reading.ahead(limit_bytes) for reading in (*at_work, *others))
        return next((block for block in ahead if block is not None), None)
