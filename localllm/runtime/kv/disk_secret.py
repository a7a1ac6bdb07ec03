"""The folder of the disk tier as its user's own, and the secret in it that keys are made with."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from localllm.models.disk import files

SECRET_BYTES = 32
_NAME = "secret"


def open_folder(folder: Path) -> bytes:
    """Make the folder where there is none; return the user's secret, made by whoever comes first.

    Raises OSError where the folder is a link, is another user's, or could be written by others.
    """
    make_folder(folder)
    path = folder / _NAME
    for _ in range(2):
        with contextlib.suppress(FileNotFoundError):
            secret = files.read_bounded(path, SECRET_BYTES)
            if len(secret) == SECRET_BYTES:
                return secret
            files.set_aside(path)
        leave_secret(folder, os.urandom(SECRET_BYTES))
    return files.read_bounded(path, SECRET_BYTES)


def make_folder(folder: Path) -> None:
    """Make the folder where there is none. Raises OSError as `open_folder` does."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    files.make_own_folder(folder)


def leave_secret(folder: Path, secret: bytes) -> None:
    """Put a secret into the folder, unless there is one. Raises OSError."""
    temporary = folder / f".{files.token()}.tmp"
    files.write_atomic(temporary, secret, mode=0o600)
    try:
        with contextlib.suppress(FileExistsError):
            os.link(temporary, folder / _NAME)  # whole at once, and fails where another process was first
    finally:
        os.unlink(temporary)
