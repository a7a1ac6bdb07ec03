"""Unix sockets that only this user can reach."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
import sys
from pathlib import Path

from localllm.errors import ServerUnreachable, UsageError

MAX_PATH_BYTES = 103
"""The longest path that a Unix socket can have on every system."""


def bind(path: Path) -> socket.socket:
    """Return a listening socket at `path`, mode 0600; one that a dead server left there is replaced.

    Raises: UsageError for a path that is too long, taken by a server or a file, or cannot be made.
    """
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        raise UsageError(
            f"The socket's path is too long: {path} takes more than {MAX_PATH_BYTES} bytes.",
            "localllm serve --socket /shorter/path.sock",
        )
    _make_room(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)  # no moment in which others may connect
    try:
        listener.bind(os.fspath(path))
        listener.listen(64)
    except OSError as error:
        listener.close()
        raise UsageError(f"Cannot make the socket {path}: {error.strerror}.", "localllm serve --socket PATH") from None
    finally:
        os.umask(before)
    return listener


def connect(path: Path, timeout_s: float) -> socket.socket:
    """Return a connection to the server of this user at `path`. Raises ServerUnreachable."""
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    peer.settimeout(timeout_s)
    try:
        peer.connect(os.fspath(path))
        if not is_same_user(peer):
            raise ServerUnreachable(f"The server at {path} belongs to another user.", "localllm ps")
    except (OSError, ValueError) as error:
        peer.close()
        why = error.strerror if isinstance(error, OSError) and error.strerror else type(error).__name__
        raise ServerUnreachable(f"No server answers at {path}: {why}.", "localllm ps") from None
    except ServerUnreachable:
        peer.close()
        raise
    return peer


def is_same_user(peer: socket.socket) -> bool:
    """Say whether the process at the other end is this user's (or root's), as far as the system tells."""
    if sys.platform != "linux":
        return True  # the file's mode and the folder's decide
    _, uid, _ = struct.unpack("iII", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("iII")))
    return uid in (os.geteuid(), 0)


def _make_room(path: Path) -> None:
    """Remove the socket of a dead server. Raises UsageError for anything else that stands there."""
    try:
        facts = os.lstat(path)
    except OSError:
        return
    if not stat.S_ISSOCK(facts.st_mode):
        raise UsageError(f"{path} is there and is no socket.", "localllm serve --socket PATH takes a new name")
    probe = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    probe.settimeout(1.0)
    try:
        probe.connect(os.fspath(path))
    except ConnectionRefusedError:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        return
    except OSError:
        pass  # it may be alive: it is not ours to take away
    finally:
        probe.close()
    raise UsageError(f"A server listens at {path} already.", "localllm ps")
