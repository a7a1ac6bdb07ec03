"""A server that runs already: given by its address, and left alone."""

from __future__ import annotations

from contextlib import suppress

import psutil

from localllm.bench.client.calls import Target
from localllm.bench.serving.servers.listening import listeners
from localllm.errors import UsageError


class GivenServer:
    """A server that runs already, somewhere; it is left alone.

    Its processes are known where it listens on loopback, now, and they are ours to see.
    """

    def __init__(self, url: str, name: str = "") -> None:
        self.url = url
        self.name = name or url
        self.ready_s: float | None = None
        self.can_restart = False
        self._listening = _listening_here(url)

    def pids(self) -> tuple[int, ...]:
        """Return the processes that listen on its port, with their descendants; () where they cannot be told."""
        found: dict[int, None] = {}
        for process in self._listening:
            with suppress(psutil.Error):
                if process.is_running():
                    found.update({child.pid: None for child in (process, *process.children(recursive=True))})
        return tuple(found)

    def restart(self) -> None:
        """Raise UsageError: what we did not start is not ours to stop."""
        raise UsageError(
            f"{self.name} was not started here, so it cannot be restarted.",
            "give a model or, in a contract, a command instead of a URL",
        )

    def stop(self) -> None:
        """Leave it running."""


def _listening_here(url: str) -> list[psutil.Process]:
    try:
        target = Target.of_url(url.partition("?")[0])
    except (UsageError, ValueError):
        return []  # who asks it for something will say so
    return listeners(target.port) if target.is_here else []
