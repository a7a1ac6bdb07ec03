"""What is wrong with a folder for KV, and what to do about it."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from localllm.runtime.kv.disk_folder import trouble_with
from tests.runtime.kv.disk_blocks import tier

MOVE = "export LOCALLLM_KV_DIR=/a/folder"


def _file(path: Path) -> Path:
    path.write_text("")
    return path


def _link(path: Path, target: Path) -> Path:
    path.symlink_to(target)
    return path


UNUSABLE: dict[str, tuple[Callable[[Path], Path], str]] = {
    "a file": (_file, "it is a file"),
    "a dangling link": (lambda path: _link(path, path.parent / "gone"), "it is a link that leads nowhere"),
    "a link to itself": (lambda path: _link(path, path), "it is a link that leads in a circle"),
    "below a file": (lambda path: _file(path) / "a" / "b", "{path} is a file"),
    "below a dangling link": (
        lambda path: _link(path, path.parent / "gone") / "a",
        "{path} is a link that leads nowhere",
    ),
    "below /proc": (lambda path: Path("/proc/kv/sub"), "/proc has no room for files"),
}


@pytest.mark.parametrize("how", UNUSABLE)
def test_an_unusable_folder_is_named_with_what_is_wrong_and_the_way_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    if "/proc" in how and not Path("/proc/self").exists():
        pytest.skip("there is no /proc")
    make, why = UNUSABLE[how]
    path = tmp_path / "kv"
    folder = make(path)
    trouble = trouble_with(folder)
    assert trouble is not None
    assert (trouble.what, trouble.advice) == (f"{folder} cannot be used: {why.format(path=path)}", MOVE)
    with caplog.at_level(logging.WARNING):
        disk = tier(folder)
    disk.close(flush_s=0)
    assert caplog.messages == [f"nothing is kept on disk: {trouble.what} ({MOVE})"]
    assert disk.stats().failure == trouble.what


def test_a_folder_that_others_can_write_to_is_closed_to_them_and_a_link_followed_by_name(tmp_path: Path) -> None:
    folder = tmp_path / "my kv"
    folder.mkdir()
    folder.chmod(0o777)
    trouble = trouble_with(folder)
    assert trouble is not None
    assert (trouble.what, trouble.advice) == (
        f"{folder} cannot be used: others can write to it",
        f"chmod 700 '{folder}'",
    )
    folder.chmod(0o700)
    assert trouble_with(folder) is None
    linked = trouble_with(_link(tmp_path / "link", folder))
    assert linked is not None
    assert linked.advice == f"export 'LOCALLLM_KV_DIR={folder}'"


@pytest.mark.parametrize("is_there", [True, False])
def test_a_folder_that_cannot_be_written_is_said_to_be_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_there: bool
) -> None:
    folder, real = tmp_path / "kv", os.access
    if is_there:
        folder.mkdir(mode=0o700)
    closed = folder if is_there else tmp_path
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != closed and real(path, mode))
    trouble = trouble_with(folder)
    assert trouble is not None
    assert trouble.what == f"{folder} cannot be used: {'it' if is_there else tmp_path} cannot be written"
    assert trouble.advice == MOVE


def test_looking_at_a_folder_that_can_be_made_makes_nothing(tmp_path: Path) -> None:
    assert trouble_with(tmp_path / "a" / "kv") is None
    assert not list(tmp_path.iterdir())
