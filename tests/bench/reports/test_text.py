from __future__ import annotations

from dataclasses import replace

import pytest

from localllm.bench.machine.resources import Resources
from localllm.bench.reports.document import serve_document
from localllm.bench.reports.page import Page, Section, Table
from localllm.bench.reports.render import page_of, render
from localllm.bench.reports.text import text
from localllm.bench.serving.spec import Cache, Load
from tests.bench.reports.made_up import (
    CALIBRATION,
    FINGERPRINT,
    SWAPPED,
    cold_and_warm,
    contract,
    hostile_contract,
    hostile_serve,
    made_up_run,
    sweep,
)


def row(shown: str, start: str) -> list[str]:
    return next(line for line in shown.splitlines() if line.startswith(start)).removeprefix(start).split()


@pytest.mark.parametrize("width", [80, 100, 120])
def test_every_line_fits_the_terminal(width: int) -> None:
    for document in (cold_and_warm(), sweep(), contract()):
        for line in render(document, "text", width).splitlines():
            assert len(line) <= width, line


def test_runs_stand_side_by_side_under_vllms_names() -> None:
    shown = render(cold_and_warm(), "text")
    assert row(shown, "Successful requests") == ["40", "40"]
    assert row(shown, "Failed requests") == ["1", "0"]
    assert row(shown, "Goodput (share of requests)") == ["85.4%", "97.5%"]
    assert row(shown, "Peak memory of the server") == ["412", "MB", "412", "MB"]
    assert row(shown, "Maximum request concurrency") == ["1", "1"]
    assert "Request rate configured" not in shown  # no run has one
    assert "Drafted tokens" not in shown


def test_no_peak_below_the_average_is_told() -> None:
    document = cold_and_warm()
    document["runs"][0] |= {"max_output_tokens_per_s": 2.0, "output_throughput": 3.29}
    document["runs"][1] |= {"max_output_tokens_per_s": 9.0, "output_throughput": 3.29}
    assert row(render(document, "text"), "Peak output token throughput (tok/s)") == ["-", "9.00"]


def test_latencies_have_their_percentiles_a_line_a_run() -> None:
    document = cold_and_warm()
    shown = render(document, "text")
    first = document["runs"][0]
    assert row(shown, "TTFT          cold") == [f"{first['min_ttft_ms']:.1f}"] + [
        f"{first[f'{name}_ttft_ms']:.0f}" for name in ("p50", "p90", "p95", "p99", "max")
    ]
    assert "TTFT, answer" in shown


def test_a_first_answer_token_is_not_told_twice_where_nothing_thinks() -> None:
    run = made_up_run(1)
    at_once = [replace(s, outcome=replace(s.outcome, answer_s=s.outcome.token_s[0])) for s in run.samples]
    document = serve_document([replace(run, samples=tuple(at_once))], fingerprint=FINGERPRINT)
    assert "TTFT, answer" not in render(document, "text")


def test_a_sweep_has_a_row_a_load_and_its_knee() -> None:
    shown = render(sweep(), "text")
    rows = [line for line in shown.split("Latencies")[0].splitlines() if line.startswith("concurrency")]
    assert len(rows) == 14  # of the result and of the objective
    assert "The knee is at concurrency" in shown
    assert "NOT MET" in shown


def test_what_must_not_be_used_is_said_loudly_before_any_number() -> None:
    runs = [made_up_run(1, resources=Resources(disturbances=SWAPPED)), made_up_run(2, cache=Cache.WARM)]
    shown = render(serve_document(runs, fingerprint=FINGERPRINT), "text")
    assert "!! Not to be used (cold): the machine swapped 12 MB" in shown
    assert shown.index("!!") < shown.index("Result")


def test_what_a_server_cannot_do_is_told_with_its_own_words() -> None:
    run = made_up_run(1, n=0, workload="json", unsupported="response_format is not known")
    shown = render(serve_document([run], fingerprint=FINGERPRINT), "text")
    assert "!! Not measured: json is not supported: response_format is not known" in shown
    assert "Result" not in shown
    assert "In milliseconds" not in shown


def test_notes_tell_failures_counts_and_what_the_client_cost() -> None:
    runs = [made_up_run(1, n_failed=3, token_source="pieces")]
    shown = render(serve_document(runs, fingerprint=FINGERPRINT, calibration=CALIBRATION), "text")
    assert "- 3 failed: refused: queue_full" in shown
    assert "- output tokens are counted by: pieces" in shown
    assert "- CPU of the client a token: 0.03 ms in these runs, 0.031 ms against a server that does nothing" in shown


def test_a_rate_is_told_where_it_was_set() -> None:
    document = serve_document([made_up_run(1, load=Load(rate_per_s=2.5))], fingerprint={})
    assert row(render(document, "text"), "Request rate configured (RPS)") == ["2.50"]


def test_a_contracts_verdict_ranking_and_reasons_are_shown() -> None:
    shown = render(contract(), "text")
    assert "!! 1 of 2 rules failed." in shown
    assert row(shown, "2  llama-server, best")[:2] == ["84", "ms"]
    assert "tied with the first" in shown
    assert "- ollama: nothing answers at http://127.0.0.1:11434" in shown
    assert "rounds are not used" in shown
    assert "sampling defaults: llama-server samples with top_k 40" in shown
    assert "2/3" in shown


def test_a_contract_without_a_ranking_says_why() -> None:
    shown = render(contract(loads=(1,), n_rounds=1, ranking=None, no_ranking="the answers differ", rules=[]), "text")
    assert "There is no ranking. the answers differ" in shown
    assert "The contract has no rules." in shown
    assert "!!" not in shown


def test_no_text_of_others_moves_the_terminal() -> None:
    for document in (hostile_serve(), hostile_contract()):
        shown = render(document, "text")
        assert all(c == "\n" or c == "\ufffd" or c.isprintable() for c in shown)


def test_details_are_left_out() -> None:
    page = page_of(cold_and_warm())
    assert any(section.is_detail for section in page.sections)
    shown = text(page)
    assert "How it is measured" not in shown
    assert "Settings" not in shown


def test_a_table_too_wide_is_continued_below_with_its_first_column() -> None:
    table = Table(("name", *(f"column {i}" for i in range(9))), (("a", *("1234567890" for _ in range(9))),))
    lines = text(Page("t", sections=(Section("s", tables=(table,)),)), 60).splitlines()
    assert len([line for line in lines if line.startswith("a ")]) == 3
    assert sum(line.count("1234567890") for line in lines) == 9
    assert max(map(len, lines)) <= 60


def test_a_row_of_long_words_becomes_lines_of_its_own() -> None:
    table = Table(("candidate", "command"), (("a", "serve " + "x" * 70),), 2)
    lines = text(Page("t", sections=(Section("s", tables=(table,)),)), 60).splitlines()
    assert "a" in lines
    assert any(line.startswith("    ") and "serve" in line for line in lines)


def test_candidates_of_several_models_are_told_apart() -> None:
    made = contract(loads=(4,), n_rounds=1)
    made["candidates"][2]["model"] = "smollm2:360m"
    shown = render(made, "text", 120).split("Results: chat")[1]
    assert row(shown, "llama-server, best  smollm2:360m")[0] == "1/1"
    alike = render(contract(loads=(4,), n_rounds=1), "text", 120).split("Results: chat")[1]
    assert row(alike, "llama-server, best")[0] == "1/1"


def test_a_cell_in_which_no_round_counts_says_so() -> None:
    made = contract(loads=(4,), n_rounds=1)
    for cell in made["cells"]:
        if cell["cache"] == "cold":
            cell["rounds"] = [found | {"disturbances": list(SWAPPED)} for found in cell["rounds"]]
    shown = render(made, "text")
    assert "cold, concurrency 4: no round of any candidate counts." in shown
    assert "warm, concurrency 4:" in shown


def test_a_single_servers_disturbed_runs_are_shown_with_a_warning() -> None:
    runs = [made_up_run(1, resources=Resources(disturbances=SWAPPED))]
    shown = render(serve_document(runs, fingerprint=FINGERPRINT), "html")
    assert "Runs that are not to be used are drawn too." in shown
    assert '<svg class="plot"' in shown
