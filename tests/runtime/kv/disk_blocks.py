"""Blocks to write, and how to wait for the thread that writes them."""

from __future__ import annotations

import random
import time
from pathlib import Path

from localllm.runtime.config import TierConfig
from localllm.runtime.kv.blocks import MARK_BYTES, Block
from localllm.runtime.kv.disk import DiskTier

ROOT = bytes(16)
LONG_TOKENS = 2048


def block_of(number: int, parent: bytes = ROOT, start: int = 0, *, is_bare: bool = False) -> Block:
    """Return the same block for the same number."""
    rng = random.Random(number)
    return Block(rng.randbytes(16), parent, start, 64, rng.randbytes(64 * MARK_BYTES), is_bare)


def chain_of(number: int, n_blocks: int) -> list[Block]:
    """Return blocks that follow each other."""
    blocks, parent = list[Block](), ROOT
    for at in range(n_blocks):
        blocks.append(block_of(number * 1000 + at, parent, at * 64))
        parent = blocks[-1].key
    return blocks


def blob_of(block: Block, n_bytes: int = 4096) -> bytes:
    """Return the only right bytes of a block."""
    return random.Random(block.key).randbytes(n_bytes)


def tier(folder: Path, fingerprint: str = "engine", **settings: float | None) -> DiskTier:
    """Open a folder."""
    config = TierConfig(disk_dir=str(folder), **{"disk_bytes": 1 << 30, **settings})  # type: ignore[arg-type]
    return DiskTier(config, fingerprint=fingerprint, model_name="a model")


def write(disk: DiskTier, *blocks: Block, n_bytes: int = 4096, is_pinned: bool = False) -> None:
    """Write blocks, and wait until that is done."""
    for block in blocks:
        disk.write(
            block, blob_of(block, n_bytes), prefix_tokens=LONG_TOKENS, is_second_use=True, is_pinned=is_pinned, wait_s=5
        )
    settle(disk)


def settle(disk: DiskTier) -> None:
    """Wait until nothing waits to be written."""
    end_s = time.monotonic() + 10
    while disk.stats().waiting_bytes and time.monotonic() < end_s:
        time.sleep(0.002)
    assert not disk.stats().waiting_bytes


def files_in(folder: Path, pattern: str = "*.kv") -> list[Path]:
    """Return the files of that name below a folder."""
    return sorted(folder.rglob(pattern))
