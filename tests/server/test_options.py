"""Which fields mean what: none is in two lists, and none that the runtime samples by is missing."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from localllm.errors import UsageError
from localllm.runtime.sampling_params import Sampling
from localllm.runtime.types import GenerationOptions
from localllm.server import body, options
from localllm.server.fields import INERT, ignored_fields, refuse_unless_neutral
from localllm.server.wire import ChatBody, CompletionBody


def test_no_field_is_in_two_lists() -> None:
    known = {*ChatBody.__struct_fields__, *CompletionBody.__struct_fields__}
    assert not known & INERT
    assert not known & options.REFUSED.keys()
    assert not INERT & options.REFUSED.keys()


def test_every_setting_of_the_runtime_is_a_field_of_both_routes() -> None:
    for kind in (ChatBody, CompletionBody):
        assert {field.name for field in fields(Sampling)} <= set(kind.__struct_fields__)
    named_otherwise = {"sampling", "client", "reuse_prefix", "is_private", "salt"}  # the last two are the server's
    assert {field.name for field in fields(GenerationOptions)} - named_otherwise <= set(
        CompletionBody.__struct_fields__
    )


@pytest.mark.parametrize("name", sorted(options.REFUSED))
def test_what_cannot_be_honoured_is_refused_unless_it_changes_nothing(name: str) -> None:
    neutral, hint = options.REFUSED[name]
    assert hint
    for value in (None, *neutral):
        refuse_unless_neutral(name, value, options.REFUSED)
    for value in ("something", 17, ["x"], {"a": 1}):
        with pytest.raises(UsageError) as refused:
            refuse_unless_neutral(name, value, options.REFUSED)
        assert refused.value.details["field"] == name


def test_true_is_not_one() -> None:
    with pytest.raises(UsageError):
        refuse_unless_neutral("repetition_penalty", True, options.REFUSED)


@pytest.mark.parametrize(
    ("sent", "reuses"), [({}, True), ({"cache_prompt": True}, True), ({"cache_prompt": False}, False)]
)
def test_the_cache_can_be_left_out(sent: dict[str, Any], reuses: bool) -> None:
    asked = CompletionBody(prompt="x", **sent)
    assert options.generation_options(asked, GenerationOptions(), max_tokens=1, logprobs=None).reuse_prefix is reuses


def test_ignored_names_are_shown_as_a_header_can_hold_them() -> None:
    data = b'{"prompt":"x","b":1,"a b":2,"\\u00e9":3,"user":"u","n_predict":null}'
    decoded = body.decode(data, CompletionBody)
    assert options.check_fields(decoded, strict=False) == {"x-localllm-ignored-fields": "?, b, ?"}
    with pytest.raises(UsageError):
        options.check_fields(decoded, strict=True)
    many = ignored_fields(decoded, options.REFUSED, strict=False, inside=[f"f{i}" for i in range(50)])
    assert many["x-localllm-ignored-fields"].count(",") == 19
