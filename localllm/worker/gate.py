"""Where every prepared request passes before it is queued: it gets its fingerprint, and suspects are dealt with.

The fingerprint is a keyed hash: the supervisor can tell that a request came again without knowing
what it said, and a hash found somewhere tells nothing without the key.
"""

from __future__ import annotations

import hashlib
import struct
import time
from array import array
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from localllm.errors import Poisoned
from localllm.runtime.types import GenerationOptions
from localllm.worker.poison import KEPT_S

if TYPE_CHECKING:
    from localllm.runtime.sequence import RequestRun

FINGERPRINT_BYTES = 16
_COUNT = struct.Struct("<I")


class Gate:
    """Knows which fingerprints are suspected, for as long as suspicion lasts. Safe to use from several threads."""

    def __init__(
        self,
        key: bytes,
        lone: Collection[bytes] = (),
        refused: Collection[bytes] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._key = key
        self._lone, self._refused = frozenset(lone), frozenset(refused)
        self._clock = clock
        self._until_s = clock() + KEPT_S

    def judge(self, run: RequestRun, options: GenerationOptions) -> bytes:
        """Return a request's fingerprint, and mark it to run alone where it is suspected.

        Raises: Poisoned for one that took a process down when it ran alone.
        """
        found = fingerprint(run, options, self._key)
        is_suspected = self._clock() < self._until_s
        if is_suspected and found in self._refused:
            raise Poisoned(
                "This request ended the model's process when it ran alone; it is not tried again for some minutes.",
                "change the request, or look at: localllm doctor",
            )
        run.is_lone = is_suspected and found in self._lone
        return found


def fingerprint(run: RequestRun, options: GenerationOptions, key: bytes) -> bytes:
    """Return the keyed hash of what `prepare` made of a request: its ids and how to answer, not who asked."""
    person = b"answer" if run.embedding is None else b"embed"
    hasher = hashlib.blake2b(key=key, digest_size=FINGERPRINT_BYTES, person=person)
    for ids in run.inputs:
        hasher.update(_COUNT.pack(len(ids)))
        hasher.update(array("i", ids).tobytes())
    hasher.update(msgspec.msgpack.encode(replace(options, client="", priority=0), order="deterministic"))
    return hasher.digest()
