"""What software this is: versions, the wheel it came in, the commit it was made from."""

from __future__ import annotations

import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any


def version(distribution: str) -> str | None:
    """Return the version that is installed; None where it is not."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def wheel_tags(distribution: str) -> list[str]:
    """Return the tags of the wheel that a distribution was installed from; [] where it is not known."""
    try:
        text = metadata.distribution(distribution).read_text("WHEEL") or ""
    except metadata.PackageNotFoundError:
        return []
    return [line.split(":", 1)[1].strip() for line in text.splitlines() if line.startswith("Tag:")]


def git_state(folder: Path) -> dict[str, Any] | None:
    """Return our commit and whether files differ from it; None outside a checkout of the project."""
    if not (folder.parent / ".git").exists():
        return None
    commit = _git(folder, "rev-parse", "--short=12", "HEAD")
    status = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return None if commit is None else {"commit": commit, "dirty": bool(status)}


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def llama_cpp_commit() -> str:
    """Return the commit that llama.cpp was built from. Loads the library. Raises NativeUnavailable."""
    from localllm.backends.llamacpp.bindings import library_commit

    return library_commit()
