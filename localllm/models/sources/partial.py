"""A file that is still arriving: its bytes, their running hash, and a record of how far they were proven.

TARGET.part holds the bytes; TARGET.part.json says that its first `done` bytes had this hash when they
were made durable. A resume hashes that prefix again and drops what came after it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from localllm.errors import HashMismatch
from localllm.models.disk import files, record

_KIND, _VERSION = "partial", 1
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Expected:
    """What the finished file must be; `sha256` or `git_sha1` (of a git blob) is set."""

    size_bytes: int
    sha256: str | None = None
    git_sha1: str | None = None

    @property
    def identity(self) -> str:
        """What a record is bound to, so that bytes of another file are never continued."""
        return f"{self.size_bytes}:{self.sha256 or self.git_sha1}"


class Partial:
    """The arriving file. One owner; close it. `done` bytes are written, `etag` is their server's mark."""

    def __init__(self, target: Path, expected: Expected, on_checked: Callable[[int], None]) -> None:
        """Open what an earlier try left, or begin. Raises OSError.

        `on_checked` is told the bytes of the prefix that were hashed again.
        """
        self.target = target
        self.expected = expected
        self.path = target.with_name(target.name + ".part")
        self.done = 0
        self.etag = ""
        self._record = target.with_name(target.name + ".part.json")
        self._recorded = 0
        # Frequent enough to refetch at most 2 % after a crash, rare enough that fsync costs nothing.
        self._interval = max(64 << 10, min(64 << 20, expected.size_bytes // 50))
        self._fd = self._open()
        try:
            self._resume(on_checked)
        except BaseException:
            self.close()
            raise

    def _open(self) -> int:
        if os.path.lexists(self.path) and not files.is_regular(self.path):
            files.remove_tree(self.path)
        return os.open(self.path, os.O_RDWR | os.O_CREAT | files.OWN, 0o644)

    def _fresh_hashes(self) -> None:
        self._sha256 = hashlib.sha256()
        self._git = hashlib.sha1(f"blob {self.expected.size_bytes}\0".encode(), usedforsecurity=False)

    def _resume(self, on_checked: Callable[[int], None]) -> None:
        self._fresh_hashes()
        facts = record.load(self._record, _KIND, _VERSION) or {}
        done = facts.get("done")
        if facts.get("identity") == self.expected.identity and type(done) is int and done > 0:
            if self._hash_prefix(done, on_checked) and self._sha256.hexdigest() == facts.get("sha256"):
                self.done, self._recorded, self.etag = done, done, str(facts.get("etag", ""))
            else:
                self._fresh_hashes()
        os.ftruncate(self._fd, self.done)
        os.lseek(self._fd, self.done, os.SEEK_SET)

    def _hash_prefix(self, n_bytes: int, on_checked: Callable[[int], None]) -> bool:
        """Hash the first `n_bytes` again; False where the file is shorter or that is too much."""
        if n_bytes > self.expected.size_bytes or os.fstat(self._fd).st_size < n_bytes:
            return False
        left = n_bytes
        while left:
            chunk = os.read(self._fd, min(_CHUNK_BYTES, left))
            if not chunk:
                return False
            self._sha256.update(chunk)
            self._git.update(chunk)
            left -= len(chunk)
            on_checked(n_bytes - left)
        return True

    def write(self, chunk: bytes) -> None:
        """Append bytes as they arrive. Raises OSError (disk full, quota)."""
        files.write_all(self._fd, chunk)
        self._sha256.update(chunk)
        self._git.update(chunk)
        self.done += len(chunk)
        if self.done - self._recorded >= self._interval:
            self.checkpoint()

    def checkpoint(self) -> None:
        """Make what is there durable and say so beside it. Raises OSError."""
        if self.done == self._recorded:
            return
        os.fsync(self._fd)
        facts = {
            "identity": self.expected.identity,
            "done": self.done,
            "sha256": self._sha256.hexdigest(),
            "etag": self.etag,
        }
        record.save(self._record, _KIND, _VERSION, facts)
        self._recorded = self.done

    def restart(self) -> None:
        """Drop everything: what the server has now is not what was begun. Raises OSError."""
        self._record.unlink(missing_ok=True)
        os.ftruncate(self._fd, 0)
        os.lseek(self._fd, 0, os.SEEK_SET)
        self.done = self._recorded = 0
        self.etag = ""
        self._fresh_hashes()

    def finish(self) -> str:
        """Give the file its final name if size and hash are the promised ones; return its SHA-256.

        Raises HashMismatch (the bytes are kept as NAME.bad), OSError.
        """
        sha256 = self._sha256.hexdigest()
        wanted = self.expected.sha256 or self.expected.git_sha1
        got = sha256 if self.expected.sha256 else self._git.hexdigest()
        if self.done != self.expected.size_bytes or got != wanted:
            bad = self.target.with_name(self.target.name + ".bad")
            os.replace(self.path, bad)
            self._record.unlink(missing_ok=True)
            raise HashMismatch(
                f"{self.target.name} is not the file that was promised: its hash is {got}, not {wanted}"
                f" ({self.done} of {self.expected.size_bytes} bytes); what arrived is kept as {bad}",
                "run the same command again: it begins anew",
                expected=wanted,
                got=got,
            )
        os.fsync(self._fd)
        os.replace(self.path, self.target)
        files.sync_folder(self.target.parent)
        self._record.unlink(missing_ok=True)
        return sha256

    def close(self) -> None:
        """Keep what is there for a resume, as far as the disk allows. May be called twice."""
        if self._fd < 0:
            return
        with contextlib.suppress(OSError):
            if self.path.exists():
                self.checkpoint()
        os.close(self._fd)
        self._fd = -1
