from __future__ import annotations

import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from localllm.bench.reports.cells import cells_of
from localllm.bench.reports.charts import Chart, Ecdf, Lines, Series, Spread, Spreads
from localllm.bench.reports.curves import charts, panels
from localllm.bench.reports.plots import N_STYLES, WIDTH, svg, swatch
from tests.bench.reports.made_up import cold_and_warm, contract, sweep

HOSTILE = "<script>alert(1)</script>\"'&]]><![CDATA["
DOCUMENTS = {"cold and warm": cold_and_warm, "sweep": sweep, "contract": lambda: contract(loads=(1, 4), n_rounds=1)}


def drawn(chart: Chart) -> ElementTree.Element:
    return ElementTree.fromstring(svg(chart))


def texts(root: ElementTree.Element) -> list[tuple[float, float, str, str]]:
    return [
        (float(node.get("x", "0")), float(node.get("y", "0")), node.text or "", node.get("class", ""))
        for node in root.iter("text")
        if node.get("transform") is None  # an axis title that stands upright
    ]


def extent(x: float, words: str, classes: str) -> tuple[float, float]:
    wide = 7.2 * len(words) if "name" in classes else 6.2 * len(words)
    left = x - wide if "end" in classes else x - wide / 2 if "middle" in classes else x
    return left, left + wide


def line_of(root: ElementTree.Element, slot: int = 0) -> list[tuple[float, float]]:
    path = next(node for node in root.iter("path") if node.get("class") == f"line s{slot}")
    found = re.findall(r"[ML]([\d.-]+) ([\d.-]+)", path.get("d", ""))
    return [(float(x), float(y)) for x, y in found]


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_plot_is_well_formed_and_stays_within_its_frame(name: str) -> None:
    found = [chart for panel in panels(cells_of(DOCUMENTS[name]())) for chart in charts(panel)]
    assert found
    for chart in found:
        root = drawn(chart)
        _, _, width, height = (float(part) for part in root.get("viewBox", "").split())
        for x, y, words, classes in texts(root):
            left, right = extent(x, words, classes)
            assert left >= -2, words
            assert right <= width + 2, words
            assert 0 <= y <= height, words
        for node in root.iter():
            assert all(-2 <= float(node.get(key, "0")) <= width for key in ("cx", "x"))
            assert all(0 <= float(node.get(key, "0")) <= height for key in ("cy", "y"))


def test_points_lie_where_their_values_are() -> None:
    series = Series("a", ((1, 10.0), (2, 20.0), (4, 40.0), (8, 80.0)))
    places = line_of(drawn(Lines("Time", "clients", "ms", (series,))))
    steps = [b[0] - a[0] for a, b in pairwise(places)]
    assert steps == pytest.approx([steps[0]] * 3, abs=0.2)  # doubled loads are evenly apart
    heights = [places[0][1] - y for _, y in places]
    assert heights == pytest.approx([0, heights[1], 3 * heights[1], 7 * heights[1]], abs=0.3)


def test_every_series_has_a_marker_a_dash_and_its_name() -> None:
    series = tuple(Series(f"server {i}", ((1, 10.0 + i), (2, 30.0 + 9 * i)), i) for i in range(N_STYLES))
    root = drawn(Lines("Time", "clients", "ms", series))
    dashes = [node.get("stroke-dasharray") for node in root.iter("path") if node.get("class", "").startswith("line")]
    assert len(set(dashes)) == N_STYLES
    assert {swatch(i) for i in range(N_STYLES)} == {swatch(i + N_STYLES) for i in range(N_STYLES)}
    assert len({re.sub(r"s\d", "", swatch(i)) for i in range(N_STYLES)}) == N_STYLES  # told apart without colour
    assert {words for _, _, words, classes in texts(root) if "name" in classes} == {each.name for each in series}


def test_names_beside_lines_that_end_together_do_not_lie_on_each_other() -> None:
    series = tuple(Series(f"server {i}", ((1, 10.0), (2, 30.0 + 0.01 * i)), i) for i in range(6))
    names = sorted(y for _, y, _, classes in texts(drawn(Lines("T", "x", "ms", series))) if "name" in classes)
    assert all(b - a >= 12.9 for a, b in pairwise(names))


def test_the_knee_is_ringed_and_named_once_where_several_lie_together() -> None:
    series = tuple(Series(f"s{i}", ((1, 10.0), (2, 30.0 + i)), i, 2.0, "knee") for i in range(3))
    root = drawn(Lines("Output", "clients", "tokens/s", series))
    assert len([node for node in root.iter("circle") if node.get("class") == "ring"]) == 3
    assert [words for *_, words, classes in texts(root) if classes.startswith("mark")] == ["knee"]


def test_a_limit_is_drawn_where_it_is_near_and_not_where_it_would_press_all_together() -> None:
    series = (Series("a", ((1, 100.0), (2, 200.0))),)
    near = svg(Lines("T", "clients", "ms", series, 250.0, "SLO"))
    assert 'class="limit"' in near
    assert "SLO 250 ms" in near
    assert 'class="limit"' not in svg(Lines("T", "clients", "ms", series, 5000.0, "SLO"))


def test_a_distribution_climbs_from_nothing_to_all() -> None:
    root = drawn(Ecdf("T", "ms", (Series("a", ((10, 0.25), (20, 0.5), (30, 0.75), (40, 1.0))),)))
    path = next(node.get("d", "") for node in root.iter("path") if node.get("class") == "line s0")
    heights = [float(y) for y in re.findall(r"V([\d.]+)", path)]
    assert heights == sorted(heights, reverse=True)
    steps = [a - b for a, b in pairwise(heights)]
    assert steps == pytest.approx([steps[0]] * 3, abs=0.2)
    assert "100%" in [words for *_, words, _ in texts(root)]


def test_no_text_of_others_becomes_markup() -> None:
    hostile = Series(HOSTILE, ((1, 1.0), (2, 2.0)))
    for chart in (
        Lines(HOSTILE, HOSTILE, HOSTILE, (hostile, hostile), 1.5, HOSTILE),
        Ecdf(HOSTILE, HOSTILE, (Series(HOSTILE, ((1, 0.5), (2, 1.0))),), 1.5, HOSTILE),
        Spreads(HOSTILE, HOSTILE, (Spread(HOSTILE, 1, 2, 3),), 1.5, HOSTILE),
    ):
        root = drawn(chart)
        assert {node.tag for node in root.iter()} <= {"svg", "path", "text", "circle", "rect", "g"}
        assert HOSTILE in root.get("aria-label", "")
        assert not re.search(r"<script|<!\[CDATA", svg(chart))


def test_what_has_no_point_is_not_drawn() -> None:
    assert svg(Lines("T", "x", "ms", (Series("a", ()),))) == ""
    assert svg(Ecdf("T", "ms", ())) == ""
    assert svg(Spreads("T", "ms", ())) == ""


@pytest.mark.parametrize("value", [0.0, 1e-12, 1.0, 1e9])
def test_a_single_value_of_any_size_can_be_drawn(value: float) -> None:
    for chart in (
        Lines("T", "x", "ms", (Series("a", ((1, value),)),)),
        Ecdf("T", "ms", (Series("a", ((value, 1.0),)),)),
        Spreads("T", "ms", (Spread("a", value, value, value),)),
    ):
        assert "nan" not in svg(chart)
        assert float(drawn(chart).get("viewBox", "").split()[2]) == WIDTH


def test_a_few_samples_far_out_do_not_press_a_distribution_together() -> None:
    shares = [(i + 1) / 240 for i in range(240)]
    values = [0.001, *(100.0 + i for i in range(238)), 90_000.0]
    root = drawn(Ecdf("T", "ms", (Series("a", tuple(zip(values, shares, strict=True))),)))
    ticks = [words for *_, words, classes in texts(root) if classes == "tick middle"]
    assert ticks == ["0", "100", "200", "300", "400"]
    few = Ecdf("T", "ms", (Series("a", ((10.0, 0.5), (900.0, 1.0))),))
    assert "1000" in [words for *_, words, _ in texts(drawn(few))]  # of few samples each is shown
