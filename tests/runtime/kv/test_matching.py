"""What is found of a prompt is the longest prefix that the held blocks give, found as if by trying every length."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localllm.runtime.config import TierConfig
from localllm.runtime.engine import EngineSpec, ExportUnit, PrefixRule
from localllm.runtime.kv.blocks import NO_ROOT, Block, Chain
from localllm.runtime.kv.tiers import CutRule, Lookup, Note, Tiers, cut_rule
from tests.fake_engine import SPEC
from tests.runtime.kv.memory_disk import MemoryDisk

SIZE, WINDOW = 3, 5
RULES: dict[str, EngineSpec] = {
    "anywhere": SPEC,
    "ends": replace(SPEC, cut_tokens=SIZE),
    "window": replace(SPEC, prefix_rule=PrefixRule.WINDOW, window_tokens=WINDOW),
    "whole": replace(SPEC, prefix_rule=PrefixRule.CHECKPOINT, export_unit=ExportUnit.WHOLE),
}


@dataclass(frozen=True)
class Held:
    """A block that was put: it ends the beginning `tokens` of some sequence."""

    block: Block
    tokens: tuple[int, ...]


def _put(tiers: Tiers, tokens: list[int], rng: random.Random) -> list[Held]:
    """Export a sequence as an engine would, or part of it; bytes tell what they were made of."""
    chain, held = Chain(tiers.maker, NO_ROOT), list[Held]()
    if tiers.rule is CutRule.WHOLE:
        ends = [n for n in range(1, len(tokens) + 1) if n == len(tokens) or rng.random() < 0.3]
        held = [Held(chain.whole(tokens, n), tuple(tokens[:n])) for n in ends]
    else:
        for start in range(0, len(tokens), SIZE):
            end = min(start + SIZE, len(tokens))
            block = chain.block(tokens, start, end)
            held.append(Held(replace(block, is_bare=rng.random() < 0.3), tuple(tokens[:end])))
    held = [one for one in held if rng.random() < 0.95]
    for one in held:
        tiers.put(one.block, repr(one.tokens).encode(), Note(len(tokens), is_private=rng.random() < 0.2))
    return held


def _is_known(n: int, tokens: list[int], held: list[Held], spec: EngineSpec) -> bool:
    """Say whether the first `n` tokens could be put back from what is held."""
    if cut_rule(spec) is CutRule.WHOLE:
        return any(one.tokens == tuple(tokens[:n]) for one in held)
    ends_only = cut_rule(spec) is CutRule.ENDS
    for start in range(0, n, SIZE):
        own = tuple(tokens[: min(n, start + SIZE)])
        able = [one for one in held if one.block.start == start and one.tokens[: len(own)] == own]
        if ends_only:
            able = [one for one in able if one.tokens == own]
        if spec.prefix_rule is PrefixRule.WINDOW and len(own) > n - WINDOW:
            able = [one for one in able if not one.block.is_bare]
        if not able:
            return False
    return True


def _longest(tokens: list[int], n_most: int, held: list[Held], spec: EngineSpec) -> int:
    n_most = min(n_most, len(tokens))
    lengths = [n for n in range(n_most, 0, -1) if _is_known(n, tokens, held, spec)]
    if spec.prefix_rule is PrefixRule.WINDOW:  # a short last block is not looked for where its whole one is held bare
        wholes = {one.tokens for one in held if one.block.n_tokens == SIZE}
        n_wholes = next(
            n for n in range(n_most + 1) if n == n_most // SIZE or tuple(tokens[: (n + 1) * SIZE]) not in wholes
        )
        lengths = [n for n in lengths if n % SIZE == 0 or n > n_wholes * SIZE]
    return max(lengths, default=0)


def _check(tiers: Tiers, lookup: Lookup, tokens: list[int], n_most: int, expected: int) -> None:
    """Links are without gaps, of the expected length, and give bytes of these very tokens."""
    links = tiers.match(lookup, tokens, n_most)
    assert (links[-1].end if links else 0) == expected
    position = 0
    for link in links:
        assert link.block.start == position
        position = link.end
        assert link is links[-1] or link.n_used == link.block.n_tokens
        assert 0 < link.n_used <= link.block.n_tokens
        if tiers.rule is not CutRule.ANYWHERE:
            assert link.n_used == link.block.n_tokens
        blob = tiers.take(lookup, link)
        while blob is None:
            blob = tiers.take(lookup, link)
        of = eval(blob.decode())
        assert list(of[: link.end]) == tokens[: link.end]


SEQUENCES = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=14), min_size=1, max_size=8)


@pytest.mark.parametrize("rule", RULES)
@given(sequences=SEQUENCES, asked=SEQUENCES, seed=st.integers(0, 2**32))
@settings(max_examples=150, deadline=None)
def test_match_is_the_longest_prefix_that_ram_gives(
    rule: str, sequences: list[list[int]], asked: list[list[int]], seed: int
) -> None:
    rng, spec = random.Random(seed), RULES[rule]
    tiers = Tiers(TierConfig(ram_bytes=rng.choice([300, 1 << 20]), block_tokens=SIZE), spec=spec)
    put = [one for tokens in sequences for one in _put(tiers, tokens, rng)]
    held = [one for one in put if _holds(tiers, one)]
    for tokens in (*asked, *sequences):
        lookup = tiers.look_up(NO_ROOT, tokens)
        n_most = rng.randint(0, len(tokens) + 1)
        _check(tiers, lookup, tokens, n_most, _longest(tokens, n_most, held, spec))


@pytest.mark.parametrize("rule", RULES)
@given(sequences=SEQUENCES, asked=SEQUENCES, seed=st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_match_is_the_longest_prefix_that_both_tiers_give_before_and_after_a_restart(
    rule: str, sequences: list[list[int]], asked: list[list[int]], seed: int
) -> None:
    rng, spec = random.Random(seed), RULES[rule]
    config = TierConfig(ram_bytes=rng.choice([0, 150, 600, 1 << 20]), block_tokens=SIZE, keeps_all=rng.random() < 0.5)
    disk = MemoryDisk()
    disk.takes = lambda block, is_second_use: is_second_use or rng.random() < 0.5
    first = Tiers(config, spec=spec, disk=disk.as_tier)
    put = [one for tokens in sequences for one in _put(first, tokens, rng)]
    for tiers in (first, Tiers(config, spec=spec, disk=disk.as_tier)):
        for tokens in (*asked, *sequences):
            held = [one for one in put if _holds(tiers, one)]
            lookup = tiers.look_up(NO_ROOT, tokens)
            n_most = len(tokens) - rng.randint(0, 1)
            _check(tiers, lookup, tokens, n_most, _longest(tokens, n_most, held, spec))
            tiers.forget(lookup)
        disk.is_closed = False
        tiers.close()


@pytest.mark.parametrize("rule", RULES)
@given(sequences=SEQUENCES, seed=st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_what_is_kept_later_is_found_by_a_lookup_made_before_and_a_sequence_that_has_grown(
    rule: str, sequences: list[list[int]], seed: int
) -> None:
    rng, spec = random.Random(seed), RULES[rule]
    tiers = Tiers(TierConfig(ram_bytes=1 << 20, block_tokens=SIZE), spec=spec)
    tokens, held = rng.choice(sequences), list[Held]()
    n_had = rng.randint(0, len(tokens))
    lookup = tiers.look_up(NO_ROOT, tokens[:n_had])
    for sequence in sequences:
        held += _put(tiers, sequence, rng)
        n_had = rng.randint(n_had, len(tokens))
        known = [one for one in held if _holds(tiers, one)]
        for _ in range(2):
            _check(tiers, lookup, tokens[:n_had], n_had, _longest(tokens[:n_had], n_had, known, spec))


def _holds(tiers: Tiers, one: Held) -> bool:
    """Say whether just this block is held: RAM may hold a better one of its key."""
    entry = tiers._ram.get(one.block.key)
    if entry is not None:
        return entry.block.is_bare == one.block.is_bare
    known = tiers.disk.known(one.block.key) if tiers.disk is not None else None
    return known is not None and known.is_bare == one.block.is_bare


def test_the_rule_follows_from_what_the_engine_can() -> None:
    assert [cut_rule(spec) for spec in RULES.values()] == [
        CutRule.ANYWHERE,
        CutRule.ENDS,
        CutRule.ENDS,
        CutRule.WHOLE,
    ]


def test_blocks_of_a_longer_context_are_left_alone() -> None:
    tokens = list(range(10))
    disk = MemoryDisk()
    config = TierConfig(ram_bytes=0, block_tokens=SIZE, keeps_all=True)
    longer = Tiers(config, spec=SPEC, disk=disk.as_tier)
    chain = Chain(longer.maker, NO_ROOT)
    for start in range(0, len(tokens), SIZE):
        longer.put(chain.block(tokens, start, min(len(tokens), start + SIZE)), b"bytes", Note(len(tokens)))
    for n_ctx, n_known in ((9, 9), (8, 6), (7, 6), (10, 10)):  # three to a block
        tiers = Tiers(config, spec=replace(SPEC, max_sequence_tokens=n_ctx), disk=disk.as_tier)
        asked = [*tokens[:n_ctx], 77][: n_ctx + 1]
        links = tiers.match(tiers.look_up(NO_ROOT, asked), asked, n_ctx)
        assert (links[-1].end if links else 0) == n_known
