"""What two files say of each other: verdicts, false alarms, refusals, pairs, what is told."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from localllm.bench.compare.cell import Cell
from localllm.bench.compare.comparison import Comparison, Line, Verdict, compare
from localllm.bench.compare.read import cells_of
from localllm.bench.measures import measure
from localllm.errors import UsageError
from tests.bench.compare import made_up


def cells(value: Any, name: str = "x.json") -> list[Cell]:
    return cells_of(msgspec.json.encode(value), name)


def compared(a: Any, b: Any, **more: Any) -> Comparison:
    return compare(cells(a), cells(b), **more)


def line(of: Comparison, name: str) -> Line:
    found = of.cells[0].line(measure(name))
    assert found is not None
    return found


def run(seed: int, *, factor: float = 1.0, n: int = 60, spread: float = 0.1, **more: Any) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    first = 0.2 * factor * np.exp(spread * rng.normal(size=n))
    return made_up.run(first, 0.02 * np.exp(0.05 * rng.normal(size=n)), **more)


def test_a_tenth_slower_is_found_and_a_tenth_quicker_too() -> None:
    worse = line(compared(made_up.serve(run(1)), made_up.serve(run(2, factor=1.1))), "ttft_p50")
    better = line(compared(made_up.serve(run(1)), made_up.serve(run(2, factor=1 / 1.1))), "ttft_p50")
    assert (worse.verdict, better.verdict) == (Verdict.WORSE, Verdict.BETTER)
    assert worse.change.low is not None
    assert worse.change.high is not None
    assert 0 < worse.change.low < worse.change.change < worse.change.high
    assert worse.change.p_ranks is not None
    assert worse.change.p_ranks < 0.01


def test_what_did_not_change_is_not_told_as_a_change() -> None:
    found = compared(made_up.serve(run(1)), made_up.serve(run(2, factor=1.1)))
    assert line(found, "tpot_p50").verdict is Verdict.NOT_SHOWN
    assert line(found, "error").verdict is Verdict.NOT_SHOWN


def test_a_file_does_not_differ_from_itself() -> None:
    found = compared(made_up.serve(run(1)), made_up.serve(run(1)))
    assert {each.verdict for each in found.cells[0].lines} <= {Verdict.NOT_SHOWN, Verdict.NOT_TESTED}
    assert all(each.change.change == 0 for each in found.cells[0].lines)


@pytest.mark.parametrize("seed", range(8))
def test_files_swapped_give_the_same_verdicts_mirrored(seed: int) -> None:
    """Of unlike numbers of requests too: which one is called A is the caller's choice."""
    one, other = made_up.serve(run(seed, n=40)), made_up.serve(run(seed + 100, n=48, factor=1.08))
    mirrored = {Verdict.BETTER: Verdict.WORSE, Verdict.WORSE: Verdict.BETTER}
    there, back = compared(one, other), compared(other, one)
    for old, new in zip(there.cells[0].lines, back.cells[0].lines, strict=True):
        assert mirrored.get(old.verdict, old.verdict) is new.verdict
        assert old.p_adjusted == pytest.approx(new.p_adjusted)
        if old.change.is_relative and old.change.low is not None and new.change.high is not None:
            assert (1 + old.change.low) * (1 + new.change.high) == pytest.approx(1)


def test_a_rate_from_one_run_has_an_interval_from_its_stretches() -> None:
    found = line(compared(made_up.serve(run(1)), made_up.serve(run(2, factor=2.0))), "output_throughput")
    assert found.verdict is Verdict.WORSE
    assert found.change.p is not None


def test_errors_are_told_in_points() -> None:
    broken = run(2, errors=["lost"] * 30 + [""] * 30, error=0.5)
    found = line(compared(made_up.serve(run(1)), made_up.serve(broken)), "error")
    assert (found.change.is_relative, found.change.change, found.verdict) == (False, 0.5, Verdict.WORSE)
    assert found.change.relative == float("inf")


ALARMS = 16
"""Of 200 comparisons of a thing with itself, as many as may be told as changes."""


@pytest.mark.parametrize(("n", "spread"), [(30, 0.3), (120, 0.2)])
def test_comparing_a_thing_with_itself_alarms_seldom(n: int, spread: float) -> None:
    """Any line of a comparison counts: three latencies with median and p95, and two rates."""
    rng = np.random.default_rng(11)

    def one() -> list[Cell]:
        whole = made_up.run(
            0.2 * np.exp(spread * rng.normal(size=n)), 0.02 * np.exp(spread * rng.normal(size=n)), itls=[]
        )
        return cells(made_up.serve(whole))

    alarms = 0
    for _ in range(200):
        found = compare(one(), one())
        alarms += any(each.verdict in (Verdict.BETTER, Verdict.WORSE) for each in found.cells[0].lines)
    assert alarms <= ALARMS


@pytest.mark.parametrize("likeness", [0.0, 0.6])
def test_rounds_that_drift_alarm_seldom(likeness: float) -> None:
    """The machine's speed drifts by 3 % from round to round, measured A B A B, five rounds a side."""
    rng = np.random.default_rng(12)
    alarms = 0
    for _ in range(200):
        drift = [rng.normal()]
        for _ in range(9):
            drift.append(likeness * drift[-1] + (1 - likeness**2) ** 0.5 * rng.normal())
        sides: list[list[dict[str, Any]]] = [[], []]
        for index, level in enumerate(drift):
            first = 0.2 * np.exp(0.03 * level + 0.2 * rng.normal(size=30))
            sides[index % 2].append(made_up.run(first, [0.02] * 30, itls=[], tpots=[], latencies=[]))
        found = compare(*(cells(made_up.contract(side)) for side in sides))
        alarms += any(each.verdict in (Verdict.BETTER, Verdict.WORSE) for each in found.cells[0].lines)
    assert alarms <= ALARMS


def test_rounds_show_what_one_run_cannot() -> None:
    rounds = [[run(10 * side + i, factor=1.04 if side else 1.0, n=100) for i in range(5)] for side in (0, 1)]
    several = line(compared(made_up.contract(rounds[0]), made_up.contract(rounds[1])), "ttft_p50")
    single = line(compared(made_up.serve(rounds[0][0]), made_up.serve(rounds[1][0])), "ttft_p50")
    assert several.verdict is Verdict.WORSE
    assert single.verdict is Verdict.NOT_SHOWN


def test_the_same_requests_are_compared_in_pairs_which_shows_more() -> None:
    rng = np.random.default_rng(5)
    lens = rng.integers(50, 5000, size=60)

    def one(factor: float, *, told: bool) -> dict[str, Any]:
        first = 1e-4 * lens * factor * np.exp(0.05 * rng.normal(size=60))
        return made_up.serve(made_up.run(first, [0.02] * 60, input_lens=lens.tolist() if told else []))

    in_pairs = line(compared(one(1.0, told=True), one(1.1, told=True)), "ttft_p50")
    apart = line(compared(one(1.0, told=False), one(1.1, told=False)), "ttft_p50")
    assert in_pairs.change.is_paired
    assert in_pairs.verdict is Verdict.WORSE
    assert not apart.change.is_paired
    assert apart.verdict is Verdict.NOT_SHOWN


def test_the_first_token_of_the_answer_is_compared_where_models_think() -> None:
    plain = run(1, answer_ttfts=run(1)["ttfts"])
    thinks = run(1, answer_ttfts=[2 * first for first in run(1)["ttfts"]])
    for value, is_told in ((plain, False), (thinks, True)):
        lines = compared(made_up.serve(value), made_up.serve(value)).cells[0].lines
        assert any(each.change.measure.base == "answer_ttft" for each in lines) == is_told


def test_engine_tests_are_compared_by_name_and_three_repetitions_show_nothing() -> None:
    old = [made_up.row(512, 0, [300, 301, 302, 299, 298]), made_up.row(0, 128, [40, 41, 40.5, 40.2, 40.1])]
    new = [made_up.row(0, 128, [36, 36.1, 36.2, 36.3, 36.4]), made_up.row(512, 0, [300.5, 301, 302, 299, 298])]
    found = {cell.name: cell.lines[0] for cell in compared(old, new).cells}
    assert found["tg128"].verdict is Verdict.WORSE
    assert found["tg128"].change.change == pytest.approx(36.2 / 40.2 - 1)
    assert found["pp512"].verdict is Verdict.NOT_SHOWN
    few = compared([made_up.row(0, 128, [40, 41, 42])], [made_up.row(0, 128, [36, 36.1, 36.2])])
    assert few.cells[0].lines[0].verdict is Verdict.NOT_SHOWN


def test_a_number_without_samples_is_told_and_not_judged() -> None:
    rates = [0.2] * 30
    found = compared(made_up.vllm(rates, rates, detailed=False), made_up.vllm([0.4] * 30, rates, detailed=True))
    lines = {each.change.measure.name: each for each in found.cells[0].lines}
    assert lines["ttft_p50"].verdict is Verdict.NOT_TESTED
    assert lines["ttft_p50"].change.change == pytest.approx(1.0)
    assert lines["ttft_p99"].change.p is None


BASE = run(1, n=30)


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (made_up.serve({**BASE, "workload": "rag"}), "Workload: chat in A, rag in B."),
        (made_up.serve({**BASE, "cache": "warm"}), "Cache: cold in A, warm in B."),
        (made_up.serve({**BASE, "seed": 2}), "Seed: 1 in A, 2 in B."),
        (made_up.serve({**BASE, "answers": "natural"}), "Answers: filled in A, natural in B."),
        (made_up.serve({**BASE, "load": {"rate_per_s": 2.0}}), "Load: concurrency 1 in A, rate 2/s in B."),
        (made_up.serve({**BASE, "partial": True}), "B: it was interrupted"),
        (made_up.serve(BASE, partial=True), "B: it was interrupted"),
        (made_up.serve({**BASE, "disturbances": ["it swapped"]}), "B: it was disturbed: it swapped."),
        (made_up.serve(BASE, machine={**made_up.MACHINE, "ram_bytes": 8 << 30}), "Machine: memory: 16.0 GiB, now 8.0"),
        ({**made_up.serve(BASE), "fingerprint": None}, "Machine: only A tells what it ran on."),
        (made_up.contract([{**BASE, "model_id": "other"}]), "Model: small in A, other in B."),
    ],
)
def test_what_is_not_comparable_is_refused_and_forced_with_a_warning(other: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError) as error:
        compared(made_up.serve(BASE), other)
    assert told in error.value.message
    assert "--force" in error.value.hint
    forced = compared(made_up.serve(BASE), other, force=True)
    assert len(forced.warnings) == 1
    assert forced.warnings[0][1:] in error.value.message
    assert line(forced, "ttft_p50").change.change == 0


def test_a_model_known_by_its_hash_may_have_another_name() -> None:
    renamed = made_up.serve({**BASE, "model_id": "other"})
    assert compared(made_up.serve(BASE), renamed).warnings == ()
    renamed["fingerprint"]["model"]["sha256"] = ["ef" * 32]
    with pytest.raises(UsageError, match="Model: small in A, other in B"):
        compared(made_up.serve(BASE), renamed)


def test_a_changed_version_is_told_and_no_reason_to_refuse() -> None:
    new = made_up.serve(BASE)
    new["fingerprint"]["software"]["llama-cpp-python"] = "0.3.37"
    assert any("0.3.37" in note for note in compared(made_up.serve(BASE), new).notes)


def test_an_edited_fingerprint_is_no_crash() -> None:
    """Memory of more bytes than a float holds."""
    data = msgspec.json.encode(made_up.serve(run(1), machine={**made_up.MACHINE, "ram_bytes": 7}))
    huge = cells_of(data.replace(b'"ram_bytes":7', b'"ram_bytes":1' + b"0" * 400), "x.json")
    with pytest.raises(UsageError, match="cannot be read"):
        compare(cells(made_up.serve(run(1))), huge)


def test_files_without_fingerprint_are_compared_with_a_caveat_where_the_machine_agrees() -> None:
    old, new = [made_up.row(0, 128, [40.0] * 5)], [made_up.row(0, 128, [40.0] * 5, n_threads=4)]
    notes = compared(old, new).notes
    assert "neither file has a fingerprint" in notes[0]
    assert "n_threads: 2 in A, 4 in B" in notes
    with pytest.raises(UsageError, match="Machine: Some CPU in A, Other CPU in B"):
        compared(old, [made_up.row(0, 128, [40.0] * 5, cpu_info="Other CPU")])
    with pytest.raises(UsageError, match=r"Model: small\.gguf in A, big\.gguf in B"):
        compared(old, [made_up.row(0, 128, [40.0], model_filename="big.gguf", model_size=7, model_n_params=9)])
    rates = [0.2] * 30
    (caveat,) = compared(made_up.vllm(rates, rates, detailed=True), made_up.vllm(rates, rates, detailed=True)).notes
    assert "whether both ran on one machine is not known" in caveat


def test_runs_are_paired_by_what_they_are_and_the_rest_is_named() -> None:
    cold, warm, rag = BASE, {**BASE, "cache": "warm"}, {**BASE, "workload": "rag"}
    found = compared(made_up.serve(cold, warm), made_up.serve(rag, warm))
    assert [cell.name for cell in found.cells] == ["chat, warm, concurrency 1"]
    assert "chat, cold, concurrency 1: only in A" in found.notes
    assert "rag, cold, concurrency 1: only in B" in found.notes


def test_tests_of_one_name_are_told_apart_by_what_varies() -> None:
    found = [made_up.row(0, 128, [40.0 * n] * 5, n_threads=n) for n in (1, 2)]
    assert [cell.name for cell in compared(found, found[::-1]).cells] == ["tg128, n_threads 1", "tg128, n_threads 2"]
    twice = compared([*found, found[0]], found)
    assert [cell.name for cell in twice.cells] == ["tg128, n_threads 2"]
    assert "tg128, n_threads 1: 2 times in A, none of them used" in twice.notes


def test_a_contract_s_only_candidate_is_compared_with_a_plain_run() -> None:
    found = compared(made_up.serve(BASE), made_up.contract([BASE]))
    assert [cell.name for cell in found.cells] == ["chat, cold, concurrency 1"]
    assert "candidate: none named in A, ours in B" in found.notes


def test_files_with_nothing_in_common_are_refused() -> None:
    with pytest.raises(UsageError, match=r"nothing in common\. A: pp512\. B: tg128"):
        compared([made_up.row(512, 0, [1.0])], [made_up.row(0, 128, [1.0])])


def test_measures_asked_for_are_added_and_unknown_ones_refused() -> None:
    assert line(compared(made_up.serve(BASE), made_up.serve(BASE), also=["ttft_p99"]), "ttft_p99")
    with pytest.raises(UsageError, match="neither file has queue_p95"):
        compared(made_up.serve(BASE), made_up.serve(BASE), also=["queue_p95"])
    with pytest.raises(UsageError, match="'speed' is no measure"):
        compared(made_up.serve(BASE), made_up.serve(BASE), also=["speed"])
