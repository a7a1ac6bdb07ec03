"""Where KV is kept: what the flags become, and what is said about it."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from localllm.cli import keeping
from localllm.cli.keeping import default_folder, has_blocks, tell_once, tier_config
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


def test_a_folder_that_hangs_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, told = threading.Event(), list[str]()
    config = TierConfig(disk_dir=str(tmp_path / "kv"), disk_bytes=10**9)
    monkeypatch.setattr(keeping, "_FOLDER_S", 0.05)
    monkeypatch.setattr("localllm.runtime.kv.disk_secret.make_folder", lambda folder: gate.wait(10))
    monkeypatch.setattr("localllm.runtime.kv.disk_room.survey", lambda folder: iter([gate.wait(10)]))
    tell_once(config, told.append)
    assert not told
    assert not has_blocks(config)
    gate.set()


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


@pytest.mark.parametrize("how", ["a file in the way", "others may write", "no way in"])
def test_a_folder_that_cannot_be_used_is_not_told_of_and_ends_no_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    folder, told = tmp_path / "kv", list[str]()
    if how == "a file in the way":
        folder.write_text("")
    else:
        folder.mkdir(mode=0o700)
    if how == "others may write":
        folder.chmod(0o777)
    if how == "no way in":
        _refuse(folder, monkeypatch)
    config = TierConfig(disk_dir=str(folder), disk_bytes=10**9)
    tell_once(config, told.append)
    assert not has_blocks(config)
    assert told == []


def test_doctor_says_of_a_folder_that_cannot_be_looked_at_why(monkeypatch: pytest.MonkeyPatch) -> None:
    from localllm.cli.checks import Machine, kept

    _refuse(default_folder(), monkeypatch)
    [(name, value, state, advice)] = kept(Machine())
    assert (name, state) == ("folder", "wrong")
    assert f"{default_folder()} cannot be used: Permission denied" in value
    assert "LOCALLLM_KV_DIR" in advice


def test_doctor_says_that_another_users_folder_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    from localllm.cli.checks import Machine, kept

    default_folder().mkdir(parents=True, mode=0o700)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    [(name, value, state, _)] = kept(Machine())
    assert (name, state) == ("folder", "wrong")
    assert "another user" in value


@pytest.mark.parametrize("how", ["a file", "a link", "below a file"])
def test_doctor_finds_a_folder_that_cannot_be_used_wrong_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    from localllm.cli.checks import Machine, kept

    folder = tmp_path / "kv"
    monkeypatch.setenv("LOCALLLM_KV_DIR", str(folder / "sub" if how == "below a file" else folder))
    if how == "a link":
        folder.symlink_to(tmp_path / "gone")
    else:
        folder.write_text("")
    [(name, value, state, advice)] = kept(Machine())
    assert (name, state, advice) == ("folder", "wrong", "export LOCALLLM_KV_DIR=/a/folder")
    assert value.startswith(f"{default_folder()} cannot be used: ")


def _refuse(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have whatever is asked of a folder, or of what lies in it, be refused, as a path's own `exists` is not."""
    for name in ("stat", "lstat", "open", "scandir", "listdir", "mkdir"):
        monkeypatch.setattr(os, name, _refusing(folder, getattr(os, name)))


def _refusing(folder: Path, real: Callable[..., object]) -> Callable[..., object]:
    def call(path: str | Path, *args: object, **named: object) -> object:
        if Path(str(path)).is_relative_to(folder):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path, *args, **named)

    return call
