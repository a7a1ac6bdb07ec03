"""Fetches one file in ranges: resumes, waits and tries again, and gives it its name only when it is right."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import re
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from localllm.errors import DownloadFailed, HashMismatch, ModelNotFound
from localllm.models import hashes
from localllm.models.disk import files
from localllm.models.sources.partial import Expected, Partial
from localllm.models.sources.progress import Meter, Phase
from localllm.models.sources.transport import TRY_AGAIN, Interrupted, Reply, Transport

_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")
_FULL_DISK = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_READ_ONLY = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})
_SPARE_BYTES = 16 << 20
_MIRROR_HINT = "export HF_ENDPOINT=https://another-mirror, or try again later"


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file to fetch: its address, the plain file name it gets, and what it must be. `commit` of its repository."""

    url: str
    name: str
    expected: Expected
    commit: str | None = None


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a download keeps trying. `max_failures` in a row without a new byte; `max_restarts` from zero."""

    max_failures: int = 6
    max_restarts: int = 3
    backoff_s: float = 0.5
    max_backoff_s: float = 30.0
    max_asked_wait_s: float = 300.0
    chunk_bytes: int = 1 << 18


DEFAULT_PATIENCE = Patience()


def fetch(
    remote: RemoteFile,
    folder: Path,
    transport: Transport,
    meter: Meter,
    *,
    base_bytes: int = 0,
    patience: Patience = DEFAULT_PATIENCE,
    sleep: Callable[[float], None] = time.sleep,
) -> str:
    """Fetch `remote` into `folder` and return its SHA-256; what is already right there is not fetched.

    `base_bytes` is added to every count that `meter` gets. Raises DownloadFailed (what arrived is kept),
    HashMismatch (kept as NAME.bad), ModelNotFound (404, or not allowed).
    """
    target = folder / remote.name
    with told_as_disk_trouble(folder, remote.name):
        done = _already_there(target, remote.expected)
        if done is not None:
            return done
        partial = Partial(target, remote.expected, lambda n: meter.at(base_bytes + n))
    with contextlib.closing(partial), told_as_disk_trouble(folder, remote.name):
        require_space(folder, remote.name, remote.expected.size_bytes - partial.done)
        _Attempts(remote, partial, transport, meter, base_bytes, patience, sleep).run()
        return partial.finish()


@contextlib.contextmanager
def told_as_disk_trouble(folder: Path, what: str) -> Iterator[None]:
    """Turn a full, read-only or broken disk into a sentence."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL_DISK:
            message = f"the disk under {folder} is full; what arrived of {what} is kept and will be resumed"
            raise DownloadFailed(message, "free some space, or export LOCALLLM_HOME=/another/disk") from error
        if error.errno in _READ_ONLY:
            message = f"{folder} cannot be written ({error.strerror})"
            raise DownloadFailed(message, "export LOCALLLM_HOME=/a/folder/of/yours") from error
        message = f"{what} could not be written under {folder}: {error.strerror or error}"
        raise DownloadFailed(message, "localllm doctor") from error


def _already_there(target: Path, expected: Expected) -> str | None:
    """Return the hash of a finished file from an earlier try; what is not right is removed."""
    if not os.path.lexists(target):
        return None
    if files.is_regular(target) and target.stat().st_size == expected.size_bytes and expected.sha256:
        digest = hashes.hash_file(target)
        if digest == expected.sha256:
            return digest
    files.remove_tree(target)
    return None


def require_space(folder: Path, what: str, needed_bytes: int) -> None:
    """Raise DownloadFailed unless `folder` has this many bytes free, and some to spare."""
    free = shutil.disk_usage(folder).free
    if free < needed_bytes + _SPARE_BYTES:
        raise DownloadFailed(
            f"{what} needs {needed_bytes / 1e9:.2f} GB more under {folder}, where {free / 1e9:.2f} GB are free",
            "free some space, or export LOCALLLM_HOME=/another/disk",
            needed_bytes=needed_bytes,
            free_bytes=free,
        )


class _Attempts:
    """The tries of one download, until it is complete or patience ends."""

    def __init__(
        self,
        remote: RemoteFile,
        partial: Partial,
        transport: Transport,
        meter: Meter,
        base_bytes: int,
        patience: Patience,
        sleep: Callable[[float], None],
    ) -> None:
        self._remote = remote
        self._partial = partial
        self._transport = transport
        self._meter = meter
        self._base = base_bytes
        self._patience = patience
        self._sleep = sleep
        self._restarts = 0

    def run(self) -> None:
        failures = 0
        while self._partial.done < self._remote.expected.size_bytes:
            before = self._partial.done
            try:
                self._attempt()
            except Interrupted as error:
                failures = 1 if self._partial.done > before else failures + 1
                if failures > self._patience.max_failures:
                    raise DownloadFailed(
                        f"{self._remote.name}: {error.reason}, {failures} times in a row; what arrived is kept",
                        "run the same command again to resume",
                    ) from error
                self._meter.say(Phase.RETRYING, error.reason)
                self._sleep(self._wait_s(failures, error.wait_s))

    def _wait_s(self, failures: int, asked_s: float) -> float:
        backoff = min(self._patience.max_backoff_s, self._patience.backoff_s * 2.0 ** (failures - 1))
        return max(backoff * random.uniform(0.75, 1.25), min(asked_s, self._patience.max_asked_wait_s))

    def _attempt(self) -> None:
        partial, expected = self._partial, self._remote.expected
        headers = {}
        if partial.done:
            headers["Range"] = f"bytes={partial.done}-"
            if partial.etag:
                headers["If-Range"] = partial.etag
        with self._transport.get(self._remote.url, headers) as reply:
            self._check_hub(reply)
            self._check_status(reply)
            self._place(reply)
            while partial.done < expected.size_bytes:
                chunk = reply.read(self._patience.chunk_bytes)
                if not chunk:
                    raise Interrupted(f"the connection ended after {partial.done} of {expected.size_bytes} bytes")
                if partial.done + len(chunk) > expected.size_bytes:
                    raise self._wrong_length(f"more than {expected.size_bytes}")
                partial.write(chunk)
                self._meter.at(self._base + partial.done)

    def _check_hub(self, reply: Reply) -> None:
        """Compare what the hub says on the way with what it said when the file was looked up."""
        linked = reply.hub.get("x-linked-etag", "").strip('"')
        size = reply.hub.get("x-linked-size", "")
        commit = reply.hub.get("x-repo-commit", "")
        expected = self._remote.expected
        if re.fullmatch(r"[0-9a-f]{64}", linked) and expected.sha256 and linked != expected.sha256:
            raise HashMismatch(
                f"the hub now has another {self._remote.name}: {linked}, not {expected.sha256}",
                "run the same command again",
            )
        if size.isdecimal() and int(size) != expected.size_bytes:
            raise self._wrong_length(size)
        if commit and self._remote.commit and commit != self._remote.commit:
            raise DownloadFailed(f"the hub answered for revision {commit}, not {self._remote.commit}", _MIRROR_HINT)

    def _check_status(self, reply: Reply) -> None:
        status = reply.status
        if status in TRY_AGAIN:
            asked = reply.headers.get("Retry-After", "")
            raise Interrupted(f"the server answered {status}", float(asked) if asked.isdecimal() else 0.0)
        if status in (401, 403):
            raise ModelNotFound(
                f"the hub does not let you have {self._remote.name} ({status})", "export HF_TOKEN=hf_your_token"
            )
        if status in (404, 410):
            raise ModelNotFound(f"the hub has no {self._remote.name} ({status})", "localllm pull hf:org/repository")
        if status == 416:
            self._restart()
            raise Interrupted("the server has no such range")
        if status not in (200, 206):
            raise DownloadFailed(f"the server answered {status} for {self._remote.name}", _MIRROR_HINT)
        coding = reply.headers.get("Content-Encoding", "identity").strip().lower()
        if coding not in ("", "identity"):
            raise DownloadFailed(
                f"the server sends {self._remote.name} as {coding}, which cannot be resumed or checked",
                _MIRROR_HINT,
            )

    def _place(self, reply: Reply) -> None:
        """Make sure that the bytes to come belong at `done`; else begin again, or fail."""
        partial, total = self._partial, self._remote.expected.size_bytes
        etag = reply.headers.get("ETag", "")
        strong = "" if etag.startswith("W/") else etag
        if reply.status == 206:
            match = _CONTENT_RANGE.fullmatch(reply.headers.get("Content-Range", ""))
            if match is None or int(match[1]) != partial.done or (partial.etag and strong and strong != partial.etag):
                self._restart()
                raise Interrupted("the server sent another range, or another file")
            if match[3] != "*" and int(match[3]) != total:
                raise self._wrong_length(match[3])
        elif partial.done:
            self._restart()
        length = reply.headers.get("Content-Length", "")
        if length.isdecimal() and int(length) + partial.done != total:
            raise self._wrong_length(str(int(length) + partial.done))
        partial.etag = strong

    def _restart(self) -> None:
        self._restarts += 1
        if self._restarts > self._patience.max_restarts:
            raise DownloadFailed(
                f"{self._remote.name} changed on the server {self._restarts} times while it was fetched",
                _MIRROR_HINT,
            )
        self._partial.restart()

    def _wrong_length(self, got: str) -> DownloadFailed:
        total = self._remote.expected.size_bytes
        return DownloadFailed(
            f"the server has {got} bytes of {self._remote.name}, not the {total} that the hub promised",
            _MIRROR_HINT,
        )
