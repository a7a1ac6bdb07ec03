"""What a model was loaded with travels as plain values and comes back equal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from localllm.errors import UsageError
from localllm.models.kv_types import KvTypes
from localllm.runtime.config import LoadConfig, RuntimeConfig
from localllm.worker.description import (
    config_from_wire,
    config_to_wire,
    describe_loaded,
    runtime_from_wire,
    runtime_to_wire,
)
from tests.fake_engine import fake_service

CONFIGS = (
    LoadConfig(),
    LoadConfig(ctx=512, kv=KvTypes("q8_0", "f16"), flash_attn="on", gpu=5, threads=2, parallel=4, retained=0),
    LoadConfig(kv=KvTypes("q5_1", "q5_1"), gpu="all", template=Path("/a/b c.jinja")),
)


@pytest.mark.parametrize("config", CONFIGS)
def test_load_settings_come_back_equal(config: LoadConfig) -> None:
    assert config_from_wire(json.loads(json.dumps(config_to_wire(config)))) == config


@pytest.mark.parametrize("config", [RuntimeConfig(), RuntimeConfig(itl_target_s=0.5, max_waiting=3, max_running=2)])
def test_runtime_settings_come_back_equal(config: RuntimeConfig) -> None:
    assert runtime_from_wire(json.loads(json.dumps(runtime_to_wire(config)))) == config


@pytest.mark.parametrize(
    "change", [{"warp": 9}, {"ctx": -1}, {"ctx": "many"}, {"kv": 5}, {"kv": "q9_9"}, {"template": 4}, {"gpu": "none"}]
)
def test_what_are_no_settings_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        config_from_wire({**config_to_wire(LoadConfig()), **change})


def test_a_description_is_plain_and_says_what_others_need() -> None:
    with fake_service() as service:
        told = describe_loaded(service, CONFIGS[1])
    assert json.loads(json.dumps(told)).keys() == told.keys()
    assert told["config"] == config_to_wire(CONFIGS[1])
    assert (told["n_ctx"], told["max_sequence_tokens"], told["can_chat"], told["can_fill_in"]) == (
        4096,
        4096,
        True,
        True,
    )
    assert told["sampling"]["temperature"] == 0.0
    assert {"name", "path", "sha256", "architecture", "quant", "n_slots", "n_ctx_train", "n_vocab"} <= told.keys()
    assert {"n_embd", "n_params", "size_bytes", "max_embed_tokens", "settings", "notes"} <= told.keys()
