from __future__ import annotations

import numpy as np
import pytest

from localllm.bench.reports.cells import Cell, cells_of
from localllm.bench.reports.charts import Chart, Ecdf, Lines, Spreads
from localllm.bench.reports.curves import MAX_CURVES, MAX_STEPS, charts, panels
from localllm.bench.reports.document import run_document
from localllm.bench.serving.spec import Load
from tests.bench.client.made_up import measured, result
from tests.bench.reports.made_up import cold_and_warm, contract, made_up_run, sweep


def of_kind(found: tuple[Chart, ...], kind: type[Chart]) -> list[Chart]:
    return [chart for chart in found if isinstance(chart, kind)]


def test_candidates_are_compared_at_each_workload_and_cache_apart() -> None:
    found = panels(cells_of(contract(loads=(1, 4), n_rounds=1)))
    assert [panel.title for panel in found] == ["chat, cold", "chat, warm", "rag:documents=2, warm"]
    for panel in found:
        for chart in charts(panel):
            assert isinstance(chart, (Lines, Ecdf))
            named = [(series.name, series.slot) for series in chart.series]
            assert named == [("localllm", 0), ("llama-server", 1), ("llama-server, best", 2)]


def test_latencies_and_throughput_are_plotted_against_load() -> None:
    cells = cells_of(sweep())
    (panel,) = panels(cells)
    lines = [chart for chart in charts(panel) if isinstance(chart, Lines)]
    assert [line.title for line in lines] == [
        "Time to first token, median",
        "Time to first token, p95",
        "Output tokens a second",
    ]
    (ttft,), (throughput,) = lines[1].series, lines[2].series
    assert ttft.points == tuple((float(2**i), cell.value("ttft_p95")) for i, cell in enumerate(cells))
    assert (lines[1].limit, lines[0].limit) == (250.0, None)
    assert throughput.marked in (8.0, 16.0)
    assert throughput.mark == "knee"


def test_where_there_is_one_load_the_spreads_stand_side_by_side() -> None:
    (panel,) = panels(cells_of(cold_and_warm()))
    found = charts(panel)
    assert of_kind(found, Lines) == []
    spreads = [chart for chart in found if isinstance(chart, Spreads)]
    assert [row.name for row in spreads[0].rows] == ["cold", "warm"]
    assert all(row.p50 <= row.p95 <= row.p99 for chart in spreads for row in chart.rows)


def test_a_distributions_steps_are_those_of_its_samples() -> None:
    (panel,) = panels(cells_of(cold_and_warm()))
    ttft = next(chart for chart in charts(panel) if isinstance(chart, Ecdf))
    outcomes = [each.outcome for each in measured(2, 40)]
    truth = np.sort([1e3 * (of.token_s[0] - of.due_s) for of in outcomes])
    values, shares = zip(*ttft.series[1].points, strict=True)
    assert values == pytest.approx(truth, abs=1e-3)
    assert shares == pytest.approx(np.arange(1, 41) / 40)


def test_a_long_distribution_is_thinned_and_a_long_list_of_runs_too() -> None:
    cells = [
        Cell("", "chat", "cold", Load(n), (run_document(made_up_run(n, load=Load(n), n=100)),)) for n in range(1, 12)
    ]
    (panel,) = panels(cells)
    for chart in charts(panel):
        if isinstance(chart, Ecdf):
            assert len(chart.series) == MAX_CURVES
            assert all(len(series.points) <= MAX_STEPS for series in chart.series)
            assert all(series.points[-1][1] == 1.0 for series in chart.series)
            assert (chart.series[0].name, chart.series[-1].name) == ("concurrency 1", "concurrency 11")


def test_clients_and_rates_are_never_on_one_axis() -> None:
    loads = [Load(8), Load(rate_per_s=2.0), Load(rate_per_s=4.0)]
    cells = [Cell("", "chat", "cold", load, (run_document(made_up_run(i, load=load)),)) for i, load in enumerate(loads)]
    lines = [chart for chart in charts(panels(cells)[0]) if isinstance(chart, Lines)]
    assert {line.x_title for line in lines} == {"requests offered a second"}
    assert [x for x, _ in lines[0].series[0].points] == [2.0, 4.0]


def test_long_times_are_plotted_in_seconds() -> None:
    cells = [Cell("", "story", "cold", Load(1), (run_document(made_up_run(1, wait_ms=90_000, slo="ttft_p95=60s")),))]
    spread = charts(panels(cells)[0])[0]
    assert isinstance(spread, Spreads)
    assert (spread.x_title, spread.limit) == ("s", 60.0)
    assert 20 < spread.rows[0].p50 < 200


def test_nothing_measured_plots_nothing() -> None:
    assert panels([]) == []
    unsupported = run_document(result(unsupported="no"))
    (panel,) = panels([Cell("", "json", "cold", Load(1), (unsupported,))])
    assert charts(panel) == ()
