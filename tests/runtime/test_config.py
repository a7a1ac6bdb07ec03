"""Load settings are checked where they are made: no value of another kind reaches native code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import localllm
from localllm.errors import UsageError
from localllm.models.kv_types import KvTypes
from localllm.runtime.config import MAX_THREADS, LoadConfig


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ctx", 0),
        ("ctx", -1),
        ("ctx", "512"),
        ("ctx", 1.5),
        ("ctx", True),
        ("ctx", 2**31),
        ("threads", 0),
        ("threads", MAX_THREADS + 1),
        ("threads", 99_999_999),
        ("threads", "2"),
        ("gpu", -1),
        ("gpu", "some"),
        ("gpu", 2.5),
        ("gpu", True),
        ("flash_attn", "maybe"),
        ("flash_attn", True),
        ("kv", "q8_0"),
        ("kv", None),
        ("template", "chat.jinja"),
        ("parallel", 0),
        ("parallel", "2"),
        ("retained", -1),
    ],
)
def test_a_value_that_makes_no_sense_is_refused_by_name(name: str, value: object) -> None:
    wishes: dict[str, Any] = {name: value}
    with pytest.raises(UsageError, match=name):
        LoadConfig(**wishes)


def test_every_value_that_makes_sense_is_taken() -> None:
    most = LoadConfig(ctx=1, kv=KvTypes.parse("q8_0:f16"), flash_attn="on", gpu="all", threads=MAX_THREADS, retained=0)
    assert (most.ctx, most.threads, most.retained) == (1, MAX_THREADS, 0)
    assert LoadConfig(gpu=0, template=Path("chat.jinja"), parallel=4).gpu == 0


@pytest.mark.parametrize("model", [None, 5, ["smollm2"]])
def test_open_refuses_what_is_no_name(model: Any) -> None:
    with pytest.raises(UsageError, match="model"):
        localllm.open(model)


@pytest.mark.parametrize("config", [{"threads": "2"}, {"template": 5}, {"kv": None}, {"kv": "q9"}, {"nosuch": 1}])
def test_open_refuses_bad_settings_before_it_looks_for_the_model(config: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        localllm.open("no-such-model", **config)
