"""What is measured: a server that runs, whoever started it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Running(Protocol):
    """A server that answers. `url` changes on a restart.

    `ready_s`: seconds from its last start until it answered; None where we did not start it.
    """

    @property
    def name(self) -> str: ...

    @property
    def url(self) -> str: ...

    @property
    def ready_s(self) -> float | None: ...

    @property
    def can_restart(self) -> bool: ...

    def pids(self) -> Sequence[int]:
        """Return its processes, children included; () where they are not on this machine or not ours to see."""
        ...

    def restart(self) -> None:
        """Stop it and start it again. Raises LocalLLMError where it does not come back."""
        ...

    def stop(self) -> None:
        """End it where we started it, and everything it started. Idempotent."""
        ...
