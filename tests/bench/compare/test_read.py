"""Result files of every kind as cells, and every way in which one can be broken as a sentence."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from localllm.bench.compare import read
from localllm.bench.compare.cell import Cell
from localllm.bench.compare.comparison import compare
from localllm.bench.compare.read import cells_of, read_results
from localllm.bench.engine.formats import document, render
from localllm.bench.engine.report import Report
from localllm.errors import UsageError
from tests.bench.compare import made_up
from tests.bench.engine import rows

FIRST_S = [0.2, 0.3, 0.25, 0.4]
PACE_S = [0.02, 0.03, 0.025, 0.04]


def cells(value: Any) -> list[Cell]:
    return cells_of(msgspec.json.encode(value), "x.json")


def test_a_serve_document_gives_a_cell_a_run_with_every_request() -> None:
    first, second = made_up.run(FIRST_S, PACE_S), made_up.run(FIRST_S, PACE_S, cache="warm", seed=2)
    cold, warm = cells(made_up.serve(first, second))
    assert (cold.name, warm.name) == ("chat, cold, concurrency 1", "chat, warm, concurrency 1")
    assert cold.samples["ttft"] == (((200.0,), (300.0,), (250.0,), (400.0,)),)
    assert cold.samples["tpot"][0][1] == (30.0,)
    assert cold.samples["itl"][0][0] == pytest.approx((20.0,) * 8)
    assert cold.values["output_throughput"] == (pytest.approx(36 / sum(first["latencies"])),)
    assert cold.model.sha256 == (made_up.SHA256,)
    assert warm.facts == {**cold.facts, "cache": "warm", "seed": "2"}
    assert cold.origin.fingerprint_id == "a" * 16


def test_a_request_without_an_answer_keeps_its_place_and_gives_no_latency() -> None:
    broken = made_up.run(FIRST_S, PACE_S, errors=["", "lost: reset", "", ""], input_lens=[5, 0, 7, 8])
    (cell,) = cells(made_up.serve(broken))
    assert cell.samples["ttft"][0][1] == ()
    assert cell.samples["e2e"][0][1] == ()
    assert cell.samples["error"][0] == ((0.0,), (1.0,), (0.0,), (0.0,))
    assert cell.input_lens == (5.0, 0.0, 7.0, 8.0)


def test_requests_are_read_in_the_order_in_which_they_were_due() -> None:
    (cell,) = cells(made_up.serve(made_up.run(FIRST_S, PACE_S, start_times=[3.0, 2.0, 1.0, 0.0])))
    assert [value for (value,) in cell.samples["ttft"][0]] == [400.0, 250.0, 300.0, 200.0]


def test_rates_over_stretches_of_a_run_have_its_throughput_as_their_mean() -> None:
    rng = np.random.default_rng(1)
    n = 40
    (cell,) = cells(made_up.serve(made_up.run(0.2 * rng.random(n), 0.01 + 0.01 * rng.random(n))))
    windows = [value for (value,) in cell.samples["output_throughput"][0]]
    assert np.mean(windows) == pytest.approx(cell.values["output_throughput"][0], rel=1e-6)


def test_a_contract_keeps_rounds_apart_and_leaves_disturbed_ones_out() -> None:
    rounds = [made_up.run(FIRST_S, PACE_S) for _ in range(3)]
    rounds[1]["disturbances"] = ["the machine swapped"]
    (cell,) = cells(made_up.contract(rounds))
    assert cell.name == "ours, chat, cold, concurrency 1"
    assert len(cell.samples["ttft"]) == 2
    assert len(cell.values["output_throughput"]) == 2
    assert cell.doubts == ()
    assert "1 of 3 rounds not used" in cell.notes[0]


def test_a_contract_of_disturbed_rounds_alone_is_doubtful() -> None:
    (cell,) = cells(made_up.contract([made_up.run(FIRST_S, PACE_S, disturbances=["it swapped"])]))
    assert cell.doubts == ("it was disturbed: it swapped",)


def test_our_engine_document_and_its_rows_as_lines_read_alike() -> None:
    report = Report(rows.ALL, {"machine": made_up.MACHINE, "model": {"sha256": ["cd" * 32]}})
    whole = cells(document(report))
    lines = cells_of(render(report, "jsonl").encode(), "x.jsonl")
    assert [cell.name for cell in whole] == [cell.name for cell in lines] == [row.case.name for row in rows.ALL]
    assert [cell.samples for cell in whole] == [cell.samples for cell in lines]
    assert whole[0].samples["pp512"] == (((512.0,), (256.0,)),)
    assert whole[-1].tests["start pp35"].lower_is_better
    assert whole[-1].samples["start pp35"] == (((700.0,), (720.0,)),)
    assert whole[0].model.sha256 == ("cd" * 32,)
    assert len(whole[0].origin.fingerprint_id) == 16
    assert lines[0].origin.fingerprint is None


def test_llama_bench_json_and_lines_name_their_tests() -> None:
    found = [made_up.row(512, 0, [300.0, 301.0]), made_up.row(0, 128, [40.0]), made_up.row(64, 16, [1.0], n_depth=512)]
    lines = "".join(json.dumps(row) + "\n" for row in found).encode()
    for read_cells in (cells(found), cells_of(lines, "x.jsonl")):
        assert [cell.name for cell in read_cells] == ["pp512", "tg128", "pp64+tg16 @ d512"]
        assert read_cells[0].samples["pp512"] == (((300.0,), (301.0,)),)
        assert read_cells[0].origin.machine == "Some CPU"
    assert [cell.name for cell in cells_of(json.dumps(found[1]).encode(), "x")] == ["tg128"]


def test_older_and_newer_fields_of_llama_bench_are_settings_alike() -> None:
    (old,) = cells([made_up.row(512, 0, [1.0], use_mmap=True)])
    (new,) = cells([made_up.row(512, 0, [1.0], load_mode="mmap")])
    assert old.settings["use_mmap"] == "True"
    assert new.settings["load_mode"] == "mmap"


def test_vllm_files_with_and_without_details() -> None:
    (short,) = cells(made_up.vllm(FIRST_S, PACE_S, detailed=False))
    (long,) = cells(made_up.vllm(FIRST_S, PACE_S, detailed=True))
    assert short.samples == {}
    assert short.values["ttft_p50"] == (pytest.approx(275.0),)
    assert short.values["tpot_p99"] == (pytest.approx(1e3 * float(np.percentile(PACE_S, 99))),)
    assert [value for (value,) in long.samples["ttft"][0]] == pytest.approx([200.0, 300.0, 250.0, 400.0])
    assert [value for (value,) in long.samples["e2e"][0]] == pytest.approx([360.0, 540.0, 450.0, 720.0])
    assert [value for (value,) in long.samples["tpot"][0]] == pytest.approx([20.0, 30.0, 25.0, 40.0])
    assert short.name == "requests 4, request rate inf, concurrency 1"
    assert short.origin.fingerprint is None


def test_a_byte_order_mark_is_no_part_of_a_file() -> None:
    assert len(cells_of(b"\xef\xbb\xbf" + WHOLE, "x.json")) == 1


def test_an_older_goodput_field_of_vllm_is_read() -> None:
    (cell,) = cells(made_up.vllm(FIRST_S, PACE_S, detailed=False) | {"request_goodput:": 1.5, "failed": 1})
    assert cell.values["request_goodput"] == (1.5,)
    assert cell.values["error"] == (0.2,)


def changed(path: str, value: Any) -> bytes:
    """Return a serve document with one field of its run replaced."""
    run = made_up.run(FIRST_S, PACE_S)
    run[path] = value
    return msgspec.json.encode(made_up.serve(run))


WHOLE = msgspec.json.encode(made_up.serve(made_up.run(FIRST_S, PACE_S)))


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"", "the file is empty"),
        (b"  \n", "the file is empty"),
        (WHOLE[:200], "not JSON: "),
        (WHOLE + b"}", "not JSON: "),
        (b'{"a": NaN}', "not JSON: "),
        (b"\xff\xfe", "not JSON: "),
        (b"[" * 100_000, "nested too deeply"),
        (b"7", "a number where an object should be"),
        (b"[1]", "a number where an object should be at [0]"),
        (b"[]", "there are no results"),
        (b"{}", "no result of a benchmark"),
        (b'{"localllm_bench_serve": 1, "runs": []}', "there are no results"),
        (b'{"localllm_bench_serve": 2, "runs": []}', "version 2"),
        (b'{"localllm_bench_serve": true}', "no version"),
        (b'{"localllm_bench_serve": 1, "runs": {}}', "an object where a list should be at runs"),
        (b'{"localllm_bench_compare": 1}', "no result of a benchmark"),
        (changed("ttfts", [0.1, "x", 0.2, 0.3]), "a text where a number should be at runs[0].ttfts[1]"),
        (changed("ttfts", [0.1, True, 0.2, 0.3]), "true or false where a number should be at runs[0].ttfts[1]"),
        (changed("ttfts", [0.1]), "1 entries where others have 4 at runs[0].ttfts"),
        (changed("itls", [1, 2, 3, 4]), "runs[0].itls[0]"),
        (changed("itls", [[], [], [], [1e300]]), "beyond all measure at runs[0].itls[3][0]"),
        (changed("output_throughput", 1e16), "beyond all measure at runs[0].output_throughput"),
        (b'{"localllm_bench_serve": 1, "runs": [{"output_throughput": 1' + b"0" * 400 + b"}]}", "beyond all measure"),
        (changed("load", 3), "a number where an object should be at runs[0].load"),
        (changed("load", {"concurrency": "x"}), "a text where a number should be at runs[0].load.concurrency"),
        (changed("partial", "yes"), "a text where true or false should be at runs[0].partial"),
        (changed("disturbances", [4]), "a number where a text should be at runs[0].disturbances[0]"),
        (msgspec.json.encode([made_up.row(-1, 0, [1.0])]), "no number of tokens at [0].n_prompt"),
        (msgspec.json.encode([made_up.row(1, 0, [1.0]), 5]), "a number where an object should be at [1]"),
        (json.dumps(made_up.row(1, 0, [1.0])).encode() + b"\n{\n", "not JSON: "),
        (msgspec.json.encode([made_up.row(1, 0, [1.0]), {"a": 1}]), "no result of a benchmark"),
    ],
)
def test_what_is_no_result_is_told_with_its_place(data: bytes, told: str) -> None:
    with pytest.raises(UsageError) as error:
        cells_of(data, "some.json")
    assert error.value.message.startswith("some.json: ")
    assert told in error.value.message


def test_a_file_that_cannot_be_read_is_told_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nowhere\.json: No such file"):
        read_results(tmp_path / "nowhere.json")
    with pytest.raises(UsageError, match="Is a directory"):
        read_results(tmp_path)


def test_a_file_beyond_all_measure_is_not_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read, "LARGEST_BYTES", 100)
    path = tmp_path / "large.json"
    path.write_bytes(WHOLE)
    with pytest.raises(UsageError, match="larger than"):
        read_results(path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=12,
)
DOCUMENTS = {
    "serve": made_up.serve(made_up.run(FIRST_S, PACE_S)),
    "contract": made_up.contract([made_up.run(FIRST_S, PACE_S)] * 2),
    "engine": document(Report(rows.ALL, {"machine": made_up.MACHINE, "software": {}})),
    "vllm": made_up.vllm(FIRST_S, PACE_S, detailed=True),
    "row": made_up.row(512, 0, [1.0, 2.0]),
}


def places(value: Any, trail: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (list, tuple)) else ()
    return [trail, *(place for key, item in items for place in places(item, (*trail, key)))]


def replaced(value: Any, trail: tuple[Any, ...], new: Any) -> Any:
    if not trail:
        return new
    if isinstance(value, dict):
        return {k: replaced(v, trail[1:], new) if k == trail[0] else v for k, v in value.items()}
    return [replaced(v, trail[1:], new) if i == trail[0] else v for i, v in enumerate(value)]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(st.data())
def test_no_value_in_any_place_crashes_reading_or_comparing(data: st.DataObject) -> None:
    whole = DOCUMENTS[data.draw(st.sampled_from(sorted(DOCUMENTS)))]
    broken = replaced(whole, data.draw(st.sampled_from(places(whole))), data.draw(JSON))
    with suppress(UsageError):
        compare(cells(whole), cells(broken), force=True)
        compare(cells(broken), cells(whole), force=data.draw(st.booleans()))


@pytest.mark.parametrize("rate", [1e-320, 1e-300, 1e-16, -1e-300, 1e15])
def test_no_number_spoils_the_arithmetic(rate: float) -> None:
    usual = cells(made_up.serve(made_up.run(FIRST_S * 5, PACE_S * 5)))
    odd = cells(made_up.serve(made_up.run(FIRST_S * 5, PACE_S * 5, output_throughput=rate, ttfts=[rate] * 20)))
    for a, b in ((usual, odd), (odd, usual), (odd, odd)):
        assert compare(a, b).cells[0].lines


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.one_of(
        st.binary(max_size=60), JSON.map(msgspec.json.encode), st.integers(0, len(WHOLE) - 1).map(lambda n: WHOLE[:n])
    )
)
def test_no_bytes_crash_it(data: bytes) -> None:
    with pytest.raises(UsageError):
        cells_of(data, "x")
