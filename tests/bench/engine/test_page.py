"""docs/benchmarks.md is made of what was measured: no number of its own."""

from __future__ import annotations

from dataclasses import replace

from docs.benchmarks import page
from localllm.bench.engine.report import Report
from localllm.bench.stats.summaries import Estimate
from tests.bench.engine import rows

FINGERPRINT = {
    "machine": {
        "cpu": {"name": "Some CPU", "n_usable": 2, "n_cores": 4},
        "ram_bytes": 16 << 30,
        "os_name": "Some Linux 1",
        "os": "Linux 6",
    },
    "software": {"llama-cpp-python": "9.9.9"},
    "model": {"name": "Small", "quant": "Q4_1", "sha256": ["ab" * 32]},
    "load_average_before": [0.1, 0.2, 0.3],
    "load_average_after": [1.0, 0.5, 0.3],
}
REPORT = Report(rows.ALL, FINGERPRINT, help_s=Estimate(0.21, 0.2, 0.22, 5), method={"rows": "5 repetitions"})


def test_the_machine_stands_above_the_tables() -> None:
    text = page({"smollm2:135m": REPORT})
    assert "Machine: Some CPU, 2 of 4 cores, 16.0 GiB, Some Linux 1, llama-cpp-python 9.9.9." in text
    assert "load average (1, 5, 15 minutes) before [0.1, 0.2, 0.3], after [1.0, 0.5, 0.3]" in text
    assert "- *rows*: 5 repetitions." in text
    assert "ab" * 32 in text


def test_each_model_is_held_against_its_own_figures() -> None:
    text = page({"smollm2:135m": REPORT, "qwen2.5-coder-0.5b-instruct-q4_k_m": REPORT})
    small, large = text.split("## qwen2.5")
    assert "| decode against the bare loop | >= 0.93 | 0.981 | reached |" in small
    assert "| process start to first token against a bare script | <= 1.25 | 1.18 | reached |" in small
    assert "| resident memory above the bare script, MB | <= 60 | 41 | reached |" in small
    assert "| decode against the bare loop | >= 0.97 | 0.981 | reached |" in large
    assert "process start to first token against" not in large


def test_a_figure_that_is_missed_says_so() -> None:
    slow = replace(rows.OVERHEAD, extras={**rows.OVERHEAD.extras, "overhead_ratio": 0.9})
    text = page({"smollm2:135m": replace(REPORT, rows=(rows.PREFILL, slow))})
    assert "| decode against the bare loop | >= 0.93 | 0.9 | missed |" in text
