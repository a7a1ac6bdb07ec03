"""A program in a session of its own, with everything it starts, and its certain end."""

from __future__ import annotations

import os
import secrets
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

import psutil

from localllm.bench.serving.servers.starting import is_secret

MARK = "LOCALLLM_BENCH_MARK"
"""Set in the environment of what is started: who has its value was started by that."""
TERMINATE_S = 15.0
CHILDREN_S = 2.0
_LEAST_SECRET = 8
"""Characters: a shorter one would be found in ordinary words."""
_GUARD = 'read ended || { kill -s TERM -- "-$0"; sleep 2; kill -s KILL -- "-$0"; }'
"""Ends the group $0 where its stdin closes without a line: we are gone, however that came."""


class ProcessTree:
    """A program that runs, its descendants, and what they print (a file without a name, so nothing of it is left).

    A guard (a shell that waits on a pipe of ours) ends it where we die without doing so. Raises
    FileNotFoundError, PermissionError, OSError where the program cannot be started.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], folder: Path | None) -> None:
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `end`)
        self._process: subprocess.Popen[bytes] | None = None
        self._guard: subprocess.Popen[bytes] | None = None
        self._seen: dict[int, psutil.Process] = {}
        self._mark = secrets.token_hex(16)
        self._secrets = _secrets_in(environment)
        self._failure: BaseException | None = None
        self._has_ended = False
        # A signal's handler may raise in the main thread at any point: in a thread no child can get lost.
        starter = threading.Thread(target=self._start, args=(command, environment, folder), name="localllm-start")
        starter.start()
        try:
            starter.join()
            if self._failure is not None:
                raise self._failure
        except BaseException:
            starter.join()
            self.end(terminate_s=0.0)
            raise

    def _start(self, command: Sequence[str], environment: Mapping[str, str], folder: Path | None) -> None:
        try:
            self._process = subprocess.Popen(
                list(command),
                cwd=folder,
                env={**environment, MARK: self._mark},
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                start_new_session=True,  # Ctrl-C is for us, who then end it in order
            )
            self._guard = subprocess.Popen(
                ["/bin/sh", "-c", _GUARD, str(self._process.pid)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except BaseException as error:
            self._failure = error

    @property
    def _leader_pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def exit_code(self) -> int | None:
        """Return how the program ended; None where it runs."""
        return None if self._process is None else self._process.poll()

    def pids(self) -> tuple[int, ...]:
        """Return the program and its descendants that live, also those that left their parent since they were seen."""
        if self._process is None:
            return ()
        with suppress(psutil.Error):
            leader = psutil.Process(self._process.pid)
            for process in (leader, *leader.children(recursive=True)):
                self._seen.setdefault(process.pid, process)
        return tuple(pid for pid, process in self._seen.items() if _lives(process))

    def last_lines(self, n: int = 6) -> list[str]:
        """Return the end of what was printed, without empty lines and without the secrets of its environment."""
        size = os.fstat(self._log.fileno()).st_size
        data = os.pread(self._log.fileno(), 16_384, max(0, size - 16_384))
        text = data.decode("utf-8", errors="replace")
        for secret in self._secrets:
            text = text.replace(secret, "(secret)")
        lines = [line.strip() for line in text.splitlines()]
        return [line for line in lines if line][-n:]

    def end(self, terminate_s: float = TERMINATE_S) -> None:
        """Ask the program to end, then whatever it left; kill what does not. Idempotent; nothing of it is left.

        Only descendants are signalled, each known by its pid and start time. Also where a signal
        interrupts the waiting, all are killed before that is raised further.
        """
        if self._has_ended:
            return
        try:
            if self._left() and self._process is not None and self._process.poll() is None:
                self._process.terminate()
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(terminate_s)
            rest = [process for process in self._left() if process.pid != self._leader_pid]
            for process in rest:
                with suppress(psutil.Error):
                    process.terminate()
            _await_ends(rest, CHILDREN_S if terminate_s else 0.0)
        finally:
            self._kill()

    def _kill(self) -> None:
        left = self._left()
        for process in left:
            with suppress(psutil.Error):
                process.kill()
        _await_ends(left, CHILDREN_S)
        if self._process is not None:
            with suppress(subprocess.TimeoutExpired):  # one that hangs in the kernel ends when that lets it
                self._process.wait(CHILDREN_S)
        self._has_ended = True
        self._release_guard()
        with suppress(OSError):
            self._log.close()

    def _left(self) -> list[psutil.Process]:
        """Return what lives of the tree: what was seen, is in the session that was made for it, or has our mark."""
        self.pids()
        for process in self._marked():
            self._seen.setdefault(process.pid, process)
        for pid in self._in_session():
            with suppress(psutil.Error):
                self._seen.setdefault(pid, psutil.Process(pid))
        return [process for process in self._seen.values() if _lives(process)]

    def _marked(self) -> list[psutil.Process]:
        """Return who was started with our environment: a daemon leaves its session and its parents, and keeps that."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                if process.environ().get(MARK) == self._mark:
                    found.append(process)
        return found

    def _in_session(self) -> list[int]:
        """Return who is in our session. A number is free for others only once nobody is: then it is not ours."""
        if self._process is None or (self._process.returncode is not None and psutil.pid_exists(self._process.pid)):
            return []
        found = []
        for pid in psutil.pids():
            with suppress(OSError):
                if os.getsid(pid) == self._process.pid:
                    found.append(pid)
        return found

    def _release_guard(self) -> None:
        if self._guard is None or self._guard.stdin is None:
            return
        with suppress(OSError, ValueError):
            self._guard.stdin.write(b"ended\n")
            self._guard.stdin.close()
        self._guard.wait()


def _secrets_in(environment: Mapping[str, str]) -> list[str]:
    """Return what the environment holds under names of secrets; the longest first, as one may hold another."""
    found = {value for name, value in environment.items() if is_secret(name) and len(value) >= _LEAST_SECRET}
    return sorted(found, key=len, reverse=True)


def _lives(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def _await_ends(processes: Sequence[psutil.Process], timeout_s: float) -> None:
    """Wait until none of them lives; a zombie that nobody reaps is none."""
    give_up_s = time.monotonic() + timeout_s
    while any(_lives(process) for process in processes) and time.monotonic() < give_up_s:
        time.sleep(0.01)
