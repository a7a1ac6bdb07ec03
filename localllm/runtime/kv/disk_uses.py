"""When blocks on disk were last used, as it is written down: in the times of their files, soon and together."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterable

from localllm.runtime.kv.blocks import Block, Key
from localllm.runtime.kv.disk_index import DiskIndex

WRITE_DOWN_EVERY_S = 1.0
"""What was used is written down at most so often."""

_CHAIN_GRAIN_S = 1e-6  # a token's share of a file's time: the front of a sequence counts as used later than its end


class Uses:
    """The uses of blocks that are not written down yet. Thread safe; the disk is touched by `write_down` alone."""

    def __init__(self, index: DiskIndex) -> None:
        self._index = index
        self._lock = threading.Lock()
        self._used: dict[Key, float] = {}
        self._written_s = 0.0

    def __len__(self) -> int:
        return len(self._used)

    @property
    def is_due(self) -> bool:
        """Say whether it is time to write something down."""
        return bool(self._used) and time.monotonic() - self._written_s >= WRITE_DOWN_EVERY_S

    def add(self, keys: Iterable[Key], now_s: float) -> None:
        """Take note that blocks are used now (Unix seconds)."""
        with self._lock:
            self._used.update(dict.fromkeys(keys, now_s))

    def add_unless_later(self, key: Key, used_s: float) -> None:
        """Take note that a block was used, unless a use of it is known that is not written down."""
        with self._lock:
            self._used.setdefault(key, used_s)

    def write_down_due(self) -> None:
        """Write down what was used, where that is due."""
        if self.is_due:
            self._written_s = time.monotonic()
            self.write_down()

    def write_down(self) -> None:
        """Write down when blocks were used: they, and all that comes before them."""
        with self._lock:
            used, self._used = self._used, {}
        times = dict[Key, float]()
        for key, now_s in sorted(used.items(), key=lambda item: -item[1]):
            found = self._index.get(key)
            while found is not None and found.block.key not in times:
                times[found.block.key] = now_s
                used_s = file_time(found.block, now_s)
                with contextlib.suppress(OSError):
                    os.utime(found.path, (used_s, used_s), follow_symlinks=False)
                found = self._index.get(found.block.parent)


def file_time(block: Block, used_s: float) -> float:
    """Return the time that the file of a block gets which was used then (Unix seconds)."""
    return used_s - block.start * _CHAIN_GRAIN_S
