"""KV beyond the device: blocks in RAM and on disk behind one door, found by what they were computed from.

A prompt is looked up while it is prepared: the disk is asked by a thread of its own (`asking.py`), and what
RAM lacks is read meanwhile by another (`reading.py`). Neither the engine's thread nor one that prepares
touches a file. What is kept, and what goes for it, is decided in `keeping.py`.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from localllm.models.available import available_bytes
from localllm.runtime.config import TierConfig
from localllm.runtime.engine import EngineSpec
from localllm.runtime.kv.asking import Asker
from localllm.runtime.kv.blocks import Block, Chain, Key, KeyMaker, Root
from localllm.runtime.kv.explain import Cleared
from localllm.runtime.kv.keeping import Keeper
from localllm.runtime.kv.matching import CutRule, Link, Lookup, Matcher, Tier, cut_rule
from localllm.runtime.kv.ram import Note, RamTier
from localllm.runtime.kv.reading import Reader
from localllm.runtime.types import Tokens

if TYPE_CHECKING:
    from localllm.runtime.kv.disk import DiskTier

__all__ = ["CutRule", "Gone", "Link", "Lookup", "Note", "Tier", "TierStats", "Tiers", "cut_rule", "no_tiers"]

_SHARE_OF_AVAILABLE = 4  # the RAM tier takes a quarter, where nobody says
_SHARE_AHEAD = 4  # beside the RAM tier, at most a quarter of it lies ready for those who wait, within these bounds
_LEAST_AHEAD_BYTES, _MOST_AHEAD_BYTES = 16 << 20, 256 << 20


class Gone(Exception):
    """A block that was found is not there any more."""


@dataclass(frozen=True, slots=True)
class TierStats:
    """Gauges and counters of the tiers of one model. `disk`: as `DiskTier.stats` gives them, None without one.

    `read_ahead_bytes`: read from disk for sequences that have not taken them yet.
    """

    ram_limit_bytes: int
    ram_bytes: int
    n_ram_blocks: int
    n_ram_evicted: int
    read_ahead_bytes: int = 0
    disk: object | None = None


class Tiers:
    """The RAM and disk tiers of one loaded model. Thread safe."""

    def __init__(
        self,
        config: TierConfig,
        *,
        spec: EngineSpec,
        model_name: str = "",
        can_write_disk: bool = False,
        wake: Callable[[], None] = lambda: None,
        disk: DiskTier | None = None,
    ) -> None:
        """`wake`: called when a block has come for which `take` had nothing yet. `disk`: instead of the settings'."""
        if disk is None and config.disk_dir and config.disk_bytes != 0 and can_write_disk:
            from localllm.runtime.kv.disk import DiskTier

            disk = DiskTier(config, fingerprint=spec.fingerprint, model_name=model_name)
        self._config = config
        self._disk = disk
        self.maker = KeyMaker(spec.fingerprint, os.urandom(32) if disk is None else disk.secret, config.block_tokens)
        limit_bytes = available_bytes() // _SHARE_OF_AVAILABLE if config.ram_bytes is None else config.ram_bytes
        self._ram = RamTier(limit_bytes) if disk is None else RamTier(limit_bytes, disk.has_written)
        self._matcher = Matcher(spec, self.maker, self._ram, disk)
        ahead_bytes = min(max(limit_bytes // _SHARE_AHEAD, _LEAST_AHEAD_BYTES), _MOST_AHEAD_BYTES)
        self._reader = None if disk is None else Reader(disk.read, self._ram.__contains__, wake, ahead_bytes)
        self._asker = Asker()
        self._lock = threading.Lock()
        self._keeper = Keeper(self._ram, disk, self._matcher.rule, self._lock)

    @property
    def rule(self) -> CutRule:
        """What the engine can use of a block."""
        return self._matcher.rule

    @property
    def is_on(self) -> bool:
        """Say whether anything can be kept at all."""
        return self._ram.limit_bytes > 0 or self._disk is not None

    @property
    def block_tokens(self) -> int:
        """Positions of a whole block."""
        return self.maker.block_tokens

    @property
    def disk(self) -> DiskTier | None:
        """The disk tier, where there is one."""
        return self._disk

    def look_up(self, root: Root, tokens: Tokens, *, reads: bool = True) -> Lookup:
        """Find out what the disk holds of a prompt, as far as it answers in time. Not for the engine's thread.

        `reads`: begin to read what RAM lacks.
        """
        lookup = self.blank(root)
        if self.rule is not CutRule.WHOLE:
            lookup.chain.extend(tokens)
        if self._reader is not None:
            root_key, keys, look = lookup.chain.root_key, tuple(lookup.chain.keys), self._matcher.look_on_disk
            on_disk = self._asker.ask(lambda tick: look(root_key, keys, tokens, tick))
            if on_disk is not None:
                lookup.tails = on_disk.tails
                lookup.states.update(on_disk.states)
            elif self._asker.is_resting:  # what RAM holds is found nevertheless
                return lookup
            links = self.match(lookup, tokens, len(tokens) - 1)
            wanted = [link.block for link in links if link.tier == "disk"]
            if reads and wanted:
                lookup.reading = self._reader.begin(wanted)
        return lookup

    def blank(self, root: Root) -> Lookup:
        """Return the lookup of a sequence for which nobody asked the disk."""
        return Lookup(Chain(self.maker, root))

    def match(self, lookup: Lookup, tokens: Tokens, n_most: int) -> tuple[Link, ...]:
        """Return the longest prefix of the first `n_most` tokens that is known now, block by block.

        `tokens` begin with those that were given before with this lookup.
        """
        with self._lock:
            return self._matcher.match(lookup, tokens, n_most)

    def take(self, lookup: Lookup, link: Link) -> bytes | None:
        """Return the bytes of a link's block; None = they are still being read. Raises: Gone."""
        key = link.block.key
        with self._lock:
            entry = self._ram.get(key)
        if entry is not None:
            if lookup.reading is not None:
                lookup.reading.skip(key)
            if entry.block.is_bare and not link.block.is_bare:
                raise Gone
            return entry.blob
        if self._disk is None or self._reader is None:
            raise Gone
        if lookup.reading is None:
            if not self._disk.holds(key):
                raise Gone
            lookup.reading = self._reader.begin(self._from(lookup, link, self._disk))
        try:
            blob = lookup.reading.take(link.block)
        except KeyError:
            raise Gone from None
        if blob is not None:
            self._keeper.put_read(link.block, blob)
        return blob

    def waited_s(self, lookup: Lookup) -> float:
        """Return for how long `take` has had nothing for a sequence while the disk gave nobody anything."""
        return 0.0 if self._reader is None or lookup.reading is None else self._reader.waited_s(lookup.reading)

    def holds(self, key: Key) -> bool:
        """Say whether a block is in a tier, as far as is known without asking the disk."""
        return key in self._ram or (self._disk is not None and self._disk.holds(key))

    def put(self, block: Block, blob: bytes, note: Note) -> None:
        """Keep a block that was exported; what the rules allow goes on to the disk."""
        self._keeper.put(block, blob, note)

    def pin(self, key: Key, note: Note) -> bool:
        """Put a block under a note that pins it, without exporting it anew; False = RAM does not hold all of it."""
        return self._keeper.pin(key, note)

    def used(self, keys: Iterable[Key], in_part: Key | None = None, *, is_private: bool = False) -> None:
        """Take note that another sequence had the blocks of these keys, and of the next one but the beginning."""
        self._keeper.used(keys, in_part, is_private=is_private)

    def refused(self, block: Block) -> None:
        """Set a block aside whose bytes the engine would not take."""
        with self._lock:
            self._ram.remove(block.key)
        if self._disk is not None and self._reader is not None:
            disk = self._disk
            self._reader.later(lambda: disk.set_aside(block.key))

    def lost(self, keys: list[Key]) -> None:
        """Take note that the first of these blocks, which follow each other, could not be had when it was wanted.

        Who wanted it computes them all, so that they are kept anew: the disk may hold the others no better.
        """
        if self._disk is not None:
            self._disk.distrust(keys)

    def forget(self, lookup: Lookup) -> None:
        """Stop reading for a sequence. Idempotent."""
        if lookup.reading is not None:
            lookup.reading.stop()
            lookup.reading = None

    def was_evicted(self, key: Key) -> bool:
        """Say whether a block was here and had to go, as far back as that is remembered."""
        return self._ram.was_evicted(key)

    def followers(self, parent: Key) -> list[Block]:
        """Return all that is held after `parent`. Not for the engine's thread: it asks the disk."""
        with self._lock:
            found = {block.key: block for block in self._ram.children(parent)}
        if self._disk is not None:
            found |= {block.key: block for block in self._disk.children(parent)}
        return list(found.values())

    def places(self, key: Key) -> dict[Tier, float | None]:
        """Return the tiers that hold a block, and when it was last used there (Unix seconds), where that is known."""
        found: dict[Tier, float | None] = {}
        with self._lock:
            entry = self._ram.get(key)
        if entry is not None:
            found["ram"] = entry.used_s
        if self._disk is not None and self._disk.holds(key):
            found["disk"] = self._disk.used_s(key)
        return found

    def stats(self) -> TierStats:
        """Return what the tiers hold."""
        disk = None if self._disk is None else self._disk.stats()
        ahead_bytes = 0 if self._reader is None else self._reader.held_bytes
        with self._lock:
            ram = self._ram
            return TierStats(ram.limit_bytes, ram.used_bytes, len(ram), ram.n_evicted, ahead_bytes, disk)

    def limit_ram(self, limit_bytes: int) -> None:
        """Keep at most so much in RAM from now on."""
        self._keeper.limit_ram(limit_bytes)

    def clear(self) -> Cleared:
        """Forget all, in RAM and on disk; say how much that was. Sequences at work compute what they lack."""
        in_ram = self.clear_ram()
        n_files, file_bytes = (0, 0) if self._disk is None else self._disk.clear()
        return replace(in_ram, n_disk_blocks=n_files, disk_bytes=file_bytes)

    def clear_ram(self) -> Cleared:
        """Forget what RAM holds, and what was read for those who wait; say how much that was. No file is touched."""
        if self._reader is not None:
            self._reader.stop_all()
        with self._lock:
            n_blocks, n_bytes = len(self._ram), self._ram.used_bytes
            self._ram.clear()
        return Cleared(n_ram_blocks=n_blocks, ram_bytes=n_bytes)

    def write_pins(self, end_s: float) -> None:
        """Have what is pinned written, as far as the disk did not take it before. `end_s`: by the monotonic clock."""
        self._keeper.write_held(end_s, pins_only=True)

    def close(self) -> None:
        """End the tiers' threads, once what is to be written is, within the time that the settings give. Idempotent."""
        self._asker.close()
        if self._reader is not None:
            self._reader.close()
        if self._disk is None:
            return
        end_s = time.monotonic() + self._config.flush_s
        self._keeper.write_held(end_s, pins_only=not self._config.keeps_all)
        self._disk.close(flush_s=max(0.0, end_s - time.monotonic()))

    def _from(self, lookup: Lookup, link: Link, disk: DiskTier) -> list[Block]:
        """Return a link's block and those after it in the chain that the disk is known to hold and RAM lacks."""
        blocks, at = [link.block], link.block.start // self.block_tokens
        keys = lookup.chain.keys[at:]
        if keys[:1] == [link.block.key]:
            for key in keys[1:]:
                block = disk.known(key)
                if block is not None and key not in self._ram:
                    blocks.append(block)
        return blocks


def no_tiers(spec: EngineSpec) -> Tiers:
    """Return tiers that know nothing and keep nothing."""
    return Tiers(TierConfig(ram_bytes=0), spec=spec)
