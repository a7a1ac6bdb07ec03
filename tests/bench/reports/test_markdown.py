from __future__ import annotations

import re

import pytest

from localllm.bench.reports.render import render
from tests.bench.reports.made_up import HOSTILE, cold_and_warm, contract, hostile_contract, hostile_serve, sweep


def tables(shown: str) -> list[list[str]]:
    """Return the tables as lists of lines."""
    found: list[list[str]] = [[]]
    for line in shown.splitlines():
        if line.startswith("|"):
            found[-1].append(line)
        elif found[-1]:
            found.append([])
    return [table for table in found if table]


def test_every_table_has_its_rule_and_as_many_cells_in_each_row() -> None:
    for document in (cold_and_warm(), sweep(3), contract(n_rounds=1), hostile_serve(), hostile_contract()):
        found = tables(render(document, "md"))
        assert found
        for table in found:
            borders = [len(re.findall(r"(?<!\\)\|", line)) for line in table]
            assert len(set(borders)) == 1, table[0]
            assert re.fullmatch(r"\|( -+:? \|)+", table[1]), table[1]


def test_it_says_what_was_measured_on_what_and_how() -> None:
    shown = render(cold_and_warm(), "md")
    assert shown.startswith("# localllm bench serve: smollm2:135m\n\nAMD EPYC 7763, 8 of 8 cores, 16.0 GiB")
    for title in ("Result", "Objective", "Latencies", "Notes", "How it is measured", "Settings"):
        assert f"\n## {title}\n" in shown
    assert "Time to first token (TTFT) counts from when a request was due" in shown
    assert re.search(r"\| workload: prompt_words +\| 20 to 90 ", shown)
    assert "Plots" not in shown


def test_a_warning_of_plots_is_not_said_where_there_are_none() -> None:
    document = cold_and_warm()
    for run in document["runs"]:
        run["disturbances"] = ["others took 1.0 of 2 cores on average"]
    shown = render(document, "md")
    assert "Not to be used" in shown
    assert "Plots" not in shown
    assert "are drawn too" not in shown


def test_a_contracts_candidates_rules_and_cells_are_tables() -> None:
    shown = render(contract(), "md")
    assert "> **1 of 2 rules failed.**" in shown
    assert re.search(r"\| llama-server +\| smollm2:135m +\| llama.cpp b7000-abc \| llama-server -m model.gguf", shown)
    assert len(tables(shown.split("## Results: chat")[1].split("## Results: rag")[0])) == 6
    assert "Candidates are measured in turn" in shown
    assert "| sha256 " in shown


@pytest.mark.parametrize("made", [hostile_serve, hostile_contract])
def test_no_text_of_others_becomes_markup(made: object) -> None:
    assert callable(made)
    shown = render(made(), "md")
    assert "alert" in shown
    assert not re.search(r"<\w|</|(?<!\\)`|(?<!\\)\[", shown)
    assert "\x1b" not in shown
    assert HOSTILE not in shown
