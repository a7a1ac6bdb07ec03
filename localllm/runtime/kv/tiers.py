"""KV beyond the device: blocks in RAM and on disk behind one door, found by what they were computed from.

A prompt is looked up while it is prepared: keys are made and the disk is asked on that thread, and what
RAM lacks is read meanwhile by a thread of its own (`reading.py`). The engine's thread touches no file.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Literal, TypeAlias

from localllm.models.available import available_bytes, total_bytes
from localllm.runtime.config import TierConfig
from localllm.runtime.engine import EngineSpec, ExportUnit, PrefixRule
from localllm.runtime.kv.blocks import Block, Chain, Key, KeyMaker, Root
from localllm.runtime.kv.explain import Cleared
from localllm.runtime.kv.ram import Entry, Note, RamTier
from localllm.runtime.kv.reading import Reader, Reading
from localllm.runtime.types import Tokens

if TYPE_CHECKING:
    from localllm.runtime.kv.disk import DiskTier

Tier: TypeAlias = Literal["ram", "disk"]

_REMEMBERED_KEYS = 65_536  # of blocks that were evicted, for `explain`
_SHARE_OF_AVAILABLE = 4  # the RAM tier takes a quarter, where nobody says
_PRESSED_SHARE = 0.05  # of all memory: with less available the tier shrinks
_PRESSURE_CHECK_S = 1.0


class CutRule(Enum):
    """What an engine can use of a block."""

    ANYWHERE = "anywhere"  # its beginning, too
    ENDS = "ends"  # only all of it
    WHOLE = "whole"  # it is a whole state, for no more and no less than its tokens


def cut_rule(spec: EngineSpec) -> CutRule:
    """Return what an engine can use of a block."""
    if spec.export_unit is ExportUnit.WHOLE:
        return CutRule.WHOLE
    return CutRule.ANYWHERE if spec.prefix_rule is PrefixRule.ANY and not spec.cut_tokens else CutRule.ENDS


@dataclass(frozen=True, slots=True)
class Link:
    """One block of a known prefix; links follow each other from position 0. Only the last is used in part."""

    block: Block
    n_used: int
    tier: Tier

    @property
    def end(self) -> int:
        """The position after the last one that is used."""
        return self.block.start + self.n_used


class Gone(Exception):
    """A block that was found is not there any more."""


@dataclass(slots=True, eq=False)
class Lookup:
    """What was found of one sequence on disk while it was prepared. Written by the engine's thread from then on.

    `on_disk`: whole blocks of its chain; `tails`: blocks of which it may begin with a part.
    """

    chain: Chain
    on_disk: dict[Key, Block] = field(default_factory=dict)
    tails: tuple[Block, ...] = ()
    reading: Reading | None = None


@dataclass(frozen=True, slots=True)
class TierStats:
    """Gauges and counters of the tiers of one model. `disk`: as `DiskTier.stats` gives them, None without one."""

    ram_limit_bytes: int
    ram_bytes: int
    n_ram_blocks: int
    n_ram_evicted: int
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
    ) -> None:
        self.rule = cut_rule(spec)
        self._config = config
        self._window_tokens = spec.window_tokens if spec.prefix_rule is PrefixRule.WINDOW else 0
        self._lock = threading.RLock()
        limit_bytes = available_bytes() // _SHARE_OF_AVAILABLE if config.ram_bytes is None else config.ram_bytes
        self._ram = RamTier(limit_bytes)
        self._disk: DiskTier | None = None
        if config.disk_dir and config.disk_bytes and can_write_disk:
            from localllm.runtime.kv.disk import DiskTier

            self._disk = DiskTier(config, fingerprint=spec.fingerprint, model_name=model_name)
        secret = os.urandom(32) if self._disk is None else self._disk.secret
        self.maker = KeyMaker(spec.fingerprint, secret, config.block_tokens)
        self._reader = None if self._disk is None else Reader(self._disk.read, wake)
        self._evicted: dict[Key, None] = {}
        self._checked_s = 0.0

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
        """Find out what the disk holds of a prompt. Not for the engine's thread.

        `reads`: begin to read what RAM lacks.
        """
        lookup = Lookup(Chain(self.maker, root))
        if self.rule is not CutRule.WHOLE:
            lookup.chain.extend(tokens)
        if self._disk is not None:
            self._look_on_disk(self._disk, lookup, tokens)
            links = self.match(lookup, tokens, len(tokens) - 1)
            wanted = [link.block for link in links if link.tier == "disk"]
            if reads and wanted and self._reader is not None:
                lookup.reading = self._reader.begin(wanted)
        return lookup

    def blank(self, root: Root) -> Lookup:
        """Return the lookup of a sequence for which nobody asked the disk."""
        return Lookup(Chain(self.maker, root))

    def match(self, lookup: Lookup, tokens: Tokens, n_most: int) -> tuple[Link, ...]:
        """Return the longest prefix of the first `n_most` tokens that is known now, block by block."""
        with self._lock:
            if self.rule is CutRule.WHOLE:
                return self._match_whole(lookup, tokens, n_most)
            chain, size = lookup.chain, self.block_tokens
            chain.extend(tokens)
            links = list[Link]()
            for key in chain.keys[: max(0, n_most) // size]:
                link = self._link(lookup, key)
                if link is None:
                    break
                links.append(link)
            tail = self._tail(lookup, tokens, len(links) * size, n_most)
            return self._within_window((*links, tail) if tail is not None else tuple(links))

    def take(self, lookup: Lookup, link: Link) -> bytes | None:
        """Return the bytes of a link's block; None = they are still being read. Raises: Gone."""
        key = link.block.key
        with self._lock:
            entry = self._ram.get(key)
            if entry is not None:
                return entry.blob
        if self._reader is None or key not in lookup.on_disk:
            raise Gone
        if lookup.reading is None:
            lookup.reading = self._reader.begin([link.block])
        try:
            blob = lookup.reading.take(link.block)
        except KeyError:
            del lookup.on_disk[key]
            raise Gone from None
        if blob is not None:
            self._keep(Entry(link.block, blob, Note(link.block.end), is_on_disk=True))
        return blob

    def holds(self, key: Key) -> bool:
        """Say whether a block is in a tier, as far as is known without asking the disk."""
        with self._lock:
            return key in self._ram or (self._disk is not None and self._disk.holds(key))

    def put(self, block: Block, blob: bytes, note: Note) -> None:
        """Keep a block that was exported; what the rules allow goes on to the disk."""
        entry = Entry(block, blob, note)
        self._write(entry, is_second_use=False)
        self._keep(entry)

    def used(self, keys: Iterable[Key], *, is_private: bool = False) -> None:
        """Take note that another sequence had the blocks of these keys, given from the first on."""
        on_disk = list[Key]()
        with self._lock:
            for key in reversed(list(keys)):  # those at the front become the newest: the others are useless without
                entry = self._ram.get(key)
                if entry is None:
                    on_disk.append(key)
                    continue
                self._ram.touch(key)
                entry.n_uses += 1
                if entry.is_on_disk:
                    on_disk.append(key)
                elif not is_private:
                    entry.note = Note(entry.note.prefix_tokens, False, entry.note.is_pinned)
                    self._write(entry, is_second_use=True)
        if self._disk is not None and on_disk:
            self._disk.used(on_disk)

    def refused(self, block: Block) -> None:
        """Set a block aside whose bytes the engine would not take."""
        with self._lock:
            self._ram.remove(block.key)
        if self._disk is not None:
            self._disk.set_aside(block.key)

    def forget(self, lookup: Lookup) -> None:
        """Stop reading for a sequence. Idempotent."""
        if lookup.reading is not None:
            lookup.reading.stop()
            lookup.reading = None

    def was_evicted(self, key: Key) -> bool:
        """Say whether a block was here and had to go, as far back as that is remembered."""
        with self._lock:
            return key in self._evicted

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
        with self._lock:
            ram = self._ram
            return TierStats(ram.limit_bytes, ram.used_bytes, len(ram), ram.n_evicted, disk)

    def clear(self) -> Cleared:
        """Forget all, in RAM and on disk; say how much that was."""
        with self._lock:
            n_blocks, n_bytes = len(self._ram), self._ram.used_bytes
            self._ram.clear()
            self._evicted.clear()
        n_files, file_bytes = (0, 0) if self._disk is None else self._disk.clear()
        return Cleared(0, n_blocks, n_bytes, n_files, file_bytes)

    def close(self) -> None:
        """End the tiers' threads, once what is to be written is, within the time that the settings give. Idempotent."""
        if self._reader is not None:
            self._reader.close()
        if self._disk is not None:
            with self._lock:
                waiting = [entry for entry in self._ram if not entry.is_on_disk] if self._config.keeps_all else []
            for entry in waiting:
                self._write(entry, is_second_use=True)
            self._disk.close(flush_s=self._config.flush_s)

    def _look_on_disk(self, disk: DiskTier, lookup: Lookup, tokens: Tokens) -> None:
        """Ask the disk for the blocks of a chain, from its first to where it leaves all that is known."""
        chain, parent = lookup.chain, lookup.chain.root_key
        if self.rule is CutRule.WHOLE:
            lookup.tails = tuple(disk.children(parent))
            return
        for key in chain.keys:
            followers = {block.key: block for block in disk.children(parent)}
            if key in followers:
                lookup.on_disk[key] = followers[key]
            elif key not in self._ram:
                lookup.tails = tuple(followers.values())
                return
            parent = key
        lookup.tails = tuple(disk.children(parent))

    def _link(self, lookup: Lookup, key: Key) -> Link | None:
        entry = self._ram.get(key)
        if entry is not None:
            return Link(entry.block, entry.block.n_tokens, "ram")
        block = lookup.on_disk.get(key)
        return None if block is None else Link(block, block.n_tokens, "disk")

    def _tail(self, lookup: Lookup, tokens: Tokens, start: int, n_most: int) -> Link | None:
        """Return the block of which the most tokens follow at `start`."""
        own = tokens[start : min(n_most, start + self.block_tokens)]
        if not own:
            return None
        parent = lookup.chain.parent(start)
        in_ram = self._ram.children(parent)
        on_disk = [block for block in lookup.tails if block.parent == parent]
        if not in_ram and not on_disk:
            return None
        marks = self.maker.marks(parent, own)
        best: Link | None = None
        for block in (*in_ram, *on_disk):
            n_common = block.n_common(marks)
            if self.rule is CutRule.ENDS and n_common < block.n_tokens:
                continue
            if n_common > (best.n_used if best is not None else 0):
                best = Link(block, n_common, "ram" if block.key in self._ram else "disk")
        if best is not None and best.tier == "disk":
            lookup.on_disk[best.block.key] = best.block
        return best

    def _match_whole(self, lookup: Lookup, tokens: Tokens, n_most: int) -> tuple[Link, ...]:
        """Return the longest whole state of a prefix."""
        root_key = lookup.chain.root_key
        in_ram = {block.key: block for block in self._ram.children(root_key)}
        known = {block.n_tokens for block in (*in_ram.values(), *lookup.tails)}
        on_disk = {block.key: block for block in lookup.tails}
        for n_tokens in sorted((n for n in known if 0 < n <= n_most), reverse=True):
            key = self.maker.key(root_key, tokens[:n_tokens])
            if key in in_ram:
                return (Link(in_ram[key], n_tokens, "ram"),)
            if key in on_disk:
                lookup.on_disk[key] = on_disk[key]
                return (Link(on_disk[key], n_tokens, "disk"),)
        return ()

    def _within_window(self, links: tuple[Link, ...]) -> tuple[Link, ...]:
        """Return the links up to an end before which a whole window is held."""
        while self._window_tokens and links:
            first = links[-1].end - self._window_tokens
            if not any(link.block.is_bare and link.end > first for link in links):
                break
            links = links[:-1]
        return links

    def _write(self, entry: Entry, *, is_second_use: bool) -> None:
        if self._disk is None or entry.note.is_private:
            return
        entry.is_on_disk = self._disk.write(
            entry.block,
            entry.blob,
            prefix_tokens=entry.note.prefix_tokens,
            is_second_use=is_second_use,
            is_pinned=entry.note.is_pinned,
        )

    def _keep(self, entry: Entry) -> None:
        with self._lock:
            if self.rule is CutRule.ANYWHERE:
                self._drop_beginnings(entry.block)
            gone = self._ram.put(entry)
            gone += self._relieve()
            for lost in gone:
                if not lost.is_on_disk:
                    self._evicted[lost.block.key] = None
            while len(self._evicted) > _REMEMBERED_KEYS:
                del self._evicted[next(iter(self._evicted))]

    def _drop_beginnings(self, block: Block) -> None:
        """Let go of blocks that are but the beginning of another."""
        for other in tuple(self._ram.children(block.parent)):
            held = self._ram.get(other.key)
            is_beginning = other.n_tokens < block.n_tokens and block.marks.startswith(other.marks)
            if is_beginning and held is not None and not held.note.is_pinned:
                self._ram.remove(other.key)

    def _relieve(self) -> list[Entry]:
        """Halve the tier where the machine has hardly any memory left."""
        now_s = time.monotonic()
        if now_s - self._checked_s < _PRESSURE_CHECK_S:
            return []
        self._checked_s = now_s
        if available_bytes() >= _PRESSED_SHARE * total_bytes():
            return []
        return self._ram.shrink(self._ram.used_bytes // 2)


def no_tiers(spec: EngineSpec) -> Tiers:
    """Return tiers that know nothing and keep nothing."""
    return Tiers(TierConfig(ram_bytes=0), spec=spec)
