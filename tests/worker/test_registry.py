"""The records of running servers: who is found, who is not, and what a dead one leaves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from localllm import __version__
from localllm.errors import UsageError
from localllm.worker import registry

URL = "http://127.0.0.1:8080"


@contextmanager
def other_server(socket: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that registers itself, makes a file at `socket` and waits."""
    script = (
        "import pathlib, sys, time\n"
        "from localllm.worker import registry\n"
        "own = registry.register('http://127.0.0.1:9', pathlib.Path(sys.argv[1]))\n"
        "pathlib.Path(sys.argv[1]).touch()\n"
        "print('ready', flush=True)\n"
        "time.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script, str(socket)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def test_a_server_is_found_until_it_leaves(tmp_path: Path) -> None:
    assert registry.running() == []
    own = registry.register(URL, tmp_path / "s.sock")
    (record,) = registry.running()
    assert (record.pid, record.url, record.socket) == (os.getpid(), URL, tmp_path / "s.sock")
    assert record.version == __version__
    assert registry.is_running(record)
    own.close()
    own.close()
    assert registry.running() == []
    assert not registry.is_running(record)
    assert os.listdir(registry.runtime_folder()) == []


def test_records_and_their_folder_are_this_users_alone(tmp_path: Path) -> None:
    own = registry.register(URL, tmp_path / "s.sock")
    (record,) = registry.running()
    assert record.file.stat().st_mode & 0o777 == 0o600
    assert registry.runtime_folder().stat().st_mode & 0o777 == 0o700
    own.close()


def test_what_a_killed_server_left_is_dropped(tmp_path: Path) -> None:
    registry.ensure_folder()
    socket = registry.runtime_folder() / "their.sock"
    with other_server(socket) as process:
        (record,) = registry.running()
        assert record.pid == process.pid
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert registry.running() == []
        assert not registry.is_running(record)
    assert os.listdir(registry.runtime_folder()) == []


def test_a_file_elsewhere_is_not_taken_away_with_a_dead_servers_record(tmp_path: Path) -> None:
    socket = tmp_path / "precious"
    with other_server(socket) as process:
        process.kill()
        process.wait()
        assert registry.running() == []
    assert socket.exists()


def test_a_stopped_server_is_still_there(tmp_path: Path) -> None:
    with other_server(tmp_path / "s.sock") as process:
        process.send_signal(signal.SIGSTOP)
        assert [record.pid for record in registry.running()] == [process.pid]


def test_several_servers_come_in_the_order_of_their_start(tmp_path: Path) -> None:
    first = registry.register("http://127.0.0.1:1", tmp_path / "a")
    second = registry.register("http://127.0.0.1:2", tmp_path / "b")
    assert [record.url for record in registry.running()] == ["http://127.0.0.1:1", "http://127.0.0.1:2"]
    first.close()
    second.close()


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b"\xff", b'{"pid": "x"}', b"[" * 100_000, b'{"pid": 1e999}'])
def test_a_record_that_is_none_is_no_server(content: bytes) -> None:
    folder = registry.ensure_folder()
    (folder / "1-a.json").write_bytes(content)
    (folder / "1-a.json").chmod(0o600)
    assert registry.running() == []


def test_records_that_others_could_have_written_do_not_count(tmp_path: Path) -> None:
    own = registry.register(URL, tmp_path / "s.sock")
    (record,) = registry.running()
    record.file.chmod(0o620)
    assert registry.running() == []
    record.file.chmod(0o600)
    registry.runtime_folder().chmod(0o755)
    assert registry.running() == []
    own.close()


def test_a_link_in_place_of_a_record_is_not_followed(tmp_path: Path) -> None:
    folder = registry.ensure_folder()
    target = tmp_path / "target.json"
    target.write_text("{}")
    target.chmod(0o600)
    (folder / "1-a.json").symlink_to(target)
    os.mkfifo(folder / "2-b.json", 0o600)
    (folder / "3-c.json").mkdir()
    assert registry.running() == []
    assert target.exists()


def test_a_folder_that_is_open_to_others_is_closed() -> None:
    folder = registry.runtime_folder()
    folder.mkdir(parents=True, mode=0o777)
    folder.chmod(0o777)
    registry.ensure_folder()
    assert folder.stat().st_mode & 0o777 == 0o700


def test_a_link_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    registry.runtime_folder().parent.mkdir(parents=True)
    registry.runtime_folder().symlink_to(tmp_path)
    with pytest.raises(UsageError, match="not this user's"):
        registry.register(URL, tmp_path / "s.sock")
    assert registry.running() == []


def test_a_folder_that_cannot_be_made_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "file"))
    with pytest.raises(UsageError, match="file") as caught:
        registry.register(URL, tmp_path / "s.sock")
    assert "XDG_RUNTIME_DIR" in caught.value.hint


def test_a_relative_runtime_folder_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "run")
    assert registry.runtime_folder().is_absolute()
