from __future__ import annotations

import re
from collections.abc import Callable
from html.parser import HTMLParser
from typing import Any

import pytest

from localllm.bench.reports.document import serve_document
from localllm.bench.reports.html import NOTHING
from localllm.bench.reports.render import render
from localllm.bench.reports.style import STYLE
from tests.bench.reports.made_up import (
    FINGERPRINT,
    cold_and_warm,
    contract,
    hostile_contract,
    hostile_serve,
    made_up_run,
    sweep,
)

VOID = {"meta"}
SHAPES = {"svg", "g", "path", "circle", "rect", "text"}
TABLES = {"table", "caption", "thead", "tbody", "tr", "th", "td"}
BLOCKS = {"main", "header", "section", "h1", "h2", "p", "ul", "li", "div", "figure", "figcaption", "span"}
TAGS = {"html", "head", "meta", "title", "style", "body"} | BLOCKS | TABLES | SHAPES
DOCUMENTS: dict[str, Callable[[], dict[str, Any]]] = {
    "serve": cold_and_warm,
    "sweep": sweep,
    "contract": lambda: contract(loads=(1, 4), n_rounds=1),
    "hostile serve": hostile_serve,
    "hostile contract": hostile_contract,
}


class Strict(HTMLParser):
    """Fails on a tag that is not closed, not known here, or that could run or load anything."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []
        self.n_of: dict[str, int] = {}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in TAGS, tag
        self.n_of[tag] = self.n_of.get(tag, 0) + 1
        for name, _ in attrs:
            assert not name.startswith("on"), name
            assert name not in ("src", "href", "style", "action", "xlink:href"), name
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.words.append(data)


def parsed(shown: str) -> Strict:
    parser = Strict()
    parser.feed(shown)
    parser.close()
    assert parser.open == []
    return parser


@pytest.mark.parametrize("name", DOCUMENTS)
def test_it_is_well_formed_and_runs_and_loads_nothing(name: str) -> None:
    shown = render(DOCUMENTS[name](), "html")
    found = parsed(shown)
    assert found.n_of["style"] == 1
    assert found.n_of["svg"] > 3
    assert "default-src 'none'" in shown
    assert not re.search(r"@import|url\(|<script|<link|<img|<iframe", shown)
    shown.encode()


@pytest.mark.parametrize("name", ["hostile serve", "hostile contract"])
def test_texts_of_others_are_shown_as_text(name: str) -> None:
    words = " ".join(parsed(render(DOCUMENTS[name](), "html")).words)
    assert '<script>alert(\'x\')</script>"onload="y" ]]> </style>' in words


def test_under_each_plot_stand_its_numbers() -> None:
    document = sweep()
    shown = render(document, "html")
    figures = re.findall(r"<figure>.*?</figure>", shown, re.DOTALL)
    assert len(figures) == 6
    for figure in figures:
        assert figure.count('<svg class="plot"') == 1
        assert '<table class="numbers">' in figure
    p95 = next(figure for figure in figures if "Time to first token, p95" in figure)
    for run in document["runs"]:
        number = run["p95_ttft_ms"]
        assert f">{number:.1f}<" in p95 or f">{number:.0f}<" in p95


def test_where_nothing_was_measured_a_sentence_stands_for_the_plots() -> None:
    run = made_up_run(1, n=0, unsupported="no response_format", workload="json")
    shown = render(serve_document([run], fingerprint=FINGERPRINT), "html")
    assert NOTHING in shown
    assert "<svg" not in shown


def test_it_suits_light_dark_and_paper_and_readers_without_colour() -> None:
    assert "@media (prefers-color-scheme: dark)" in STYLE
    assert "@media print" in STYLE
    shown = render(contract(loads=(1, 4), n_rounds=1), "html")
    assert 'stroke-dasharray="7 3"' in shown
    assert 'role="img"' in shown


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_lines_and_words_stand_out_from_their_ground(scheme: str) -> None:
    block = STYLE.split("@media (prefers-color-scheme: dark)")[0 if scheme == "light" else 1].split("}")[0]
    colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block))
    for name, least in {**{f"s{i}": 3.0 for i in range(6)}, "ink": 7.0, "muted": 4.5, "good": 4.5, "bad": 4.5}.items():
        assert contrast(colours[name], colours["card"]) >= least, name
    assert contrast(colours["bad"], colours["bad-ground"]) >= 4.5


def contrast(one: str, other: str) -> float:
    """Return the contrast ratio of two colours. Source: WCAG 2.1, relative luminance."""
    bright, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_verdicts_are_words_and_stand_out() -> None:
    shown = render(contract(loads=(1,), n_rounds=1), "html")
    assert '<td class="n good">holds</td>' in shown
    assert '<td class="n bad">FAILED</td>' in shown
