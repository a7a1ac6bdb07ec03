"""Who makes room, who is no longer needed, and when to look next: tables."""

from __future__ import annotations

from pathlib import Path

import pytest

from localllm.errors import ModelRefused, NotEnoughMemory, Unavailable
from localllm.models.kv_types import KvTypes
from localllm.runtime.config import LoadConfig
from localllm.worker.eviction import Held, due_in_s, estimate_bytes, least_used, make_room, unused

GB = 10**9
OLD = Held("old", 2 * GB, False, False, used_s=10.0)
NEW = Held("new", 2 * GB, False, False, used_s=90.0)
BUSY = Held("busy", 3 * GB, True, False, used_s=5.0)
PINNED = Held("pinned", 1 * GB, False, True, used_s=1.0)
JUST_ASKED = Held("asked", 2 * GB, False, False, used_s=99.5)
NOW_S = 100.0


@pytest.mark.parametrize(
    ("need_gb", "held", "limit_gb", "going"),
    [
        (1, [], 4, ()),
        (2, [OLD], 4, ()),
        (3, [OLD], 4, ("old",)),
        (3, [NEW, OLD], 6, ("old",)),
        (4, [NEW, OLD, PINNED], 5, ("old", "new")),
        (2, [NEW, OLD, BUSY], 9, ()),
        (2, [NEW, OLD, BUSY], 8, ("old",)),
    ],
)
def test_the_least_recently_used_make_room_and_no_more_than_needed(
    need_gb: int, held: list[Held], limit_gb: int, going: tuple[str, ...]
) -> None:
    assert make_room(need_gb * GB, held, limit_gb * GB, NOW_S) == going


@pytest.mark.parametrize("in_the_way", [BUSY, JUST_ASKED])
def test_models_at_work_are_waited_for(in_the_way: Held) -> None:
    with pytest.raises(Unavailable) as caught:
        make_room(3 * GB, [in_the_way, OLD], 4 * GB, NOW_S)
    assert caught.value.details["retry_after_s"] == 5


def test_what_never_fits_is_told_with_its_numbers() -> None:
    with pytest.raises(NotEnoughMemory, match=r"4\.00 GB.*4\.00 GB that --max-memory.*1\.00 GB"):
        make_room(4 * GB, [PINNED, OLD], 4 * GB, NOW_S)
    with pytest.raises(NotEnoughMemory):
        make_room(5 * GB, [], 4 * GB, NOW_S)


def test_one_at_a_time_goes_the_one_unused_for_longest() -> None:
    assert least_used([NEW, OLD, BUSY, PINNED], NOW_S) == "old"
    assert least_used([BUSY, PINNED, JUST_ASKED], NOW_S) is None


def test_models_unused_for_long_go_but_not_pinned_or_busy_ones() -> None:
    assert unused([OLD, NEW, BUSY, PINNED], 60.0, NOW_S) == ("old",)
    assert unused([OLD, NEW, BUSY, PINNED], 5.0, NOW_S) == ("old", "new")
    assert unused([JUST_ASKED], 0.1, NOW_S) == ()


@pytest.mark.parametrize(
    ("held", "keep_alive_s", "due_s"),
    [
        ([], 60.0, None),
        ([PINNED], 60.0, None),
        ([NEW, OLD], 600.0, 510.0),
        ([OLD], 60.0, 0.0),
        ([BUSY], 60.0, 60.0),
        ([JUST_ASKED], 0.1, 0.5),
    ],
)
def test_the_next_look_is_when_one_may_be_due(held: list[Held], keep_alive_s: float, due_s: float | None) -> None:
    assert due_in_s(held, keep_alive_s, NOW_S) == due_s


def test_a_look_that_finds_a_model_busy_plans_another_not_at_once() -> None:
    due_s = due_in_s([BUSY, OLD], 0.01, NOW_S)
    assert due_s == 0.0
    assert due_in_s([BUSY], 0.01, NOW_S) == 1.0


def test_the_estimate_knows_the_context_and_its_types(tiny: Path) -> None:
    path = next(iter(sorted(tiny.glob("*.gguf"))))
    small = estimate_bytes(path, LoadConfig(ctx=256))
    assert small > path.stat().st_size
    exact = [LoadConfig(ctx=4096, parallel=n, deterministic=True) for n in (1, 4)]
    assert estimate_bytes(path, exact[1]) > estimate_bytes(path, exact[0])  # a context each
    assert estimate_bytes(path, LoadConfig(ctx=4096)) > small
    assert estimate_bytes(path, LoadConfig(ctx=4096, kv=KvTypes("f32", "f32"))) > estimate_bytes(
        path, LoadConfig(ctx=4096)
    )


def test_what_is_no_model_has_no_estimate(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_text("{}")
    with pytest.raises(ModelRefused):
        estimate_bytes(path, LoadConfig())
