"""The settings: neutral by default, checked by name, and what a model gets without any."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from localllm.errors import UsageError
from localllm.runtime.sampling_params import Sampling, model_defaults, resolve

NAN, INF = float("nan"), float("inf")
REFUSED: list[tuple[str, Any]] = [
    *[(field.name, value) for field in fields(Sampling) for value in (NAN, INF, -INF, True, "0.5", None, b"x", 1j)],
    ("temperature", -0.1),
    ("temperature", 101),
    ("temperature", 10**400),
    ("top_k", -1),
    ("top_k", 40.0),
    ("top_k", 2**31),
    ("top_p", 1.01),
    ("min_p", -0.01),
    ("typical_p", 2),
    ("top_n_sigma", -1),
    ("xtc_probability", 1.5),
    ("xtc_threshold", -1),
    ("repeat_penalty", 0),
    ("repeat_last_n", -2),
    ("presence_penalty", 2.1),
    ("frequency_penalty", -2.1),
    ("dry_multiplier", -1),
    ("dry_base", 0.5),
    ("dry_allowed_length", 0),
    ("dry_penalty_last_n", -2),
    ("dry_sequence_breakers", "\n"),
    ("dry_sequence_breakers", [""]),
    ("dry_sequence_breakers", ["a", 3]),
    ("dry_sequence_breakers", ["a"] * 65),
    ("logit_bias", {"x": 1}),
    ("logit_bias", {-1: 1}),
    ("logit_bias", {5: 101}),
    ("logit_bias", {5: NAN}),
    ("logit_bias", {5: True}),
    ("logit_bias", {True: 1}),
    ("logit_bias", {"²": 1}),
    ("logit_bias", [(1, 2, 3)]),
    ("logit_bias", [5]),
]


@pytest.mark.parametrize(("name", "value"), REFUSED, ids=lambda value: repr(value)[:30])
def test_a_wrong_value_is_refused_with_the_name_of_its_field(name: str, value: Any) -> None:
    with pytest.raises(UsageError, match=name) as raised:
        resolve(Sampling(), {name: value})
    assert raised.value.details == {"field": name}
    assert raised.value.hint


@pytest.mark.parametrize(
    ("name", "value"),
    [("logit_bias", {"secret": 1}), ("logit_bias", {5: "secret"}), ("dry_sequence_breakers", ["", "secret"])],
)
def test_a_refusal_never_quotes_a_text(name: str, value: Any) -> None:
    with pytest.raises(UsageError) as raised:
        resolve(Sampling(), {name: value})
    assert "secret" not in f"{raised.value.message} {raised.value.hint}"


def test_an_unknown_field_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match="'mirostat'"):
        resolve(Sampling(), {"mirostat": 1})


def test_wishes_replace_the_defaults_and_nothing_else() -> None:
    defaults = Sampling(temperature=0.6, top_p=0.9)
    got = resolve(defaults, {"temperature": 1, "top_k": 20, "logit_bias": {"7": 1, 3: -5}})
    assert got == Sampling(temperature=1.0, top_p=0.9, top_k=20, logit_bias=((3, -5.0), (7, 1.0)))
    assert isinstance(got.temperature, float)
    assert hash(got)
    assert resolve(defaults, {}) == defaults


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "typical_p", "xtc_probability", "xtc_threshold"])
def test_the_ends_of_the_unit_interval_are_allowed(name: str) -> None:
    assert [getattr(resolve(Sampling(), {name: end}), name) for end in (0, 1)] == [0.0, 1.0]


def test_every_field_passes_its_own_default() -> None:
    neutral = Sampling()
    assert resolve(neutral, {field.name: getattr(neutral, field.name) for field in fields(Sampling)}) == neutral


def test_a_model_without_settings_gets_temperature_and_min_p_and_no_penalty() -> None:
    assert model_defaults({}) == Sampling(temperature=0.8, min_p=0.05)


def test_a_models_own_settings_come_instead() -> None:
    assert model_defaults({"temperature": 0.6, "top_k": 20.0, "top_p": 0.95}) == Sampling(
        temperature=0.6, top_k=20, top_p=0.95
    )


def test_penalties_rubbish_and_unknown_settings_of_a_file_are_left_out() -> None:
    settings = {"temperature": NAN, "top_k": 2.5, "repeat_penalty": 1.1, "presence_penalty": 1.0, "mirostat": 2.0}
    assert model_defaults(settings) == Sampling(temperature=0.8, min_p=0.05)
    assert model_defaults({**settings, "top_p": 0.9}) == Sampling(top_p=0.9)
