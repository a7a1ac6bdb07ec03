"""The proof runs on kept KV: their own arithmetic, and all cases once on an engine that computes nothing."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from localllm.bench.client.calls import End, Outcome
from proof.kv_cases import is_right, kinds, run
from proof.kv_measures import Rounds
from proof.kv_sides import TokenPrompts
from proof.kv_streams import gaps_ms, pooled_p95_ratio
from proof.sides import BurstFailed, HttpSide


@pytest.fixture
def model(tiny: Path) -> Path:
    """Any file that is a model: the fake engine does not read it."""
    return sorted(tiny.glob("*.gguf"))[0]


def test_all_cases_are_right_on_an_exact_engine_and_each_hit_is_one(model: Path, tmp_path: Path) -> None:
    found = run(kinds(1)[0], model, None, tmp_path)
    assert len(found["cases"]) == 13
    assert {name: count["ends"] for name, count in found["cases"].items() if count["other"] or count["failed"]} == {}
    assert is_right(found)


COUNT: dict[str, Any] = {"n": 4, "right": 4, "other": 0, "failed": 0, "cached_tokens": 9, "is_hit": True}
FOUND: dict[str, Any] = {"is_exact": True, "cases": {"a": COUNT, "control: b": {**COUNT, "is_hit": False}}}


@pytest.mark.parametrize(
    ("case", "field", "value"),
    [("a", "other", 1), ("a", "failed", 1), ("a", "cached_tokens", 0), ("a", "n", 0), ("control: b", "right", 2)],
)
def test_a_wrong_answer_a_case_in_vain_and_a_control_that_finds_nothing_fail_the_run(
    case: str, field: str, value: int
) -> None:
    assert is_right(FOUND)
    changed = copy.deepcopy(FOUND)
    changed["cases"][case][field] = value
    assert not is_right(changed)


def test_as_shipped_other_texts_are_counted_and_failures_fail_the_run() -> None:
    shipped = copy.deepcopy(FOUND) | {"is_exact": False}
    shipped["cases"]["a"]["other"] = 1
    assert is_right(shipped)
    shipped["cases"]["a"]["failed"] = 1
    assert not is_right(shipped)


def test_fresh_prompts_share_nothing_and_others_go_on_from_a_prefix() -> None:
    draw = TokenPrompts([1, 2, 3], [50, 51, 52], random.Random(0))
    first, second = draw.fresh(8), draw.fresh(8)
    assert (len(first), first[0] != second[0]) == (8, True)
    assert draw.on(first, 4)[:8] == first


def test_gaps_are_those_that_overlap_the_window() -> None:
    stream = Outcome("", 0, End.ANSWER, True, 200, 0.0, 0.0, 1.0, (0.1, 0.2, 0.35, 0.55, 0.8))
    assert gaps_ms(stream, 0.3, 0.5) == pytest.approx([150.0, 200.0])


def test_the_ratio_of_percentiles_is_of_all_pairs_together() -> None:
    ratio, low, high = pooled_p95_ratio([([12.0] * 10, [10.0] * 10)] * 4)
    assert (ratio, low, high) == pytest.approx((1.2, 1.2, 1.2))


@dataclass
class Scripted:
    """A server that is only asked for its name."""

    name: str
    side: Any = None
    calls: list[int] = field(default_factory=list)

    def start(self) -> None: ...

    def stop(self) -> None: ...


def rounds_of(*names: str) -> Rounds:
    ours, *others = [Scripted(name) for name in names]
    return Rounds(ours, others, TokenPrompts([1], [], random.Random(0)))  # type: ignore[arg-type]


def test_servers_take_turns_and_others_only_in_the_first_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proof.kv_measures.SETTLE_S", 0.0)
    turns: list[str] = []
    rounds_of("ours", "x", "y").take(3, 2, lambda server, at: turns.append(f"{server.name}{at}"))
    assert turns == ["ours0", "x0", "y0", "x1", "y1", "ours1", "ours2"]


def test_another_server_that_fails_is_left_out_and_ours_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proof.kv_measures.SETTLE_S", 0.0)

    def fails(names: Sequence[str]) -> Any:
        def one(server: Any, at: int) -> str:
            if server.name in names:
                raise BurstFailed("it fell over")
            return "taken"

        return one

    rounds = rounds_of("ours", "x")
    assert rounds.take(2, 2, fails(["x"])) == {"ours": ["taken"] * 2}
    assert rounds.left_out == {"x": "it fell over"}
    with pytest.raises(BurstFailed):
        rounds_of("ours", "x").take(1, 1, fails(["ours"]))


def test_a_side_without_tiers_asks_to_keep_nothing() -> None:
    from proof.kv_figures import NOTHING_KEPT

    call = HttpSide("off", None, NOTHING_KEPT).call([1, 2], 3)  # type: ignore[arg-type]
    assert b'"cache":"off"' in (call.body or b"")
