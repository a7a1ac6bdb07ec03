"""What lies in the folder of the disk tier, for people: no model is loaded and no token known."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from localllm.runtime.kv.blocks import Block, Key
from localllm.runtime.kv.disk_about import read_about
from localllm.runtime.kv.disk_format import BadFile, read_header
from localllm.runtime.kv.disk_room import Deleted, delete_blocks, engine_folders, spent_today, survey


@dataclass(frozen=True, slots=True)
class KeptPrefix:
    """A beginning that lies on disk whole. `n_bytes`: with what it shares with others; `used_s`: Unix time."""

    model: str
    n_tokens: int
    n_bytes: int
    used_s: float
    is_pinned: bool


def total(folder: Path) -> dict[str, int]:
    """Return what lies in the folder: n_blocks, bytes, pinned_bytes; and written_today_bytes."""
    n_blocks = n_bytes = n_pinned = 0
    for _, size_bytes, _, is_pinned in survey(folder):
        n_blocks, n_bytes, n_pinned = n_blocks + 1, n_bytes + size_bytes, n_pinned + size_bytes * is_pinned
    return {
        "n_blocks": n_blocks,
        "bytes": n_bytes,
        "pinned_bytes": n_pinned,
        "written_today_bytes": spent_today(folder),
    }


def prefixes(folder: Path) -> list[KeptPrefix]:
    """Return every longest prefix in the folder, the last used first."""
    found: dict[Path, dict[Key, tuple[Block, int, float, bool]]] = {}
    for path, n_bytes, used_s, is_pinned in survey(folder):
        with contextlib.suppress(OSError, BadFile):
            block = read_header(path).block
            found.setdefault(path.parent.parent, {})[block.key] = (block, n_bytes, used_s, is_pinned)
    kept = []
    for engine, blocks in found.items():
        model = read_about(engine).get("model", "?")
        parents = {block.parent for block, *_ in blocks.values()}
        for key, (block, _, used_s, is_pinned) in blocks.items():
            n_bytes = _chain_bytes(blocks, key) if key not in parents else 0
            if n_bytes:
                kept.append(KeptPrefix(model, block.end, n_bytes, used_s, is_pinned))
    return sorted(kept, key=lambda one: -one.used_s)


def delete_all(folder: Path) -> Deleted:
    """Delete every block file, pinned ones too. Raises OSError where nobody can tell what lies there."""
    with contextlib.suppress(FileNotFoundError):
        os.listdir(folder)
    found = [delete_blocks(engine) for engine in engine_folders(folder)]
    sums = (sum(one.n_blocks for one in found), sum(one.n_bytes for one in found), sum(one.n_left for one in found))
    return Deleted(*sums)


def _chain_bytes(blocks: dict[Key, tuple[Block, int, float, bool]], key: Key) -> int:
    """Return the bytes of a block and all before it; 0 where one of those is missing, or ends elsewhere."""
    block, n_bytes, _, _ = blocks[key]
    while block.start:
        before, size_bytes, _, _ = blocks.get(block.parent, (None, 0, 0.0, False))
        if before is None or before.end != block.start:
            return 0
        block, n_bytes = before, n_bytes + size_bytes
    return n_bytes
