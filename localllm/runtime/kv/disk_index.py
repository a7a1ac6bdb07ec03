"""Which blocks lie in a folder: read when asked, a small part at a time, and again when that part has changed.

The children of one parent lie in one of 256 sub-folders, so that finding what follows a block looks at one
of them only; files that another process wrote there are seen because the sub-folder's time has changed.
"""

from __future__ import annotations

import contextlib
import os
import stat
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from localllm.models.disk import files
from localllm.runtime.kv.blocks import Block, Key
from localllm.runtime.kv.disk_format import PINNED_SUFFIX, SUFFIX, BadFile, NewerFile, read_header
from localllm.runtime.kv.disk_names import file_kind

_UNSETTLED_S = 1.0  # a folder that changed so short a while ago may change again within its clock's grain


@dataclass(frozen=True, slots=True)
class Found:
    """A block that lies on disk."""

    block: Block
    path: Path
    n_bytes: int
    prefix_tokens: int

    @property
    def is_pinned(self) -> bool:
        """Say whether it stays until all is cleared."""
        return self.path.name.endswith(PINNED_SUFFIX)


class _Part:
    """One sub-folder as it was when it was last read."""

    def __init__(self) -> None:
        self.changed_ns = -1
        self.found: dict[str, Found] = {}
        self.by_parent: dict[Key, dict[Key, Found]] = {}

    def add(self, name: str, found: Found) -> None:
        self.found[name] = found
        self.by_parent.setdefault(found.block.parent, {})[found.block.key] = found

    def drop(self, name: str) -> Found | None:
        found = self.found.pop(name, None)
        if found is not None:
            siblings = self.by_parent.get(found.block.parent, {})
            if siblings.get(found.block.key) is found:
                del siblings[found.block.key]
        return found


class DiskIndex:
    """The blocks of one engine's folder. Thread safe."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._parts: dict[int, _Part] = {}
        self._known: dict[Key, Found] = {}
        self.n_bad = 0
        self.version = 0  # changes with what is known

    def place(self, block: Block, *, is_pinned: bool) -> Path:
        """Return where a block's file belongs."""
        suffix = PINNED_SUFFIX if is_pinned else SUFFIX
        return self._folder / f"{block.parent[0]:02x}" / f"{block.key.hex()}{suffix}"

    def children(self, parent: Key) -> list[Found]:
        """Return what follows a block, as it is on disk now."""
        with self._lock:
            found = self._fresh(parent[0]).by_parent.get(parent, {})
            if not found.keys() <= self._known.keys():  # not trusted any more, and looked for again
                self._known.update(found)
                self.version += 1
            return list(found.values())

    def find(self, parent: Key, key: Key) -> Found | None:
        """Return one block that follows `parent`; no file but its own is looked at, where it was not seen before."""
        found = self._known.get(key)
        if found is not None:
            if os.path.lexists(found.path):
                return found
            self.drop(key)
        folder = self._folder / f"{parent[0]:02x}"
        if not files.is_folder(folder):
            return None
        for suffix in (SUFFIX, PINNED_SUFFIX):
            name = f"{key.hex()}{suffix}"
            found = self._look_at(folder / name, parent[0])
            if found is not None:
                self.add(found)
                return found
        return None

    def get(self, key: Key) -> Found | None:
        """Return a block that was seen, without asking the disk."""
        return self._known.get(key)

    def add(self, found: Found) -> None:
        """Take note of a file that was just written."""
        with self._lock:
            part = self._parts.setdefault(found.block.parent[0], _Part())
            part.add(found.path.name, found)
            self._known[found.block.key] = found
            self.version += 1

    def drop(self, key: Key) -> None:
        """Forget a file that is gone, and those that follow it, until somebody looks for them. Idempotent.

        Whoever computes what is gone computes what follows, and that is to be kept anew as well: it may be no better.
        """
        with self._lock:
            found = self._known.pop(key, None)
            if found is not None:
                self._parts[found.block.parent[0]].drop(found.path.name)
                self.distrust(self._followers(key))

    def distrust(self, keys: Iterable[Key]) -> None:
        """Know nothing of files until somebody looks for them. Without the lock, which a hanging disk may hold."""
        for key in keys:
            self._known.pop(key, None)
        self.version += 1

    def _followers(self, key: Key) -> list[Key]:
        """Return the known blocks that are of no use without one. Called under the lock."""
        found, n_followed = [key], 0
        while n_followed < len(found):
            parent = found[n_followed]
            part = self._parts.get(parent[0])
            found += [] if part is None else [one for one in part.by_parent.get(parent, {}) if one in self._known]
            n_followed += 1
        return found[1:]

    def refresh(self) -> None:
        """Forget what is gone, and see what others wrote, in those sub-folders that were looked into."""
        for first in tuple(self._parts):
            with self._lock:
                self._fresh(first)

    def forget_all(self) -> None:
        """Forget every file; they will be looked at anew."""
        with self._lock:
            self._parts.clear()
            self._known.clear()
            self.version += 1

    def _fresh(self, first: int) -> _Part:
        """Return a sub-folder's files, read again where they have changed. Called under the lock."""
        part = self._parts.setdefault(first, _Part())
        folder = self._folder / f"{first:02x}"
        changed_ns = _changed_ns(folder)
        if changed_ns == part.changed_ns:
            return part
        names = block_names(folder) if changed_ns else {}
        self.version += 1
        for name in part.found.keys() - names.keys():
            lost = part.drop(name)
            if lost is not None and self._known.get(lost.block.key) is lost:
                del self._known[lost.block.key]
        for name in names.keys() - part.found.keys():
            found = self._look_at(folder / name, first)
            if found is not None:
                part.add(name, found)
                self._known[found.block.key] = found
        part.changed_ns = changed_ns if time.time() - changed_ns / 1e9 > _UNSETTLED_S else -1
        return part

    def _look_at(self, path: Path, first: int) -> Found | None:
        try:
            header = read_header(path)
            if header.block.parent[0] != first or not path.name.startswith(header.block.key.hex() + "."):
                raise BadFile("not under its own name")
        except NewerFile:
            return None
        except BadFile:
            self.n_bad += 1
            files.set_aside(path)
            return None
        except OSError:
            return None
        return Found(header.block, path, header.file_bytes, header.prefix_tokens)


def _changed_ns(folder: Path) -> int:
    """Return when a folder has changed; 0 where there is none, or but a link to one."""
    try:
        facts = os.lstat(folder)
    except OSError:
        return 0
    return facts.st_mtime_ns if stat.S_ISDIR(facts.st_mode) else 0


def block_names(folder: Path) -> dict[str, None]:
    """Return the names of block files, without looking into them."""
    names = dict[str, None]()
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if file_kind(entry.name) in ("block", "pinned"):
                names[entry.name] = None
    return names
