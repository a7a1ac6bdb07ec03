"""The command `localllm`: where the process begins and ends, and the list of its verbs.

Only what every start needs is imported before the handlers of signals stand.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

VERBS: tuple[str, ...] = (  # in the order of --help: module `localllm.cli.<verb>` with the function `<verb>`
    "run",
    "chat",
    "pull",
    "ls",
    "show",
    "rm",
    "tokens",
    "doctor",
    "serve",
    "ps",
    "stop",
    "selfcheck",
)
GROUPS: tuple[str, ...] = (  # module `localllm.cli.<group>` with the function `build() -> typer.Typer`
    "cache",
    "bench",
    "config",
)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command and leave with its exit code (DESIGN 13).

    The process ends without the interpreter's own clean-up: a thread may be inside a native load.
    """
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _leave_at_once)
    from localllm.cli.app import run_command
    from localllm.cli.signals import leave

    leave(run_command(sys.argv[1:] if argv is None else argv, VERBS, GROUPS))


def _leave_at_once(number: int, frame: object) -> None:
    """Nothing is at work yet: there is nothing to keep and nothing to say."""
    os._exit(128 + number)
