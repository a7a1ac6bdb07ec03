"""What lies in the folder of the disk tier, for people: no model is loaded and no token known."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

from localllm.models.disk import files
from localllm.runtime.kv.blocks import Block, Key
from localllm.runtime.kv.disk_format import BadFile, read_header
from localllm.runtime.kv.disk_room import Deleted, delete_blocks, engine_folders, spent_today, survey

_ABOUT_BYTES = 1 << 16


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
        model = _model(engine / "about.json")
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
    """Return the bytes of a block and all before it; 0 where one of those is missing."""
    n_bytes = 0
    while key in blocks:
        block, size_bytes, _, _ = blocks[key]
        n_bytes += size_bytes
        if block.start == 0:
            return n_bytes
        key = block.parent
    return 0


def _model(path: Path) -> str:
    try:
        return str(json.loads(files.read_bounded(path, _ABOUT_BYTES))["model"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return "?"
