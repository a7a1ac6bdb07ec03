"""Unix sockets for one user: what may be replaced at their path, and what may not."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest

from localllm.errors import ServerUnreachable, UsageError
from localllm.worker import local_socket


def test_only_the_user_may_connect(tmp_path: Path) -> None:
    with local_socket.bind(tmp_path / "s") as listener:
        assert (tmp_path / "s").stat().st_mode & 0o777 == 0o600
        with local_socket.connect(tmp_path / "s", 1.0):
            accepted, _ = listener.accept()
            assert local_socket.is_same_user(accepted)
            accepted.close()


def test_a_socket_that_a_dead_server_left_is_replaced(tmp_path: Path) -> None:
    local_socket.bind(tmp_path / "s").close()
    assert (tmp_path / "s").exists()
    with local_socket.bind(tmp_path / "s"):
        local_socket.connect(tmp_path / "s", 1.0).close()


def test_a_socket_at_work_is_left_alone(tmp_path: Path) -> None:
    with local_socket.bind(tmp_path / "s") as listener:
        with pytest.raises(UsageError, match="listens at"):
            local_socket.bind(tmp_path / "s")
        listener.accept()[0].close()
        local_socket.connect(tmp_path / "s", 1.0).close()


@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_what_is_no_socket_is_left_alone(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "s"
    {"file": path.touch, "folder": path.mkdir, "link": lambda: path.symlink_to(tmp_path / "x")}[kind]()
    with pytest.raises(UsageError, match="no socket"):
        local_socket.bind(path)
    assert path.is_symlink() or path.exists()


def test_a_path_that_is_too_long_or_cannot_be_made_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="too long"):
        local_socket.bind(tmp_path / ("x" * 104))
    with pytest.raises(UsageError, match="Cannot make"):
        local_socket.bind(Path("/nowhere/s"))


def test_nobody_there_is_unreachable(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path / ("x" * 200)):
        with pytest.raises(ServerUnreachable):
            local_socket.connect(path, 0.5)


def test_a_full_backlog_does_not_hang(tmp_path: Path) -> None:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(tmp_path / "s"))
    listener.listen(0)
    held = local_socket.connect(tmp_path / "s", 1.0)
    with pytest.raises(ServerUnreachable):
        local_socket.connect(tmp_path / "s", 0.2)
    held.close()
    listener.close()


def test_another_users_server_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with local_socket.bind(tmp_path / "s") as listener:
        monkeypatch.setattr(local_socket, "is_same_user", lambda peer: False)
        thread = threading.Thread(target=listener.accept)
        thread.start()
        with pytest.raises(ServerUnreachable, match="another user"):
            local_socket.connect(tmp_path / "s", 1.0)
        thread.join(5)
