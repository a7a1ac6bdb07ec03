"""Asks the system's own tools, where they are there and answer in time."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Sequence
from typing import TypeAlias

Ask: TypeAlias = Callable[[Sequence[str]], str]
"""Runs a command; returns what it printed, or "" where it is not there, fails, or is late."""

TIMEOUT_S = 2.0
SLOW_TIMEOUT_S = 10.0


def ask(command: Sequence[str], timeout_s: float = TIMEOUT_S) -> str:
    """Return what `command` prints, in English; "" where it is not there, fails, or takes longer."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "LC_ALL": "C"},
            timeout=timeout_s,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.decode("utf-8", "replace").strip()


def ask_patiently(command: Sequence[str]) -> str:
    """As `ask`, of a tool that takes seconds."""
    return ask(command, SLOW_TIMEOUT_S)
