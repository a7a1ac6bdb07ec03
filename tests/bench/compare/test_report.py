"""A comparison as text, Markdown and JSON."""

from __future__ import annotations

import json
import re

import msgspec
import pytest

from localllm.bench.compare.comparison import compare
from localllm.bench.compare.fail_on import judged, parse_rules
from localllm.bench.compare.read import cells_of
from localllm.bench.compare.report import WIDTH, Report, render
from tests.bench.compare import made_up

OLD = [made_up.row(512, 0, [300, 301, 302, 299, 298]), made_up.row(0, 128, [40, 40.1, 40.2, 39.9, 39.8])]
NEW = [made_up.row(512, 0, [300, 301, 302, 299, 298]), made_up.row(0, 128, [36, 36.1, 36.2, 35.9, 35.8])]


def report(rules: str = "") -> Report:
    a, b = (cells_of(msgspec.json.encode(value), f"/some/{name}.json") for name, value in (("old", OLD), ("new", NEW)))
    parsed = parse_rules(rules) if rules else ()
    comparison = compare(a, b, also=[rule.measure for rule in parsed])
    return Report(comparison, judged(parsed, comparison, [*a, *b]))


def test_text_is_laid_out_in_columns() -> None:
    text = render(report("tg128<-5%,pp512<-5%"), "text")
    # A draw may change with numpy; all else is exact.
    shown = re.sub(r"[+-][0-9]+\.[0-9]% to [+-][0-9]+\.[0-9]%", lambda found: "LOW to HIGH".ljust(len(found[0])), text)
    assert shown.startswith(
        """\
============================ localllm bench compare ============================
A: old.json (llama-bench)
B: new.json (llama-bench)
neither file has a fingerprint: that both ran on one machine is known by the CPU's and GPU's names alone

------------------------------------ tests -------------------------------------
test         A        B  change    95 % interval         p              verdict
pp512  300 t/s  300 t/s   +0.0%   LOW to HIGH        1.000  no difference shown
tg128   40 t/s   36 t/s  -10.0%  LOW to HIGH      < 0.0001                worse

------------------------------------ rules -------------------------------------
rule               where  why
tg128<-5%  FAILED  tg128  -10.0%, and the interval LOW to HIGH     is clear of none
pp512<-5%  kept    pp512  +0.0%, within the bound

------------------------------------- how --------------------------------------
A change counts where p is below 0.05; p is told as it counts among all 2 of this comparison"""
    )
    assert max(map(len, text.splitlines())) <= WIDTH


def test_markdown_has_the_same_table() -> None:
    text = render(report(), "md")
    assert "| test  |" in text
    assert "| tg128 |" in text
    assert text.endswith("\n")


def test_json_has_every_number_and_is_strict() -> None:
    found = json.loads(render(report("tg128<-5%"), "json"))
    assert found["localllm_bench_compare"] == 1
    assert found["passed"] is False
    (pp512, tg128) = (cell["lines"][0] for cell in found["cells"])
    assert tg128["verdict"] == "worse"
    assert tg128["change"] == pytest.approx(-0.1)
    assert tg128["low"] < tg128["change"] < tg128["high"] < 0
    assert tg128["p_mann_whitney"] == pytest.approx(2 / 252)
    assert pp512["p"] == 1.0
    assert found["rules"][0]["failed"] is True
    assert found["a"] == {"file": "/some/old.json", "tool": "llama-bench", "fingerprint_id": None}


def test_it_says_how_the_numbers_came_about_and_no_more() -> None:
    whole = render(report(), "text")
    assert "Mann-Whitney" in whole
    assert "1% of spread from run to run is assumed" in whole
    assert "in pairs" not in whole


def test_names_in_files_cannot_drive_a_terminal() -> None:
    odd = [made_up.row(0, 128, [40.0] * 5, cpu_info="x\x1b[2Jy\nz", test="tg\x1b[31m128\nnext")]
    cells = cells_of(msgspec.json.encode(odd), "/some/\x1b[2J.json")
    text = render(Report(compare(cells, cells)), "text")
    assert "\x1b" not in text
    assert "tg�[31m128 next" in text
