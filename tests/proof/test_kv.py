"""The proof runs on kept KV: their own arithmetic, and all cases once on an engine that computes nothing."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from localllm.bench.client.calls import End, Outcome
from localllm.bench.stats.summaries import Estimate
from localllm.errors import UsageError
from proof import kv_case_asks, kv_cases, kv_figures, kv_streams
from proof.kv_answers import Answer, Count, Verdict, verdict
from proof.kv_cases import is_right, kinds, run
from proof.kv_measures import Rounds
from proof.kv_parts import Asked, Experiment, Part
from proof.kv_sides import TokenPrompts
from proof.kv_streams import gaps_ms, pooled_p95_ratio
from proof.output import run_measured
from proof.sides import BurstFailed, HttpSide


@pytest.fixture
def model(tiny: Path) -> Path:
    """Any file that is a model: the fake engine does not read it."""
    return sorted(tiny.glob("*.gguf"))[0]


# --- cases


def test_all_cases_are_right_on_an_exact_engine_and_each_did_what_it_is_for(model: Path, tmp_path: Path) -> None:
    found = run(kinds(1)[0], model, None, tmp_path)
    assert len(found["cases"]) == 13
    bad = ("near", "wrong", "failed")
    assert {name: count["notes"] for name, count in found["cases"].items() if any(count[b] for b in bad)} == {}
    assert {name: count for name, count in found["cases"].items() if count["proven"] < count["owed"]} == {}
    assert all(count["proof"] for name, count in found["cases"].items() if not name.startswith("control"))
    assert is_right(found)


COUNT: dict[str, Any] = {"n": 4, "right": 4, "near": 0, "wrong": 0, "failed": 0, "owed": 2, "proven": 3}
FOUND: dict[str, Any] = {"cases": {"a": COUNT, "control: b": {**COUNT, "owed": 0, "proven": 0}}}


@pytest.mark.parametrize(
    ("case", "field", "value"),
    [
        ("a", "wrong", 1),
        ("a", "failed", 1),
        ("a", "proven", 1),
        ("a", "n", 0),
        ("control: b", "right", 2),
        ("control: b", "failed", 1),
    ],
)
def test_a_wrong_answer_a_case_in_vain_and_a_control_that_finds_nothing_fail_the_run(
    case: str, field: str, value: int
) -> None:
    assert is_right(FOUND)
    changed = copy.deepcopy(FOUND)
    changed["cases"][case][field] = value
    assert not is_right(changed)


COLD = Answer("ab", ("a", "b"), ({"a": -0.5, "x": -0.9}, {"b": -0.1, "y": -4.0}), 9)


def told(text: str, *places: dict[str, float]) -> Answer:
    return Answer(text, tuple(text), places, 9)


@pytest.mark.parametrize(
    ("found", "is_exact", "judged"),
    [
        (COLD, True, Verdict.RIGHT),
        (told("ab", {"a": -0.5001, "x": -0.9}, COLD.places[1]), True, Verdict.WRONG),
        (told("ab", {"a": -0.7, "x": -0.8}, COLD.places[1]), False, Verdict.RIGHT),
        (told("xb", {"a": -0.9, "x": -0.6}, {"b": -9.0, "y": -0.1}), False, Verdict.NEAR),
        (told("xb", {"a": -0.9, "x": -0.6}, {"b": -9.0, "y": -0.1}), True, Verdict.WRONG),
        (told("ay", COLD.places[0], {"b": -0.8, "y": -3.3}), False, Verdict.WRONG),  # it was no tie
        (told("ab", {"a": -0.5, "x": -2.0}, COLD.places[1]), False, Verdict.WRONG),  # the same text, by luck
        (replace(COLD, failure="status 500"), False, Verdict.FAILED),
    ],
)
def test_another_text_is_right_only_from_a_near_tie_on(found: Answer, is_exact: bool, judged: Verdict) -> None:
    assert verdict(COLD, found, is_exact=is_exact) is judged


def test_an_answer_that_had_all_its_prompt_from_the_cache_is_none() -> None:
    usage = {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 9}}
    logprobs = {"tokens": ["a"], "top_logprobs": [{"a": -0.5}]}
    body = {"choices": [{"text": "a", "logprobs": logprobs}], "usage": usage}
    assert Answer.of(body).failure
    usage["prompt_tokens_details"] = {"cached_tokens": 8}
    assert Answer.of(body) == Answer("a", ("a",), ({"a": -0.5},), 9, 8)


@dataclass
class KeepsNothing:
    """A server whose counters stand still."""

    n_asked: int = 0

    def sources(self) -> dict[str, int]:
        return {"computed": 100}


def test_right_answers_that_came_from_no_disk_prove_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_case_asks, "answers", lambda server, prompts, n_gen: [COLD] * len(prompts))
    server: Any = KeepsNothing()
    cases = kv_case_asks.Cases(server, server, None, random.Random(0), 40, 4, 1, 8)
    cases.check_disk("restarted", [cases.fresh()], owed=1)
    cases.check("repeated", [cases.fresh()] * 2, owed=1)
    counts = cases.counts.values()
    assert [(count.right, count.owed, count.proven) for count in counts] == [(1, 1, 0), (2, 1, 0)]


def test_some_engines_alone_do_not_replace_the_run_of_all(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        kv_cases.main(["--engines", kv_cases.FAKE])
    assert "-o FILE" in capsys.readouterr().err


def test_a_count_tells_what_was_seen() -> None:
    assert Count("hits", 3, 2, 1, owed=2, proven=1).told().endswith("hits: 1 (2 or more asked)")


# --- figures: what is owed

OWED, OTHER = Asked("a ratio", 1.05), Asked("a speed", 2.0, at_least=True, unit="GB/s")
GOOD = OWED.of(Estimate(1.0, 0.9, 1.2, 5))


def test_a_figure_that_is_owed_and_not_there_is_missed() -> None:
    reached, missed = Experiment("x", [OWED, OTHER], Part).figures(Part([GOOD]))
    assert (reached["what"], reached["reached"], reached["low"], reached["high"]) == ("a ratio", True, 0.9, 1.2)
    assert (missed["what"], missed["reached"], missed["value"], missed["unit"]) == ("a speed", False, None, "GB/s")
    assert missed["missing"] == "not measured"


def test_what_proves_nothing_is_missed_however_good_its_numbers() -> None:
    (line,) = Experiment("x", [OWED], Part).figures(Part([GOOD], lacks="nothing was written"))
    assert (line["reached"], line["missing"]) == (False, "nothing was written")


def test_a_missed_figure_fails_the_run(tmp_path: Path) -> None:
    lines = Experiment("x", [OWED], Part).figures(Part())
    assert run_measured(tmp_path / "x.json", {}, lambda folder, found: found.update(figures=lines)) == 1


def test_parts_add_up_and_so_does_what_they_lack() -> None:
    both = Part([GOOD], lacks="a") + Part([], (), {"b": 1}) + Part(lacks="c")
    assert (len(both.figures), both.facts, both.lacks) == (1, {"b": 1}, "a; c")


@dataclass
class Told:
    """A server whose counters were scripted, and which has files in its folder."""

    name: str = "kept"
    folder: Path = Path()
    counters: dict[str, float] = field(default_factory=dict)
    from_tiers: int = 0
    side: Any = None
    serving: Any = None

    def samples(self) -> dict[str, float]:
        return self.counters

    def sources(self) -> dict[str, int]:
        return {}

    def stop(self) -> None: ...


def test_a_pool_that_was_never_short_is_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_streams, "ask", lambda *of: [])
    server: Any = Told()
    assert kv_streams.pool_use(server, draw()).lacks
    server.counters["localllm_kv_cache_usage_at_first_refusal_ratio"] = 0.97
    assert not kv_streams.pool_use(server, draw()).lacks


def test_what_was_left_on_disk_is_held_against_the_budget_once_something_was(tmp_path: Path) -> None:
    server: Any = Told(folder=tmp_path)
    assert "0.00 GB" in kv_streams.left_on_disk(server, 100, OWED).lacks
    (tmp_path / "a.kv").write_bytes(bytes(120))
    part = kv_streams.left_on_disk(server, 100, OWED)
    assert (part.figures[0].value, part.figures[0].reached, part.lacks) == (1.2, False, "")


STREAM = Outcome("", 0, End.ANSWER, True, 200, 0.0, 0.0, 0.9, tuple(0.01 * n for n in range(90)))
BESIDE = Outcome("", 0, End.ANSWER, True, 200, 0.3, 0.3, 0.4, (0.4,))


@pytest.fixture
def scripted_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    async def beside(*of: Any) -> tuple[Outcome, Outcome]:
        return STREAM, BESIDE

    monkeypatch.setattr(kv_streams, "beside", beside)
    monkeypatch.setattr(kv_streams, "burst_of", lambda *of: None)
    monkeypatch.setattr(kv_streams, "first_ms", lambda *of: 1.0)
    monkeypatch.setattr(kv_streams, "SETTLE_S", 0.0)


@pytest.mark.usefixtures("scripted_streams")
def test_streams_beside_which_nothing_was_written_or_put_back_prove_nothing() -> None:
    kept: Any = Told("kept", side=HttpSide("kept", None))  # type: ignore[arg-type]
    off: Any = Told("off", side=HttpSide("off", None))  # type: ignore[arg-type]
    assert "0 of 3 rounds" in kv_streams.restored_beside(kept, draw(), 3).lacks
    assert "0 of 3 rounds" in kv_streams.written_beside(kept, off, draw(), 3).lacks


@pytest.mark.usefixtures("scripted_streams")
def test_streams_beside_what_was_written_give_mean_and_p95(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = iter(range(0, 1000, 20))
    monkeypatch.setattr(kv_streams, "written_blocks", lambda server: next(numbers))
    kept: Any = Told("kept", side=HttpSide("kept", None))  # type: ignore[arg-type]
    off: Any = Told("off", side=HttpSide("off", None))  # type: ignore[arg-type]
    part = kv_streams.written_beside(kept, off, draw(), 3)
    assert [figure.what for figure in part.figures] == [kv_streams.WRITTEN_MEAN.what, kv_streams.WRITTEN_P95.what]
    assert part.lacks == ""
    assert all(figure.low is not None for figure in part.figures)


def draw() -> TokenPrompts:
    return TokenPrompts([1, 2, 3], list(range(50, 200)), random.Random(0))


# --- figures: parts measured anew


def whole_run() -> dict[str, Any]:
    """Return a run of all parts, a line each."""
    lines = [{"part": name, "what": name, "reached": True} for name in kv_figures.NAMES]
    parts = {name: {"date": "then"} for name in kv_figures.NAMES}
    head = {"date": "then", "model": {"file": "a"}, "machine_line": "m", "settings": {"pairs": 2}}
    return {**head, "figures": lines, "beside": [], "left_out": {}, "facts": {}, "parts": parts, "partial": False}


def test_parts_measured_anew_replace_their_own_and_keep_their_time() -> None:
    line = {"part": "hits", "what": "hits", "reached": False}
    found: dict[str, Any] = {
        "figures": [line],
        "beside": [],
        "left_out": {},
        "facts": {},
        "parts": {"hits": {"date": "now"}},
    }
    kv_figures.merge(whole_run(), found)
    assert [one["part"] for one in found["figures"]] == list(kv_figures.NAMES)
    assert [one["part"] for one in found["figures"] if not one["reached"]] == ["hits"]
    assert (found["parts"]["hits"], found["parts"]["never"]) == ({"date": "now"}, {"date": "then"})


@pytest.mark.parametrize("field", ["model", "machine_line", "settings", "parts"])
def test_parts_of_another_run_are_not_mixed_into_it(tmp_path: Path, field: str) -> None:
    path, run = tmp_path / "kv.json", whole_run()
    with pytest.raises(UsageError):
        kv_figures.mergeable(path, run)
    path.write_text(json.dumps(run))
    assert kv_figures.mergeable(path, run) == run
    path.write_text(json.dumps({**run, field: {}}))
    with pytest.raises(UsageError):
        kv_figures.mergeable(path, run)


def test_requests_that_never_hit_come_first_and_every_part_has_its_name() -> None:
    plan = kv_figures.Plan(Path("m.gguf"), 1, 1, 2, 3, None, frozenset())
    off: Any = Scripted("off")
    found = list(kv_figures.experiments(plan, Path(), rounds_of("ours", "x"), off))
    assert tuple(one.name for one in found) == kv_figures.NAMES
    assert found[0].name == "never"
    assert [one.name for one in found if not one.owes] == ["room"]


# --- what is drawn and reckoned


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
    return Rounds(ours, others, draw())  # type: ignore[arg-type]


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
    call = HttpSide("off", None, kv_figures.NOTHING_KEPT).call([1, 2], 3)  # type: ignore[arg-type]
    assert b'"cache":"off"' in (call.body or b"")
