"""Where KV is kept: what the flags become, and what is said about it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from localllm.cli.keeping import default_folder, tell_once, tier_config
from localllm.cli.options import CacheFlags
from localllm.errors import UsageError
from localllm.runtime.config import TierConfig


def test_by_default_a_tenth_of_the_free_disk_below_the_home() -> None:
    config = tier_config(CacheFlags())
    assert config.ram_bytes is None
    assert config.disk_dir == str(Path(os.environ["LOCALLLM_HOME"]) / "kv") == str(default_folder())
    assert config.disk_bytes is None
    assert config.disk_age_s == 7 * 86_400


def test_the_folder_goes_where_the_variables_say(monkeypatch: pytest.MonkeyPatch, isolated_home: Path) -> None:
    monkeypatch.setenv("LOCALLLM_KV_DIR", "~/elsewhere")
    assert default_folder() == isolated_home / "elsewhere"
    monkeypatch.delenv("LOCALLLM_KV_DIR")
    monkeypatch.delenv("LOCALLLM_HOME")
    assert isolated_home in default_folder().parents
    assert default_folder().name == "kv"


def test_sizes_are_taken_as_they_are_written() -> None:
    config = tier_config(CacheFlags(kv_ram="2GB", kv_disk="1GiB", kv_disk_daily="500MB", kv_disk_age=0.5))
    assert (config.ram_bytes, config.disk_bytes, config.disk_daily_bytes) == (2 * 10**9, 2**30, 5 * 10**8)
    assert config.disk_age_s == 43_200


@pytest.mark.parametrize("flags", [CacheFlags(private=True), CacheFlags(kv_disk="off"), CacheFlags(kv_disk="0")])
def test_private_and_off_name_no_folder(flags: CacheFlags) -> None:
    assert tier_config(flags).disk_dir == ""


def test_off_is_no_memory() -> None:
    assert tier_config(CacheFlags(kv_ram="off")).ram_bytes == 0


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        (CacheFlags(kv_ram="much"), "--kv-ram"),
        (CacheFlags(kv_disk="-1"), "--kv-disk"),
        (CacheFlags(kv_disk_daily="auto"), "--kv-disk-daily"),
        (CacheFlags(kv_disk_age=0), "--kv-disk-age"),
        (CacheFlags(kv_disk_age=float("nan")), "--kv-disk-age"),
    ],
)
def test_nonsense_is_refused_by_the_flag(flags: CacheFlags, name: str) -> None:
    with pytest.raises(UsageError, match=name):
        tier_config(flags)


def test_the_folder_is_told_once(tmp_path: Path) -> None:
    told: list[str] = []
    config = TierConfig(disk_dir=str(tmp_path / "kv"), disk_bytes=10**9)
    tell_once(config, told.append)
    assert (tmp_path / "kv" / "told").exists()
    tell_once(config, told.append)
    assert len(told) == 1
    assert str(tmp_path / "kv") in told[0]
    tell_once(TierConfig(), told.append)
    assert len(told) == 1
