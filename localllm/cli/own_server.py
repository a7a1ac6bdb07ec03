"""A server of one's own: started as a child, with a folder for everything it writes, and ended for certain."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from localllm.errors import LocalLLMError, ServerUnreachable, TimedOut

LISTEN_TIMEOUT_S = 60.0
_KEPT = ("LOCALLLM_HOME", "LOCALLLM_FAULTS", "LOCALLLM_FAULT_PLAN", "LOCALLLM_ENGINE")
_MAX_LINES = 200
_URL = re.compile(r"listening on (https?://\S+)")


class OwnServer:
    """A child process that serves. Everything it is told to write goes to `folder`, which `remove` deletes.

    None of the user's settings reach it: what is checked is the server, not how it is set up. It keeps no KV on disk.
    """

    def __init__(self, arguments: Sequence[str]) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="localllm-"))
        self.socket = self.folder / "s.sock"
        self.lines: list[str] = []
        self._listening = threading.Event()
        self.url = ""
        for name in ("run", "tmp"):
            (self.folder / name).mkdir(mode=0o700)
        (self.folder / "run" / "localllm").mkdir(mode=0o700)
        self.process = subprocess.Popen(
            [*arguments, "--socket", str(self.socket)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=self._environment(),
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C is for us, who then end it in order
        )
        self._reader = threading.Thread(target=self._read, name="localllm-own-server", daemon=True)
        self._reader.start()

    def wait_listening(self) -> str:
        """Return the URL it listens on. Raises: LocalLLMError with its own words where it ended, TimedOut."""
        give_up_s = time.monotonic() + LISTEN_TIMEOUT_S
        while not self._listening.wait(0.05):
            self.check_running()
            if time.monotonic() > give_up_s:
                raise TimedOut(f"The server did not listen within {LISTEN_TIMEOUT_S:.0f} s.", "localllm serve")
        return self.url

    def check_running(self) -> None:
        """Raise ServerUnreachable where it has ended, with the last it said."""
        failure = self.last_words(wait_s=0.0)
        if failure is not None:
            raise failure

    def last_words(self, wait_s: float = 1.0) -> LocalLLMError | None:
        """Return how it ended, and the last it said; None where it has not, within `wait_s`."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(wait_s)
        code = self.process.poll()
        if code is None:
            return None
        self._reader.join(1.0)
        said = next((line for line in reversed(self.lines) if line.startswith("error: ")), "")
        last = said or (self.lines[-1] if self.lines else "it said nothing")
        return ServerUnreachable(f"The server ended with code {code}: {last}", "localllm serve shows why")

    def wait_ended(self, timeout_s: float) -> int:
        """Return its exit code. Raises TimedOut."""
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise TimedOut(f"The server did not end within {timeout_s:.0f} s.", f"kill {self.process.pid}") from None
        self._reader.join(1.0)
        return code

    def kill(self) -> None:
        """End it and everything it started, if it is still there."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(10.0)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._reader.join(1.0)
        if self.process.stderr is not None and not self._reader.is_alive():  # else something holds the pipe
            self.process.stderr.close()

    def left_files(self) -> list[str]:
        """Name what stands in its folder beside what was there at the start."""
        ours = {Path("run"), Path("tmp"), Path("run/localllm")}
        found = {path.relative_to(self.folder) for path in self.folder.rglob("*")}
        return sorted(str(path) for path in found - ours)

    def remove(self) -> None:
        """Delete its folder."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _environment(self) -> Mapping[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("LOCALLLM_") or name in _KEPT}
        own = {"XDG_RUNTIME_DIR": str(self.folder / "run"), "TMPDIR": str(self.folder / "tmp")}
        return {**kept, **own, "LOCALLLM_CONFIG": os.devnull, "LOCALLLM_KV_DISK": "off"}

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines = [*self.lines, line.rstrip("\n")][-_MAX_LINES:]
            found = _URL.search(line)
            if found and not self.url:
                self.url = found[1]
                self._listening.set()


def serve_command(model: Path) -> list[str]:
    """Return the command that serves a model file on a free port of loopback."""
    return [sys.executable, "-m", "localllm", "serve", str(model), "--host", "127.0.0.1", "--port", "0"]


def failure_of(error: Exception) -> LocalLLMError:
    """Return what went wrong as a failure, whatever it was."""
    if isinstance(error, LocalLLMError):
        return error
    return LocalLLMError(f"{type(error).__name__}: {error}", "localllm selfcheck -v")
