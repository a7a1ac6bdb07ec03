"""Starts `localllm serve` in a folder of its own, finds its processes, and stops it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import psutil

from localllm.bench.client.calls import Call, Outcome, Target
from localllm.bench.client.client import Client
from proof.processes import workers_of

PROJECT = Path(__file__).resolve().parent.parent
FAKE_ENGINE = "tests.fake_engine:parts"
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 20.0
_LISTENING = re.compile(r"listening on (https?://[^\s\",]+)")


class NotServing(Exception):
    """A server did not come up, or is gone. The message ends with its last lines."""


@dataclass(slots=True)
class Serving:
    """One server process. A context manager: started on entry, and nothing of it is left on exit.

    `folder`: holds its user directory, runtime and temporary folders, its working directory and its log.
    `arguments` follow `localllm serve`. `variables` are set in its environment, which else has none
    of the user's settings.
    """

    folder: Path
    arguments: Sequence[str]
    variables: Mapping[str, str] = field(default_factory=dict)
    url: str = ""
    exit_code: int | None = None
    _process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> Path:
        """What it wrote to stdout and stderr."""
        return self.folder / "serve.log"

    @property
    def pid(self) -> int:
        """The HTTP process."""
        assert self._process is not None
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether the HTTP process is there."""
        return self._process is not None and self._process.poll() is None

    def workers(self) -> list[int]:
        """Return the pids of its workers."""
        return workers_of(self.pid)

    def target(self, **settings: object) -> Target:
        """Return where requests go."""
        return Target.of_url(self.url, **settings)  # type: ignore[arg-type]

    def __enter__(self) -> Serving:
        for name in ("home", "run", "tmp", "cwd"):
            (self.folder / name).mkdir(parents=True, exist_ok=True, mode=0o700)
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "localllm", "serve", "--port", "0", *self.arguments],
                cwd=self.folder / "cwd",
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        try:
            self.url = self._await_url()
            self._await_ready()
        except BaseException:
            self._kill()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def stop(self) -> int | None:
        """Ask it to end, kill it if it does not; return its exit code. Idempotent."""
        if self.is_alive:
            assert self._process is not None
            self._process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.exit_code = self._process.wait(STOP_TIMEOUT_S)
        self._kill()
        return self.exit_code

    def _kill(self) -> None:
        if self._process is None:
            return
        pids = workers_of(self._process.pid)
        self._process.kill()
        self._process.wait()
        for pid in pids:  # each was seen as a worker of our server
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _environment(self) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("LOCALLLM_", "HF_", "XDG_"))}
        return kept | {
            "LOCALLLM_HOME": str(self.folder / "home"),
            "XDG_RUNTIME_DIR": str(self.folder / "run"),
            "TMPDIR": str(self.folder / "tmp"),
            "PYTHONPATH": str(PROJECT),
            **self.variables,
        }

    def _await_url(self) -> str:
        ends_s = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < ends_s:
            found = _LISTENING.search(self.log_text())
            if found:
                return found[1]
            if not self.is_alive:
                break
            time.sleep(0.05)
        raise NotServing(f"the server did not come up:\n{self.last_lines()}")

    def _await_ready(self) -> None:
        ends_s = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < ends_s and self.is_alive:
            if get(self.target(timeout_s=10.0), "/readyz").status == 200:
                return
            time.sleep(0.1)
        raise NotServing(f"the server did not get ready:\n{self.last_lines()}")

    def log_text(self) -> str:
        """Return its log so far."""
        return self.log.read_text(encoding="utf-8", errors="replace")

    def last_lines(self, n: int = 20) -> str:
        """Return the end of its log; that we asked whether it is ready is no news."""
        lines = [line for line in self.log_text().splitlines() if "route=/readyz" not in line]
        return "\n".join(lines[-n:])


def fake_engine(step_ms: float) -> dict[str, str]:
    """Return the environment of a server whose worker computes nothing and takes `step_ms` a step."""
    return {"LOCALLLM_FAULTS": "1", "LOCALLLM_ENGINE": FAKE_ENGINE, "FAKE_STEP_MS": str(step_ms)}


def get(target: Target, path: str) -> Outcome:
    """GET one path on a connection of its own."""
    return send(target, Call(path, None))


def send(target: Target, call: Call) -> Outcome:
    """Send one call on a connection of its own."""

    async def once() -> Outcome:
        client = Client(target)
        try:
            return await client.send(call)
        finally:
            client.close()

    return asyncio.run(once())


def alive(pids: Sequence[int]) -> list[int]:
    """Return those of `pids` that are processes still."""
    return [pid for pid in pids if psutil.pid_exists(pid)]
