"""A folder for what a measured server of ours keeps on disk: an empty one, and the user's is not filled with it."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from pathlib import Path

import psutil

from localllm.errors import LocalLLMError
from localllm.models.store import default_home

VARIABLE = "LOCALLLM_KV_DIR"
"""Where a server of ours keeps KV on disk, where that is set."""

_NAME = re.compile(r"bench-kv-(\d+)-\w+")


def make_folder() -> Path | None:
    """Return a new folder on the disk where the user's own things lie; None where none can be made.

    What benchmarks that were killed left there is deleted.
    """
    try:
        home = default_home()
        home.mkdir(parents=True, exist_ok=True)
        for left in home.iterdir():
            found = _NAME.fullmatch(left.name)
            if found is not None and not psutil.pid_exists(int(found[1])):
                remove_folder(left)
        return Path(tempfile.mkdtemp(prefix=f"bench-kv-{os.getpid()}-", dir=home))
    except (OSError, LocalLLMError):
        return None


def remove_folder(folder: Path) -> None:
    """Delete a folder that `make_folder` made, as far as that can be done."""
    with contextlib.suppress(OSError):
        shutil.rmtree(folder)
