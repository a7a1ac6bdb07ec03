"""Which known blocks a sequence begins with: the longest prefix that an engine could have put back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice
from typing import TYPE_CHECKING, Literal, TypeAlias

from localllm.runtime.engine import EngineSpec, ExportUnit, PrefixRule
from localllm.runtime.kv.asking import Tick
from localllm.runtime.kv.blocks import Block, Chain, Key, KeyMaker
from localllm.runtime.kv.ram import RamTier
from localllm.runtime.kv.reading import Reading
from localllm.runtime.types import Tokens

if TYPE_CHECKING:
    from localllm.runtime.kv.disk import DiskTier

Tier: TypeAlias = Literal["ram", "disk"]


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


@dataclass(slots=True, eq=False)
class Lookup:
    """What is known of one sequence: made while it is prepared, then the engine's thread's alone.

    `tails`: blocks on disk that follow where the chain leaves all that is known, of which it has at least a
    part. `states`: keys of the sequence's beginnings by length, where blocks are whole states. `matched`: the
    last answer of `match`, after what it was an answer to.
    """

    chain: Chain
    tails: tuple[Block, ...] = ()
    states: dict[int, Key] = field(default_factory=dict)
    reading: Reading | None = None
    matched: tuple[tuple[int, ...], tuple[Link, ...]] = ((), ())


@dataclass(frozen=True, slots=True)
class OnDisk:
    """What the disk says of a sequence: `tails` and `states` of its lookup."""

    tails: tuple[Block, ...] = ()
    states: Mapping[int, Key] = field(default_factory=dict)


class Matcher:
    """Finds what RAM holds and the disk is known to hold of sequences. Called under the lock of the RAM tier."""

    def __init__(self, spec: EngineSpec, maker: KeyMaker, ram: RamTier, disk: DiskTier | None) -> None:
        self.rule = cut_rule(spec)
        self._window_tokens = spec.window_tokens if spec.prefix_rule is PrefixRule.WINDOW else 0
        self._max_tokens = spec.max_sequence_tokens
        self._maker = maker
        self._ram = ram
        self._disk = disk

    def match(self, lookup: Lookup, tokens: Tokens, n_most: int) -> tuple[Link, ...]:
        """Return the longest prefix of the first `n_most` tokens that is known now, block by block."""
        n_most = min(n_most, len(tokens))
        asked = (self._ram.version, 0 if self._disk is None else self._disk.version, len(tokens), n_most)
        if lookup.matched[0] != asked:
            find = self._whole if self.rule is CutRule.WHOLE else self._blocks
            lookup.matched = (asked, find(lookup, tokens, n_most))
        return lookup.matched[1]

    def _blocks(self, lookup: Lookup, tokens: Tokens, n_most: int) -> tuple[Link, ...]:
        chain, size = lookup.chain, self._maker.block_tokens
        chain.extend(tokens)
        links = list[Link]()
        for key in chain.keys[: max(0, n_most) // size]:
            link = self._link(key)
            if link is None or (link.block.start, link.n_used) != (len(links) * size, size):  # as no file should say
                break
            links.append(link)
        start = len(links) * size
        for tail in self._tails(lookup, start, tokens[start : min(n_most, start + size)]):
            if self._n_within_window([*links, tail]) > len(links):
                return (*links, tail)
        return tuple(links[: self._n_within_window(links)])

    def _whole(self, lookup: Lookup, tokens: Tokens, n_most: int) -> tuple[Link, ...]:
        """Return the longest whole state of a beginning."""
        states, root_key = lookup.states, lookup.chain.root_key
        lengths = {block.n_tokens for block in self._ram.children(root_key) if block.n_tokens <= n_most}
        if missing := lengths - states.keys():
            states.update(self._maker.beginnings(root_key, tokens, missing))
        for n_tokens in sorted((n for n in states if n <= n_most), reverse=True):
            link = self._link(states[n_tokens])
            if link is not None and link.end == n_tokens:
                return (link,)
        return ()

    def _link(self, key: Key) -> Link | None:
        entry = self._ram.get(key)
        if entry is not None:
            return Link(entry.block, entry.block.n_tokens, "ram")
        block = None if self._disk is None else self._disk.known(key)
        return None if block is None else Link(block, block.n_tokens, "disk")

    def _tails(self, lookup: Lookup, start: int, own: Tokens) -> list[Link]:
        """Return blocks at `start` that begin as the sequence goes on, with `own`; the most tokens first."""
        parent = lookup.chain.parent(start)
        on_disk = [block for block in lookup.tails if block.parent == parent and block.start == start]
        key = next(iter(lookup.chain.keys[start // self._maker.block_tokens :]), b"")  # its own whole block goes on
        whole = None if self._disk is None else self._disk.known(key)
        if whole is not None:
            on_disk.append(whole)
        if not own or not (on_disk or self._ram.has_children(parent)):
            return []
        marks = self._maker.marks(parent, own)
        if self.rule is CutRule.ENDS:
            in_ram = list(self._ram.beginnings(parent, marks))
        else:
            nearest = self._ram.nearest(parent, marks)
            in_ram = [] if nearest is None else [nearest]
        links = [Link(block, n_common, "ram") for block, n_common in self._fitting(in_ram, marks)]
        for block, n_common in self._fitting(on_disk, marks):
            if self._disk is not None and self._disk.known(block.key) is not None:
                links.append(Link(block, n_common, "disk"))
        return sorted(links, key=lambda link: (-link.n_used, link.tier != "ram"))

    def _fitting(self, blocks: Iterable[Block], marks: bytes) -> list[tuple[Block, int]]:
        """Return the blocks that begin with tokens of `marks`, with how many may be used of each.

        Not those of a longer context, for which no slot has room even where only their beginning is used.
        """
        common = [(block, block.n_common(marks)) for block in blocks if block.end <= self._max_tokens]
        ends = self.rule is CutRule.ENDS
        return [
            (block, n_common) for block, n_common in common if n_common and not (ends and n_common < block.n_tokens)
        ]

    def _n_within_window(self, links: list[Link]) -> int:
        """Return how many of the links to use, so that before their end a whole window is held."""
        if not self._window_tokens:
            return len(links)
        n_best, bare_end = 0, 0
        for n_links, link in enumerate(links, 1):
            if link.block.is_bare:
                bare_end = link.end
            if bare_end <= max(0, link.end - self._window_tokens):
                n_best = n_links
        return n_best

    # --- while a sequence is prepared, without the lock

    def look_on_disk(self, root_key: Key, keys: Iterable[Key], tokens: Tokens, tick: Tick) -> OnDisk:
        """Ask the disk for the blocks of a sequence, from its first to where it leaves all that is known.

        `keys`: of its whole blocks.
        """
        if self._disk is None:
            return OnDisk()
        size = self._maker.block_tokens
        if self.rule is CutRule.WHOLE:
            lengths = {block.n_tokens for block in self._disk.children(root_key)}
            return OnDisk(states=self._maker.beginnings(root_key, tokens, lengths))
        parent, start, rest = root_key, 0, iter(keys)
        for key in islice(rest, (len(tokens) - 1) // size):  # one token at least is left to be computed
            if key not in self._ram and self._disk.find(parent, key) is None:
                _forget_gone(self._disk, key, rest, tick)
                break
            parent, start = key, start + size
            tick()
        own, followers = tokens[start : start + size], self._disk.children(parent)
        if own and followers:
            found = self._fitting(followers, self._maker.marks(parent, own))
            best = [max(found, key=lambda one: one[1])] if found and self.rule is CutRule.ANYWHERE else found
            return OnDisk(tuple(block for block, _ in best))
        return OnDisk()


def _forget_gone(disk: DiskTier, parent: Key, keys: Iterable[Key], tick: Tick) -> None:
    """Look again for what the disk is known to hold of `keys`, which follow `parent`, a block that is not there.

    Another process may have deleted all of them: those that pass for held would not be kept once they are computed.
    """
    is_any_known = False
    for key in keys:
        if disk.known(key) is not None:
            disk.children(parent)
            is_any_known = True
        parent = key
        tick()
    if is_any_known:
        disk.children(parent)  # what follows the last whole one may be gone, too
