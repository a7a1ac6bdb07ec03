"""SHA-256 of files, remembered by path, size, times and inode, so that nobody hashes gigabytes twice."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from pathlib import Path
from typing import Any

from localllm.models.disk import files, lock, record
from localllm.models.store import Store

_KIND, _VERSION = "hashes", 2
_MAX_ENTRIES = 1000
_CHUNK_BYTES = 1 << 20
_SETTLED_NS = 2_000_000_000
_TICK_NS = 10_000_000  # of the clocks of files and processes


def known(path: Path, store: Store | None = None) -> str | None:
    """Return the remembered hash of `path`; None where it is not known or the file changed. Reads no content."""
    try:
        return _match(_load(store or Store()).get(_key(path)), files.Identity.of(path))
    except OSError:
        return None


def sha256_of(path: Path, store: Store | None = None) -> str:
    """Return the SHA-256 of `path` in hex, from memory where the file is unchanged. Raises OSError.

    A cache that cannot be written costs a later hash, nothing else. A file that changes while it is
    read is hashed as read and not remembered.
    """
    store = store or Store()
    before = files.Identity.of(path)
    found = _match(_load(store).get(_key(path)), before)
    if found is not None:
        return found
    digest = hash_file(path)
    # A file written this moment can change again without a new time (see "racy git").
    if files.Identity.of(path) == before and time.time_ns() - before.modified_ns > _SETTLED_NS:
        with contextlib.suppress(OSError, lock.Busy):
            _remember(store, _key(path), before, digest)
    return digest


def learn(path: Path, store: Store | None = None) -> bool:
    """Hash `path` so that the hash is `known` from now on, waiting until a file that was just written has settled.

    False = it cannot be: its time lies ahead, it is still being written, or the hash cannot be. Raises OSError.
    """
    unsettled_ns = _SETTLED_NS - (time.time_ns() - os.stat(path).st_mtime_ns)
    if unsettled_ns >= 2 * _SETTLED_NS:
        return False
    time.sleep(max(0, unsettled_ns + _TICK_NS) / 1e9)
    sha256_of(path, store)
    return known(path, store) is not None


def hash_file(path: Path) -> str:
    """Return the SHA-256 of `path` in hex, always reading it. Raises OSError."""
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _key(path: Path) -> str:
    return os.path.realpath(path)


def _load(store: Store) -> dict[str, Any]:
    """Return identity and hash by path, least recently hashed first."""
    payload = record.load(store.cache / "hashes.json", _KIND, _VERSION) or {}
    rows = payload.get("files")
    if not isinstance(rows, list):
        return {}
    return {row[0]: row[1:] for row in rows if isinstance(row, list) and len(row) == 6 and isinstance(row[0], str)}


def _match(entry: object, identity: files.Identity) -> str | None:
    if not isinstance(entry, list) or not isinstance(entry[-1], str):
        return None
    return entry[-1] if entry[:-1] == [*identity] else None


def _remember(store: Store, key: str, identity: files.Identity, digest: str) -> None:
    store.cache.mkdir(parents=True, exist_ok=True)
    with lock.hold(store.home / "locks" / "hashes.lock", on_wait=lambda _: None):
        entries = _load(store)
        entries.pop(key, None)
        entries[key] = [*identity, digest]
        for old in list(entries)[: max(0, len(entries) - _MAX_ENTRIES)]:
            del entries[old]
        rows = [[path, *entry] for path, entry in entries.items()]
        record.save(store.cache / "hashes.json", _KIND, _VERSION, {"files": rows}, mode=0o600)
