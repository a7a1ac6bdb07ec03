"""Of the blocks after one parent the right one is found, as if all had been looked at."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from localllm.runtime.kv.blocks import NO_ROOT, Block, Chain, KeyMaker
from localllm.runtime.kv.siblings import Siblings
from localllm.runtime.slots import common_prefix

MAKER = KeyMaker("engine", b"s" * 32, block_tokens=8)
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=8).map(tuple)


def _block(tokens: tuple[int, ...]) -> Block:
    return Chain(MAKER, NO_ROOT).block(tokens, 0, len(tokens))


@given(held=st.lists(TOKENS, max_size=12), gone=st.sets(st.integers(0, 11)), own=TOKENS)
@settings(max_examples=400, deadline=None)
def test_the_nearest_and_all_beginnings_are_found(
    held: list[tuple[int, ...]], gone: set[int], own: tuple[int, ...]
) -> None:
    siblings, left = Siblings(), set(held)
    for tokens in held:
        siblings.add(_block(tokens))
    for i in gone & set(range(len(held))):
        siblings.remove(_block(held[i]).key)
        left.discard(held[i])
    assert len(siblings) == len(left)
    marks = MAKER.marks(Chain(MAKER, NO_ROOT).root_key, own)
    nearest = siblings.nearest(marks)
    assert (nearest.n_common(marks) if nearest else 0) == max((common_prefix(t, own) for t in left), default=0)
    beginnings = sorted((t for t in left if t == own[: len(t)]), key=len, reverse=True)
    assert [block.n_tokens for block in siblings.beginnings(marks)] == [len(t) for t in beginnings]


def test_whole_states_are_never_taken_for_a_part() -> None:
    siblings, chain = Siblings(), Chain(MAKER, NO_ROOT)
    for n in (1, 2, 3):
        siblings.add(chain.whole([1, 2, 3], n))
    marks = MAKER.marks(chain.root_key, [1, 2, 3])
    assert siblings.nearest(marks) is None
    assert list(siblings.beginnings(marks)) == []
    assert len(siblings.blocks) == 3
