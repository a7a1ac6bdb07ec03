"""The four formats: llama-bench's names and order, one document, and what is marked partial."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import fields
from typing import get_args

import pytest

from localllm.bench.engine.formats import Format, render
from localllm.bench.engine.markdown import params_text, size_text
from localllm.bench.engine.report import Report
from localllm.bench.engine.rows import EXTRA_FIELDS, FACT_FIELDS, FIELDS, Case, EngineFacts
from localllm.bench.stats.summaries import Estimate
from tests.bench.engine import rows

# The fields of llama-bench's own JSON, in its order.
LLAMA_BENCH = """
build_commit build_number cpu_info gpu_info backends model_filename model_type model_size model_n_params n_batch
n_ubatch n_threads cpu_mask cpu_strict poll type_k type_v n_gpu_layers n_cpu_moe split_mode main_gpu
no_kv_offload flash_attn devices tensor_split tensor_buft_overrides load_mode lazy_mode embeddings no_op_offload
no_host repack fit_target fit_min_ctx n_prompt n_gen n_depth test_time avg_ns stddev_ns avg_ts stddev_ts
""".split()  # noqa: SIM905

REPORT = Report(
    rows.ALL,
    {"machine": {"n_cores": 2}},
    bandwidth=Estimate(24.5e9, 24e9, 25e9, 7),
    help_s=Estimate(0.21, 0.2, 0.22, 5),
    notes=("pp512 @ d4096: the context has 2 048 tokens",),
    method={"reps": "5"},
)


def test_fields_are_those_of_llama_bench_in_its_order_then_ours() -> None:
    assert list(FIELDS) == [*LLAMA_BENCH, *EXTRA_FIELDS]
    assert sorted(FACT_FIELDS) == sorted(field.name for field in fields(EngineFacts))


@pytest.mark.parametrize(
    ("case", "name"),
    [
        (Case(n_prompt=512), "pp512"),
        (Case(n_gen=128), "tg128"),
        (Case(n_prompt=512, n_depth=512), "pp512 @ d512"),
        (Case(n_gen=32, n_parallel=4), "tg32 x4"),
        (Case(n_prompt=35, kind="start"), "start pp35"),
    ],
)
def test_names_of_tests(case: Case, name: str) -> None:
    assert case.name == name


def test_rates_are_means_of_the_repetitions_rates() -> None:
    flat = rows.PREFILL.flat()
    assert flat["avg_ns"] == 1_500_000_000
    assert flat["avg_ts"] == pytest.approx((512 + 256) / 2)
    assert flat["stddev_ts"] == pytest.approx(256 / 2**0.5)


def test_parallel_rows_count_the_tokens_of_all_sequences() -> None:
    assert rows.FOUR.flat()["avg_ts"] == pytest.approx(4 * 32)


def test_json_is_one_document_with_the_figures_on_top() -> None:
    document = json.loads(render(REPORT, "json"))
    assert document["overhead_ratio"] == 0.981
    assert document["overhead_ratio_parallel"] == 0.96
    assert document["start_ratio"] == 1.18
    assert document["peak_rss_over_bare_bytes"] == 41_000_000
    assert document["bandwidth_bytes_per_s"]["median"] == 24.5e9
    assert document["fingerprint"]["machine"]["n_cores"] == 2
    assert document["partial"] is False
    assert document["rows"][0]["samples_ns"] == [1_000_000_000, 2_000_000_000]
    assert document["rows"][0]["samples_ts"] == [512.0, 256.0]
    assert list(document["rows"][0])[: len(LLAMA_BENCH)] == LLAMA_BENCH


def test_figures_that_were_not_measured_are_null() -> None:
    document = json.loads(render(Report((rows.PREFILL,), {}, partial=True), "json"))
    assert document["overhead_ratio"] is None
    assert document["peak_rss_over_bare_bytes"] is None
    assert document["partial"] is True


def test_json_lines_are_rows() -> None:
    lines = [json.loads(line) for line in render(REPORT, "jsonl").splitlines()]
    assert [line["test"] for line in lines] == [row.case.name for row in rows.ALL]
    assert lines[3]["partial"] is True
    assert lines[3]["n_parallel"] == 4


def test_csv_has_a_header_and_a_line_a_row() -> None:
    read = list(csv.DictReader(io.StringIO(render(REPORT, "csv"))))
    assert [line["test"] for line in read] == [row.case.name for row in rows.ALL]
    assert float(read[1]["avg_ts"]) == pytest.approx(64.0)
    assert read[0]["overhead_ratio"] == ""
    assert read[-1]["avg_ts"] == ""


def test_markdown_has_llama_bench_columns_and_the_comparisons() -> None:
    text = render(REPORT, "md")
    head = [cell.strip() for cell in text.splitlines()[0].strip("|").split("|")]
    assert head == ["model", "size", "params", "backend", "threads", "n_parallel", "test", "t/s"]
    table, against = text.split("\n\n")[:2]
    assert "| pp512 @ d512 |" in table
    assert "384.00 ± 181.02" in table
    assert "tg32 *" in table
    assert len({len(line) for line in table.splitlines()}) == 1
    assert "0.981 | 0.970 to 0.990" in " ".join(against.split())
    assert "41 MB above the bare script" in against
    assert "64% of the bandwidth" in against
    assert "left out: pp512 @ d4096" in text


def test_markdown_shows_kv_types_and_layers_only_where_they_differ() -> None:
    from dataclasses import replace

    facts = replace(rows.FACTS, type_k="q8_0", type_v="q8_0", n_gpu_layers=31, backends="CUDA")
    text = render(Report((replace(rows.PREFILL, facts=facts),), {}), "md")
    assert "| ngl | type_k | type_v | " in text.splitlines()[0]
    assert "threads" not in text


def test_partial_markdown_says_so() -> None:
    assert "partial: interrupted" in render(Report((rows.FOUR,), {}, partial=True), "md")


def test_nothing_measured_is_no_row_in_any_format() -> None:
    nothing = Report((), {}, partial=True)
    assert render(nothing, "jsonl") == ""
    assert render(nothing, "csv").count("\n") == 1
    assert json.loads(render(nothing, "json"))["rows"] == []
    assert "partial" in render(nothing, "md")


def test_sizes_are_written_as_llama_bench_writes_them() -> None:
    assert size_text(98_000_000) == "93.46 MiB"
    assert size_text(2**31) == "2.00 GiB"
    assert params_text(134_515_008) == "134.52 M"
    assert params_text(1_543_714_304) == "1.54 B"


def test_every_format_is_rendered() -> None:
    assert all(render(REPORT, form).endswith("\n") for form in get_args(Format))
