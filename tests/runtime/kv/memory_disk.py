"""A disk tier in memory: what lies there is written at once, and reading it can be held up or fail."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import cast

from localllm.runtime.kv.blocks import Block, Key
from localllm.runtime.kv.disk import DiskTier


class MemoryDisk:
    """The verbs of `DiskTier`. Two tiers that are given the same one share it."""

    secret = b"s" * 32

    def __init__(self) -> None:
        self.blocks: dict[Key, tuple[Block, bytes]] = {}
        self.version = 0
        self.n_reads = 0
        self.reads: list[Key] = []
        self.writes: list[tuple[Key, bool, bool]] = []  # key, second use, pinned
        self.touched: list[Key] = []
        self.aside: list[Key] = []
        self.threads: set[str] = set()  # that would have touched a file
        self.may_read = threading.Event()
        self.may_read.set()
        self.may_list = threading.Event()
        self.may_list.set()
        self.takes: Callable[[Block, bool], bool] = lambda block, is_second_use: True
        self.fail: Callable[[Block], bool] = lambda block: False
        self.is_closed = False

    @property
    def as_tier(self) -> DiskTier:
        return cast(DiskTier, self)

    def children(self, parent: Key) -> Sequence[Block]:
        self.threads.add(threading.current_thread().name)
        assert self.may_list.wait(10)
        return [block for block, _ in list(self.blocks.values()) if block.parent == parent]

    def find(self, parent: Key, key: Key) -> Block | None:
        self.threads.add(threading.current_thread().name)
        block = self.known(key)
        return block if block is not None and block.parent == parent else None

    def known(self, key: Key) -> Block | None:
        found = self.blocks.get(key)
        return None if found is None else found[0]

    def holds(self, key: Key) -> bool:
        return key in self.blocks

    def read(self, block: Block) -> bytes | None:
        self.threads.add(threading.current_thread().name)
        assert self.may_read.wait(10)
        self.n_reads += 1
        self.reads.append(block.key)
        found = self.blocks.get(block.key)
        if self.fail(block):
            raise RuntimeError("no disk should do this")
        if found is None:
            return None
        return found[1]

    def write(
        self,
        block: Block,
        blob: bytes,
        *,
        prefix_tokens: int,
        is_second_use: bool,
        is_pinned: bool = False,
        is_shared: bool = False,
        wait_s: float = 0.0,
    ) -> bool:
        if self.is_closed or not self.takes(block, is_second_use):
            return False
        self.writes.append((block.key, is_second_use, is_pinned))
        self.blocks.setdefault(block.key, (block, blob))
        self.version += 1
        return True

    def unshare(self, keys: Sequence[Key]) -> None:
        return None

    def has_written(self, key: Key) -> bool:
        return self.holds(key)

    def used(self, keys: Sequence[Key]) -> None:
        self.touched.extend(keys)

    def used_s(self, key: Key) -> float | None:
        self.threads.add(threading.current_thread().name)
        return 1.0 if key in self.blocks else None

    def set_aside(self, key: Key) -> None:
        self.threads.add(threading.current_thread().name)
        self.aside.append(key)
        self.lose(key)

    def distrust(self, keys: Sequence[Key]) -> None:
        return None

    def lose(self, key: Key) -> None:
        """Have a file be gone."""
        self.blocks.pop(key, None)
        self.version += 1

    def clear(self) -> tuple[int, int]:
        self.threads.add(threading.current_thread().name)
        n_files = len(self.blocks)
        self.blocks.clear()
        self.version += 1
        return n_files, 0

    def stats(self) -> None:
        return None

    def close(self, *, flush_s: float) -> None:
        self.is_closed = True
