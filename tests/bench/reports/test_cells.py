from __future__ import annotations

import numpy as np
import pytest

from localllm.bench.machine.resources import Resources
from localllm.bench.reports.cells import Cell, cells_of, knee_load, labels, load_of
from localllm.bench.reports.document import run_document
from localllm.bench.serving.spec import Cache, Load
from tests.bench.client.made_up import measured, result
from tests.bench.reports.made_up import SWAPPED, cold_and_warm, contract, made_up_run, sweep


def test_a_value_is_the_median_of_the_rounds_that_count() -> None:
    rounds = [run_document(made_up_run(seed)) for seed in (1, 2, 3)]
    disturbed = run_document(made_up_run(4, wait_ms=9000, resources=Resources(disturbances=SWAPPED)))
    refused = run_document(result(unsupported="no response_format"))
    cell = Cell("a", "chat", "cold", Load(1), (*rounds, disturbed, refused))
    assert cell.used == rounds
    assert cell.value("ttft_p95") == pytest.approx(np.median([r["p95_ttft_ms"] for r in rounds]))
    assert cell.unsupported == "no response_format"
    assert Cell("a", "chat", "cold", Load(1), (disturbed,)).value("ttft_p95") is None


def test_samples_are_those_of_the_answers_of_all_used_rounds() -> None:
    runs = [made_up_run(1, n=6, n_failed=2), made_up_run(2, n=5)]
    cell = Cell("a", "chat", "cold", Load(1), tuple(run_document(run) for run in runs))
    outcomes = [each.outcome for seed, n in ((1, 6), (2, 5)) for each in measured(seed, n)]
    assert cell.samples("ttfts") == pytest.approx([of.token_s[0] - of.due_s for of in outcomes], abs=1e-6)
    assert len(cell.samples("itls")) == sum(len(of.token_s) - 1 for of in outcomes)


def test_loads_are_read_back_as_they_were() -> None:
    for load in (Load(8), Load(rate_per_s=2.5, shape=0.5), Load()):
        assert load_of(run_document(made_up_run(1, load=load))["load"]) == load
    assert load_of(None) == Load()


def test_documents_of_both_kinds_have_cells() -> None:
    assert [(c.candidate, c.cache, str(c.load)) for c in cells_of(cold_and_warm())] == [
        ("", "cold", "concurrency 1"),
        ("", "warm", "concurrency 1"),
    ]
    cells = cells_of(contract(loads=(1, 4), n_rounds=2))
    assert len(cells) == 18
    assert [str(c.load) for c in cells if c.candidate == "localllm" and c.cache == "cold"] == [
        "concurrency 1",
        "concurrency 4",
    ]


def test_cells_are_named_by_what_differs() -> None:
    def cell(cache: Cache, n_clients: int) -> Cell:
        return Cell("", "chat", cache.value, Load(n_clients), ())

    assert labels([cell(Cache.COLD, 1), cell(Cache.WARM, 1)]) == ["cold", "warm"]
    assert labels([cell(Cache.COLD, 1), cell(Cache.COLD, 2)]) == ["concurrency 1", "concurrency 2"]
    assert labels([cell(Cache.COLD, 1), cell(Cache.WARM, 2)]) == ["cold, concurrency 1", "warm, concurrency 2"]
    assert labels([cell(Cache.COLD, 1)]) == ["cold"]


def test_the_knee_is_found_again_from_the_document() -> None:
    made = sweep()
    found = knee_load(cells_of(made))
    assert found is not None
    load, why = found
    assert load.concurrency in (8, 16)
    assert "95%" in why
    assert knee_load(cells_of(cold_and_warm())) is None  # one load
    assert knee_load([]) is None


def test_an_open_loops_knee_is_the_largest_rate_that_is_kept() -> None:
    cells = []
    for rate in (2.0, 4.0, 8.0):
        run = run_document(made_up_run(1, load=Load(rate_per_s=rate), rate=rate, n=60, slo=None))
        if rate == 8.0:  # answers fall ever further behind
            run["latencies"] = [took + 0.5 * i for i, took in enumerate(run["latencies"])]
        cells.append(Cell("", "chat", "cold", Load(rate_per_s=rate), (run,)))
    found = knee_load(cells)
    assert found is not None
    assert found[0] == Load(rate_per_s=4.0)
