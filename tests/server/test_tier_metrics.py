"""What `/metrics` tells of KV in RAM and on disk."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.metrics_core import Metric

from localllm.runtime.config import RuntimeConfig, TierConfig
from localllm.server import tier_metrics
from localllm.server.metrics import Metrics, Reading
from tests.fake_engine import SPEC, FakeEngine
from tests.server.fakes import Running, fake_supervisor, serving, wait_until
from tests.server.test_metrics import parsed, value

PROMPT = "The harbour opens at nine. " * 50
FAMILIES = (*tier_metrics._MOVED, *tier_metrics._RAM, *tier_metrics._DISK)


def scrape(running: Running) -> dict[str, Metric]:
    return parsed(running.get("/metrics").body.decode())


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    tiers = TierConfig(ram_bytes=1 << 20, disk_dir=str(tmp_path / "kv"), disk_bytes=1 << 20)
    with serving(fake_supervisor(FakeEngine(replace(SPEC, pool_tokens=2048)), config=RuntimeConfig(tiers=tiers))) as it:
        yield it


def test_every_family_has_a_sample_where_there_is_a_disk_tier(running: Running) -> None:
    families = scrape(running)
    for name, kind, _, _ in FAMILIES:
        family = families[name.removesuffix("_total")]
        assert (family.type, len(family.samples)) == (kind, 1), name
    assert value(families["localllm_kv_disk_failed"], model="fake") == 0


def test_without_a_disk_tier_nothing_is_told_of_one() -> None:
    with serving(fake_supervisor(config=RuntimeConfig(tiers=TierConfig(ram_bytes=1 << 20)))) as running:
        families = scrape(running)
    assert len(families["localllm_kv_ram_bytes"].samples) == 1
    assert all(not families[name.removesuffix("_total")].samples for name, *_ in tier_metrics._DISK)
    assert families["localllm_kv_disk_failed"].samples == []


def test_what_is_kept_and_put_back_is_counted_by_its_source(running: Running) -> None:
    body = {"prompt": PROMPT, "max_tokens": 2}
    running.post("/v1/completions", body)
    wait_until(lambda: value(scrape(running)["localllm_kv_ram_blocks"], model="fake") > 0)
    stats = running.worker.service.cache_stats()
    families = scrape(running)
    assert value(families["localllm_kv_ram_bytes"], model="fake") == stats.ram_bytes > 0
    assert value(families["localllm_kv_ram_limit_bytes"], model="fake") == 1 << 20
    running.worker.service._on_engine(running.worker.service._scheduler.clear_retained)
    usage = running.post("/v1/completions", body).json["usage"]
    n_cached = usage["prompt_tokens_details"]["cached_tokens"]
    families = scrape(running)
    tokens = families["localllm_prompt_tokens"]
    assert value(tokens, "_total", model="fake", source="ram") == n_cached > 0
    assert value(tokens, "_total", model="fake", source="device") == 0
    assert value(families["localllm_kv_restored_blocks"], "_total", model="fake") > 0
    assert value(families["localllm_kv_exported_blocks"], "_total", model="fake") > 0


def test_what_was_written_is_counted_in_blocks_and_bytes(running: Running) -> None:
    running.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 2})
    wait_until(lambda: value(scrape(running)["localllm_kv_disk_written_blocks"], "_total", model="fake") > 20)
    wait_until(lambda: value(scrape(running)["localllm_kv_disk_waiting_bytes"], model="fake") == 0)
    families = scrape(running)
    n_written = value(families["localllm_kv_disk_written_bytes"], "_total", model="fake")
    assert value(families["localllm_kv_disk_folder_bytes"], model="fake") == n_written > 0
    assert value(families["localllm_kv_disk_folder_limit_bytes"], model="fake") == 1 << 20


def test_a_disk_that_failed_is_told() -> None:
    families = parsed(Metrics().render([Reading("m", True, 1, {"disk_failure": "No space left on device"})], 0))
    assert value(families["localllm_kv_disk_failed"], model="m") == 1
    assert "No space" not in Metrics().render([Reading("m", True, 1, {"disk_failure": "No space left"})], 0)
