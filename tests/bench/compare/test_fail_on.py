"""--fail-on: how rules are written, and when they hold."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from localllm.bench.compare.change import Change
from localllm.bench.compare.comparison import compare
from localllm.bench.compare.fail_on import Ruling, change_text, interval_text, judged, parse_rules
from localllm.bench.compare.read import cells_of
from localllm.bench.measures import measure
from localllm.errors import UsageError
from tests.bench.compare import made_up


def outcomes(a: Any, b: Any, text: str) -> list[Ruling]:
    rules = parse_rules(text)
    old, new = (cells_of(msgspec.json.encode(value), "x") for value in (a, b))
    return list(judged(rules, compare(old, new, also=[rule.measure for rule in rules]), [*old, *new]))


def failed(a: Any, b: Any, text: str) -> list[bool]:
    return [outcome.has_failed for outcome in outcomes(a, b, text)]


def rates(middle: float, spread: float = 0.002) -> list[dict[str, Any]]:
    return [made_up.row(0, 128, [middle * (1 + spread * k) for k in (-2, -1, 0, 1, 2)])]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "'' is no rule"),
        ("ttft_p95", "'ttft_p95' is no rule"),
        ("ttft_p95>", "is no rule"),
        (">5%", "is no rule"),
        ("ttft_p95=5%", "is no rule"),
        ("ttft_p95>>5%", "is no rule"),
        ("ttft_p95>+5%,", "'' is no rule"),
        ("ttft_p95>+5ms", "a change is told in percent"),
        ("ttft_p95>+-5%", "a change is told in percent"),
        ("ttft_p95>+x%", "a change is told in percent"),
    ],
)
def test_what_is_no_rule_is_refused(text: str, told: str) -> None:
    with pytest.raises(UsageError) as error:
        parse_rules(text)
    assert told in error.value.message


@pytest.mark.parametrize("text", ["tg128<-5%", " tg128 < - 5 % ", "tg128<-5.0%"])
def test_blanks_do_not_matter(text: str) -> None:
    assert failed(rates(40), rates(36), text) == [True]


def test_a_change_beyond_the_bound_fails_in_its_direction_alone() -> None:
    assert failed(rates(40), rates(36), "tg128<-5%,tg128<-15%,tg128>+5%,tg128>-15%") == [True, False, False, False]
    assert failed(rates(40), rates(44), "tg128>+5%,tg128<-5%") == [True, False]


def test_noise_does_not_fail_and_is_told() -> None:
    noisy = outcomes(rates(40, 0.1), rates(36, 0.1), "tg128<-5%")[0]
    assert not noisy.has_failed
    assert "may be noise" in noisy.why
    clear = outcomes(rates(40), rates(36), "tg128<-5%")[0]
    assert clear.has_failed
    assert "clear of none" in clear.why
    assert "within the bound" in outcomes(rates(40), rates(39.6), "tg128<-5%")[0].why


def test_a_value_is_that_of_the_new_file_in_its_own_unit() -> None:
    assert failed(rates(40), rates(36), "tg128<37,tg128<37t/s,tg128<35,tg128>35 t/s") == [True, True, False, True]


def serve(**more: Any) -> dict[str, Any]:
    rng = np.random.default_rng(1)
    return made_up.serve(made_up.run(0.2 * np.exp(0.1 * rng.normal(size=30)), [0.02] * 30, **more))


def test_values_and_changes_of_shares_are_told_apart_by_the_sign() -> None:
    broken = serve(errors=["lost"] * 15 + [""] * 15, error=0.5)
    text = "error>1%,error>0.01,error>0.6,error>+10%,ttft_p95>1s,ttft_p95>1ms"
    assert failed(serve(), broken, text) == [True, True, False, True, False, True]


def test_one_value_each_fails_by_its_value_and_says_so() -> None:
    (found,) = outcomes(serve(peak_memory_bytes=1e9), serve(peak_memory_bytes=1.2e9), "peak_memory>+5%")
    assert found.has_failed
    assert "no interval" in found.why


def test_a_measure_that_the_new_file_lost_fails_and_one_that_the_old_never_had_is_a_mistake() -> None:
    lost = serve(errors=["lost"] * 30, error=1.0)
    (found,) = outcomes(serve(), lost, "ttft_p95>+5%")
    assert (found.has_failed, found.value, found.why) == (True, None, "B has no ttft_p95")
    with pytest.raises(UsageError, match="A has no ttft_p95"):
        outcomes(lost, serve(), "ttft_p95>+5%")


def test_a_value_is_judged_by_the_new_file_alone_where_the_old_has_none() -> None:
    lost = serve(errors=["lost"] * 30, error=1.0)
    assert failed(lost, serve(), "ttft_p95>1ms,ttft_p95>10s") == [True, False]


def test_a_change_from_none_is_told_in_its_unit() -> None:
    idle, queued = (serve(server_queue_times=[wait] * 30) for wait in (0.0, 0.5))
    (found,) = outcomes(idle, queued, "queue_p50>+5%")
    assert found.has_failed
    assert found.why.startswith("+500 ms from none, and the interval")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("queue_p95>+5%", "neither file has queue_p95"),
        ("speed>+5%", "'speed' is no measure"),
        ("ttft>+5%", "ttft needs a statistic"),
        ("ttft_p95>5%", "'5%' is no value for it"),
        ("ttft_p95>500", "'500' is no value for it"),
        ("error>2", "more than all"),
    ],
)
def test_a_rule_that_means_nothing_for_these_files_is_refused(text: str, told: str) -> None:
    with pytest.raises(UsageError) as error:
        outcomes(serve(), serve(), text)
    assert told in error.value.message


def test_a_rule_is_judged_in_every_cell() -> None:
    two = made_up.serve(serve()["runs"][0], {**serve()["runs"][0], "cache": "warm"})
    found = outcomes(two, two, "ttft_p95>1ms")
    assert [one.cell for one in found] == ["chat, cold, concurrency 1", "chat, warm, concurrency 1"]


@pytest.mark.parametrize(
    ("name", "values", "is_relative", "texts"),
    [
        ("ttft_p95", (0.1, 0.05, 0.2), True, ("+10.0%", "+5.0% to +20.0%")),
        ("ttft_p95", (0.1, -0.5, 99.0), True, ("+10.0%", "-50.0% to > +1000%")),
        ("error", (0.01, -0.002, 0.022), False, ("+1.0 points", "-0.2 to +2.2 points")),
        ("queue_p50", (-3.0, -5.0, 1.0), False, ("-3 ms", "-5 ms to +1 ms")),
    ],
)
def test_changes_are_told_in_percent_in_points_or_in_the_unit(
    name: str, values: tuple[float, float, float], is_relative: bool, texts: tuple[str, str]
) -> None:
    change, low, high = values
    found = Change(measure(name), 1.0, 1.0, change, is_relative, low=low, high=high, p=0.5)
    assert (change_text(found), interval_text(found)) == texts
