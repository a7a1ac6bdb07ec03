"""The ledger of slots and cells adds up under any sequence of operations."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localllm.runtime.engine import PrefixRule
from localllm.runtime.slots import Checkpoint, Slot, Slots, common_prefix, usable_cut
from tests.fake_engine import SPEC

OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["grow", "cut", "copy", "free"]), st.integers(0, 3), st.integers(0, 3), st.integers(0, 40)
    ),
    max_size=60,
)


@pytest.mark.parametrize("shares", [True, False])
@given(operations=OPERATIONS)
@settings(max_examples=150, deadline=None)
def test_cells_add_up_whatever_is_done(shares: bool, operations: list[tuple[str, int, int, int]]) -> None:
    slots = Slots(replace(SPEC, n_slots=5, copy_shares_memory=shares))
    held: list[list[object]] = [[] for _ in range(4)]  # the cells of each slot, one object each
    for slot in [slots.take_free() for _ in range(4)]:
        assert slot is not None
    for kind, a, b, n in operations:
        slot = slots[a]
        if kind == "grow" and n:
            slots.grow(slot, n)
            held[a] = held[a] + [object() for _ in range(n)]
        elif kind == "cut":
            n = min(n, slot.n_held)
            slots.cut(slot, n)
            held[a] = held[a][:n]
        elif kind == "copy" and a != b:
            slots.cut(slots[b], 0)
            n = min(n, slot.n_held)
            if n:
                slots.copy(slot, slots[b], n)
            held[b] = held[a][:n] if shares else [object() for _ in range(n)]
        assert [s.n_held for s in (slots[i] for i in range(4))] == [len(h) for h in held]
        assert slots.used_cells == len({id(cell) for h in held for cell in h})
        slots.check_integrity()


def test_freeing_twice_frees_once() -> None:
    slots = Slots(SPEC)
    slot = slots.take_free()
    assert slot is not None
    slots.grow(slot, 10)
    slots.free(slot)
    slots.free(slot)
    taken = [slots.take_free() for _ in range(SPEC.n_slots)]
    assert len([s for s in taken if s is not None]) == SPEC.n_slots - 1
    assert slots.free_cells == SPEC.pool_tokens


def test_retained_slots_come_least_recently_used_first() -> None:
    slots = Slots(SPEC)
    a, b, c = (slots.take_free() for _ in range(3))
    assert a is not None
    assert b is not None
    assert c is not None
    for slot in (a, b, c):
        slots.retain(slot)
    slots.touch(a)
    assert list(slots.retained()) == [b, c, a]


def test_retained_cells_are_those_that_nobody_at_work_holds() -> None:
    slots = Slots(SPEC)
    a, b, c = (slots.take_free() for _ in range(3))
    assert a is not None
    assert b is not None
    assert c is not None
    slots.grow(a, 50)
    slots.copy(a, b, 30)
    slots.copy(a, c, 20)
    slots.grow(c, 5)
    slots.retain(a)
    assert (slots.retained_cells, slots.frees_cells(a)) == (20, True)
    slots.cut(a, 30)
    assert (slots.retained_cells, slots.frees_cells(a)) == (0, False)
    slots.retain(b)
    slots.retain(c)
    assert slots.retained_cells == 35
    assert slots.frees_cells(a)


def _slot(n_held: int, **facts: object) -> Slot:
    return Slot(0, n_held=n_held, **facts)  # type: ignore[arg-type]


def test_any_cut_is_usable_where_the_rule_is_any() -> None:
    assert usable_cut(SPEC, _slot(50), 30, can_take_over=False).n_tokens == 30


@pytest.mark.parametrize(("first_held", "n_common", "usable"), [(0, 30, 30), (40, 50, 50), (41, 50, 0), (1, 5, 0)])
def test_window_cut_needs_its_window(first_held: int, n_common: int, usable: int) -> None:
    spec = replace(SPEC, prefix_rule=PrefixRule.WINDOW, window_tokens=10)
    assert usable_cut(spec, _slot(60, first_held=first_held), n_common, can_take_over=True).n_tokens == usable


def test_uncuttable_state_is_used_whole_or_from_a_checkpoint() -> None:
    spec = replace(SPEC, prefix_rule=PrefixRule.CHECKPOINT)
    slot = _slot(50, checkpoints=[Checkpoint(10, b"a"), Checkpoint(30, b"b")])
    assert usable_cut(spec, slot, 50, can_take_over=False).checkpoint is None
    assert usable_cut(spec, slot, 49, can_take_over=False).checkpoint == Checkpoint(30, b"b")
    assert usable_cut(spec, slot, 29, can_take_over=False).n_tokens == 10
    assert usable_cut(spec, slot, 9, can_take_over=False).n_tokens == 0


def test_settling_slot_is_taken_over_but_never_copied() -> None:
    spec = replace(SPEC, prefix_rule=PrefixRule.CHECKPOINT, max_rollback_tokens=4)
    slot = _slot(50, is_settling=True, checkpoints=[Checkpoint(10, b"a")])
    assert usable_cut(spec, slot, 50, can_take_over=False).n_tokens == 0
    assert usable_cut(spec, slot, 50, can_take_over=True).n_tokens == 50
    assert usable_cut(spec, slot, 40, can_take_over=False).n_tokens == 0
    assert usable_cut(spec, slot, 40, can_take_over=True).checkpoint == slot.checkpoints[0]


@given(st.lists(st.integers(0, 2)), st.lists(st.integers(0, 2)))
def test_common_prefix_is_the_longest(a: list[int], b: list[int]) -> None:
    n = common_prefix(a, b)
    assert a[:n] == b[:n]
    assert n == min(len(a), len(b)) or a[n] != b[n]
