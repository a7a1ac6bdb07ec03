"""The contracts that come with the program."""

from __future__ import annotations

import difflib
from importlib.resources import files
from pathlib import Path

from localllm.errors import UsageError

START = "start"
"""The one to begin with: valid on every machine, commented."""
NAMES = (START, "apple-laptop", "nvidia-workstation")


def shipped(name: str) -> str:
    """Return the text of a shipped contract. Raises UsageError with the names there are."""
    if name not in NAMES:
        raise UsageError(
            f"No contract called {name!r} is shipped; there are {', '.join(NAMES)}.", "localllm bench init"
        )
    return (files("localllm.bench") / "contracts" / f"{name}.toml").read_text(encoding="utf-8")


def contract_bytes(name: str) -> tuple[bytes, str, Path]:
    """Return a contract's bytes, what it is called and its folder: a file of that name, else a shipped one.

    Raises: UsageError where there is neither.
    """
    path = Path(name)
    if name in NAMES and not path.exists():
        return shipped(name).encode(), f"{name}.toml", Path.cwd()
    from localllm.bench.contract.file import read_bytes

    if not (path.exists() or path.suffix):
        close = difflib.get_close_matches(name, NAMES, 1, 0.5)
        raise UsageError(
            f"There is no file {name}, and no contract of that name is shipped; there are {', '.join(NAMES[1:])}.",
            f"localllm bench run {close[0]}" if close else "localllm bench init > contract.toml",
        )
    return read_bytes(path), path.name, path.absolute().parent
