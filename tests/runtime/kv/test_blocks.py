"""Keys say what a block was computed from, all of it; marks say how much of it two sequences share."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from localllm.runtime.kv.blocks import KEY_BYTES, MARK_BYTES, NO_ROOT, Chain, KeyMaker
from localllm.runtime.slots import common_prefix

SECRET = b"0123456789abcdef" * 2
TOKENS = st.lists(st.integers(0, 2), max_size=20)
MAKER = KeyMaker("engine", SECRET, block_tokens=4)


def _keys(tokens: list[int], maker: KeyMaker = MAKER, root: tuple[str, str] = NO_ROOT) -> list[bytes]:
    chain = Chain(maker, root)
    chain.extend(tokens)
    return chain.keys


@given(one=TOKENS, other=TOKENS)
@settings(max_examples=300, deadline=None)
def test_two_sequences_share_the_keys_of_their_common_whole_blocks_and_no_more(
    one: list[int], other: list[int]
) -> None:
    n_common = common_prefix(one, other)
    ours, theirs = _keys(one), _keys(other)
    assert len(ours) == len(one) // 4
    assert ours[: n_common // 4] == theirs[: n_common // 4]
    assert not set(ours[n_common // 4 :]) & set(theirs[n_common // 4 :])


@given(before=TOKENS, one=TOKENS, other=TOKENS)
@settings(max_examples=300, deadline=None)
def test_marks_tell_how_many_leading_tokens_two_blocks_share(
    before: list[int], one: list[int], other: list[int]
) -> None:
    before = before[: len(before) // 4 * 4]
    block = Chain(MAKER, NO_ROOT).block([*before, *one], len(before), len(before) + len(one))
    assert len(block.marks) == MARK_BYTES * len(one)
    assert len(block.key) == KEY_BYTES
    assert block.n_common(MAKER.marks(block.parent, other)) == common_prefix(one, other)


@given(tokens=TOKENS, lengths=st.sets(st.integers(-1, 25)))
@settings(max_examples=200, deadline=None)
def test_keys_of_all_beginnings_in_one_pass_are_those_made_one_by_one(tokens: list[int], lengths: set[int]) -> None:
    chain = Chain(MAKER, NO_ROOT)
    expected = {n: chain.whole(tokens, n).key for n in lengths if 0 < n <= len(tokens)}
    assert MAKER.beginnings(chain.root_key, tokens, lengths) == expected


def test_the_same_tokens_elsewhere_are_another_block() -> None:
    assert len(set(_keys([1, 2, 3, 4] * 3))) == 3


def test_everything_that_shapes_kv_shapes_keys() -> None:
    tokens = [1, 2, 3, 4]
    keys = [
        _keys(tokens)[0],
        _keys(tokens, KeyMaker("another engine", SECRET, 4))[0],
        _keys(tokens, KeyMaker("engine", b"x" * 32, 4))[0],
        _keys(tokens, root=("adapter", ""))[0],
        _keys(tokens, root=("", "adapter"))[0],
        _keys(tokens, root=("adapter\0", ""))[0],
        _keys(tokens, root=("a", "dapter"))[0],
    ]
    assert len(set(keys)) == len(keys)


def test_ids_are_not_confused_however_they_are_split() -> None:
    assert _keys([1, 256, 1, 1])[0] != _keys([1, 1, 256, 1])[0]
    assert _keys([0, 0, 0, 0])[0] != MAKER.key(Chain(MAKER, NO_ROOT).root_key, [0, 0, 0])


def test_a_short_last_block_has_a_key_of_its_own() -> None:
    chain = Chain(MAKER, NO_ROOT)
    tokens = [5, 6, 7, 8, 9, 10]
    whole, short = chain.block(tokens, 0, 4), chain.block(tokens, 4, 6)
    assert (whole.start, whole.end, short.start, short.end) == (0, 4, 4, 6)
    assert short.parent == whole.key == chain.keys[0]
    assert chain.block([*tokens, 11, 12], 4, 8).key != short.key


def test_a_chain_grows_with_its_sequence_and_is_cut_with_it() -> None:
    chain = Chain(MAKER, NO_ROOT)
    chain.extend([1, 2, 3, 4, 5, 6])
    chain.extend([1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert chain.keys == _keys([1, 2, 3, 4, 5, 6, 7, 8])
    chain.cut(7)
    chain.extend([1, 2, 3, 4, 9, 9, 9, 9])
    assert chain.keys == _keys([1, 2, 3, 4, 9, 9, 9, 9])


def test_a_whole_state_has_no_marks_and_hangs_on_the_root() -> None:
    chain = Chain(MAKER, NO_ROOT)
    state = chain.whole([1, 2, 3], 2)
    assert (state.parent, state.start, state.end, state.marks) == (chain.root_key, 0, 2, b"")
