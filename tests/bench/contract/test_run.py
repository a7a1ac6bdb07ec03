"""Candidates are measured in turn, one at a time; what cannot be used is told, and every end keeps what there is."""

from __future__ import annotations

from typing import Any

import pytest

from localllm.bench.contract.ranking import TOO_FEW
from localllm.bench.contract.run import ContractRun
from localllm.bench.serving.probing.differences import Difference
from localllm.errors import ServerUnreachable, UsageError
from tests.bench.contract.stand_ins import TWO, FakeRuns, FakeTools, Listener, cancelling, contract

RULE = """
[[rule]]
candidate = "{candidate}"
measure = "{measure}"
"""


def measured(tools: FakeTools, text: str = "", *, rounds: int = 2) -> tuple[dict[str, Any], Listener]:
    told = Listener()
    run = ContractRun(contract(text, rounds=rounds), tools, told, cancelling)
    run.run()
    return run.document(), told


def cell(document: dict[str, Any], candidate: str) -> dict[str, Any]:
    (found,) = (cell for cell in document["cells"] if cell["candidate"] == candidate)
    return dict(found)


def test_candidates_run_one_at_a_time_and_change_places_every_round() -> None:
    tools = FakeTools()
    measured(tools, rounds=3)
    starts = [line.removeprefix("start ") for line in tools.log if line.startswith("start ")]
    assert starts == ["A", "B", *"AB", *"BA", *"AB"]
    for before, after in zip(tools.log, tools.log[1:], strict=False):
        assert not after.startswith("start") or before.startswith("stop")


def test_from_the_second_round_on_it_is_told_how_much_is_left() -> None:
    _, told = measured(FakeTools(), rounds=2)
    assert "round 1 of 2, A: start" in told.shown
    assert "round 2 of 2, about a minute left, A: start" in told.shown


def test_the_document_holds_every_run_with_its_round() -> None:
    document, told = measured(FakeTools(gap_ms=lambda name, n: 10.0 if name == "A" else 20.0))
    assert not document["partial"]
    assert document["passed"]
    assert [run["round"] for run in cell(document, "A")["rounds"]] == [1, 2]
    assert cell(document, "A")["workload"] == "chat"
    assert (cell(document, "A")["cache"], cell(document, "A")["load"]) == ("cold", "concurrency 2")
    assert (cell(document, "A")["n_used"], cell(document, "A")["n_disturbed"]) == (2, 0)
    assert cell(document, "A")["rounds"][0]["ready_ms"] == pytest.approx(250)
    assert [c["ready_s"] for c in document["candidates"]] == [[0.25] * 3] * 2
    assert all(saved["partial"] for saved in told.documents)
    assert len(told.documents) == 1 + 2 * 2


def test_answers_are_filled_only_where_all_candidates_fill_them() -> None:
    both, one = FakeTools(), FakeTools(fills={"B": False})
    measured(both)
    measured(one)
    assert all(spec.fills_length for spec in both.specs)
    assert not any(spec.fills_length for spec in one.specs)


def test_a_candidate_left_out_has_no_say_in_how_answers_are_filled() -> None:
    tools = FakeTools(fills={"B": False}, fails=lambda name, n: UsageError("no") if name == "B" else None)
    measured(tools)
    assert all(spec.fills_length for spec in tools.specs)


def test_a_disturbed_run_is_repeated_and_does_not_count() -> None:
    tools = FakeTools(disturbed=lambda name, n: "others took the cores" if (name, n) == ("A", 1) else "")
    document, told = measured(tools)
    assert (cell(document, "A")["n_used"], cell(document, "A")["n_disturbed"]) == (2, 1)
    assert [run["round"] for run in cell(document, "A")["rounds"]] == [1, 1, 2]
    assert told.said == []


def test_a_run_that_is_always_disturbed_is_told_and_its_rule_fails_with_the_reason() -> None:
    tools = FakeTools(disturbed=lambda name, n: "others took the cores" if name == "A" else "")
    text = RULE.format(candidate="A", measure="ttft_p50") + 'at_most = "1s"'
    document, told = measured(tools, text)
    assert cell(document, "A")["n_used"] == 0
    assert cell(document, "A")["n_disturbed"] == 4
    assert len(told.said) == 2
    assert "round 1 is not used: others took the cores" in told.said[0]
    (rule,) = document["rules"]
    assert not rule["passed"]
    assert "every run was disturbed: others took the cores" in rule["why"]
    assert document["ranking"] is None


def test_a_candidate_that_does_not_start_is_left_out_and_the_others_go_on() -> None:
    tools = FakeTools(fails=lambda name, n: ServerUnreachable("it said boo") if name == "A" else None)
    text = RULE.format(candidate="A", measure="error") + "at_most = 0"
    text += RULE.format(candidate="B", measure="error") + "at_most = 0"
    document, told = measured(tools, text)
    first, second = document["candidates"]
    assert first["left_out"] == "left out at its first start: it said boo"
    assert (second["left_out"], cell(document, "B")["n_used"]) == ("", 2)
    assert [rule["passed"] for rule in document["rules"]] == [False, True]
    assert document["rules"][0]["why"] == "A is left out at its first start: it said boo"
    assert told.said == ["A is left out at its first start: it said boo"]
    assert "run A" not in tools.log


def test_a_candidate_that_dies_is_left_out_from_then_on_and_keeps_its_runs() -> None:
    tools = FakeTools(dies=lambda name, n: (name, n) == ("A", 2))
    document, _ = measured(tools, rounds=4)
    assert "in round 2: it stopped answering: the server stopped answering" in document["candidates"][0]["left_out"]
    assert len(cell(document, "A")["rounds"]) == 2
    assert len(cell(document, "B")["rounds"]) == 4
    assert document["ranking"] is None


def test_every_candidate_left_out_is_a_failure_of_the_first() -> None:
    run = ContractRun(contract(), FakeTools(fails=lambda name, n: UsageError(name)), Listener(), cancelling)
    run.run()
    failure = run.failure()
    assert isinstance(failure, UsageError)
    assert failure.message == "A"


def test_an_unsupported_workload_is_tried_once_and_left_out_of_the_ranking() -> None:
    tools = FakeTools(unsupported={"A": "it has no response_format"})
    text = RULE.format(candidate="A", measure="ttft_p50") + 'at_most = "1s"'
    document, told = measured(tools, text)
    assert tools.log.count("run A") == 1
    assert cell(document, "A")["rounds"][0]["unsupported"] == "it has no response_format"
    assert "cannot do this workload: it has no response_format" in document["rules"][0]["why"]
    assert told.said == ["A cannot do chat: it has no response_format"]
    assert document["ranking"] is None


def test_the_quicker_candidate_is_first_where_five_rounds_say_so() -> None:
    tools = FakeTools(gap_ms=lambda name, n: (10.0 if name == "B" else 20.0) + 0.1 * n)
    document, _ = measured(tools, rounds=5)
    (ranking,) = document["ranking"]
    assert ranking["by"] == "output_throughput"
    first, second = ranking["order"]
    assert (first["candidate"], second["candidate"]) == ("B", "A")
    assert second["high"] < 1
    assert not second["tied"]
    assert document["no_ranking"] == ""


def test_fewer_than_five_rounds_tell_nobody_apart() -> None:
    document, _ = measured(FakeTools(gap_ms=lambda name, n: 10.0 if name == "B" else 20.0), rounds=4)
    second = document["ranking"][0]["order"][1]
    assert second["tied"]
    assert second["why"] == TOO_FEW


def test_a_difference_that_forbids_it_leaves_no_ranking_and_no_ratio() -> None:
    tools = FakeTools(differ=(Difference("prompt tokens", "A counts 7 tokens where B counts 9.", True),))
    text = RULE.format(candidate="A", measure="ttft_p50") + 'over = "B"\nat_most = 2'
    document, _ = measured(tools, text, rounds=5)
    assert document["ranking"] is None
    assert document["no_ranking"] == "m: not ranked. A counts 7 tokens where B counts 9."
    assert document["differences"] == [
        {
            "model": "m",
            "what": "prompt tokens",
            "sentence": "A counts 7 tokens where B counts 9.",
            "forbids_ranking": True,
        }
    ]
    (rule,) = document["rules"]
    assert not rule["passed"]
    assert rule["why"] == "A and B cannot be compared: A counts 7 tokens where B counts 9."


def test_a_difference_that_does_not_forbid_it_is_told_beside_the_ranking() -> None:
    tools = FakeTools(differ=(Difference("default temperature", "A says 0.8, B 1.0.", False),))
    document, _ = measured(tools)
    assert document["ranking"] is not None
    assert len(document["differences"]) == 1


def test_rules_are_judged_on_the_median_of_the_rounds() -> None:
    tools = FakeTools(gap_ms=lambda name, n: {1: 10.0, 2: 30.0, 3: 11.0}[n])
    text = RULE.format(candidate="A", measure="ttft_p50") + 'at_most = "11ms"'
    text += RULE.format(candidate="A", measure="ttft_p50") + 'at_most = "10.9ms"'
    text += RULE.format(candidate="A", measure="ready") + 'at_most = "250ms"'
    document, _ = measured(tools, text, rounds=3)
    assert [rule["passed"] for rule in document["rules"]] == [True, False, True]
    assert document["rules"][0]["value"] == pytest.approx(11)
    assert document["rules"][2]["value"] == pytest.approx(250)
    assert not document["passed"]


def test_a_ratio_rule_pairs_the_rounds() -> None:
    gaps = {"A": [10.0, 20.0, 40.0], "B": [20.0, 40.0, 80.0]}
    tools = FakeTools(gap_ms=lambda name, n: gaps[name][n - 1])
    text = RULE.format(candidate="A", measure="ttft_p50") + 'over = "B"\nat_most = 0.5\nat_least = 0.5'
    document, _ = measured(tools, text, rounds=3)
    assert [rule["value"] for rule in document["rules"]] == [pytest.approx(0.5), pytest.approx(0.5)]
    assert document["rules"][0]["text"] == "A: ttft_p50 at most 0.5 times that of B (chat, cold, concurrency 2)"


def test_a_rule_for_everywhere_names_the_worst_place() -> None:
    more = '\n[[workload]]\nuse = "story"\nconcurrency = 1'
    tools = FakeTools(gap_ms=lambda name, n: 50.0 if n % 2 == 0 else 10.0)  # the second cell of each round
    text = more + RULE.format(candidate="A", measure="ttft_p50") + 'at_most = "20ms"'
    document, _ = measured(tools, text)
    (rule,) = document["rules"]
    assert rule["value"] == pytest.approx(50)
    assert rule["why"] == "the worst is at story, cold, concurrency 1"
    assert rule["text"] == "A: ttft_p50 at most 20 ms (cold)"


def test_a_cancelled_run_is_kept_and_nothing_further_is_measured() -> None:
    cancels: list[Any] = []

    class Cancelling:
        """Hands the run what a signal would call."""

        def __enter__(self) -> Any:
            return cancels.append

        def __exit__(self, *_: object) -> None: ...

    def press(runs: FakeRuns, n: int) -> None:
        if (runs.name, n) == ("B", 1):
            cancels[-1]()

    tools = FakeTools(on_run=press)
    run = ContractRun(
        contract(RULE.format(candidate="B", measure="error") + "at_most = 0"), tools, Listener(), Cancelling
    )
    with pytest.raises(KeyboardInterrupt):
        run.run()
    document = run.document()
    assert document["partial"]
    assert [run["partial"] for run in cell(document, "B")["rounds"]] == [True]
    assert tools.log[-1] == "stop B"
    assert tools.log.count("run B") == 1


@pytest.mark.parametrize("when", ["examine A", "start B", "run A"])
def test_an_interrupt_anywhere_keeps_what_there_is(when: str) -> None:
    tools = FakeTools()

    class Log(list[str]):
        """Raises as a signal would."""

        def append(self, line: str) -> None:
            super().append(line)
            if line == when:
                raise KeyboardInterrupt

    tools.log = Log()
    run = ContractRun(contract(), tools, Listener(), cancelling)
    with pytest.raises(KeyboardInterrupt):
        run.run()
    document = run.document()
    assert document["partial"]
    assert len(document["candidates"]) == 2
    assert "load_average_after" in document["fingerprint"]


def test_models_are_ranked_apart() -> None:
    head = TWO.replace('name = "A"', 'name = "A"\nmodel = "m"').replace('name = "B"', 'name = "B"\nmodel = "m"')
    text = (
        '\n[[model]]\nname = "n"\nnamed = "x"\n'
        '[[candidate]]\nname = "C"\nmodel = "n"\ncommand = ["c", "{port}"]\n'
        '[[candidate]]\nname = "D"\nmodel = "n"\ncommand = ["d", "{port}"]\n'
    )
    run = ContractRun(contract(text, head=head), FakeTools(), Listener(), cancelling)
    run.run()
    ranked = [(r["model"], {entry["candidate"] for entry in r["order"]}) for r in run.document()["ranking"]]
    assert ranked == [("m", {"A", "B"}), ("n", {"C", "D"})]


def test_values_of_variables_that_look_like_keys_are_not_kept() -> None:
    head = TWO.replace('name = "A"', 'name = "A"\nvariables = {{ API_KEY = "s3cret", OMP = "2" }}')
    document = ContractRun(contract(head=head), FakeTools(), Listener(), cancelling).document()
    assert document["contract"]["candidate"][0]["variables"] == {"API_KEY": "(not kept)", "OMP": "2"}


def test_a_client_that_cannot_be_calibrated_is_told_and_measures_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: FakeTools) -> Any:
        raise ServerUnreachable("the null server did not start")

    monkeypatch.setattr(FakeTools, "calibration", fails)
    document, told = measured(FakeTools())
    assert document["calibration"] is None
    assert told.said == ["the client's own overhead was not measured: the null server did not start"]
    assert cell(document, "A")["n_used"] == 2
