"""A server to measure that is started from a command, watched until it answers, and ended for certain."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from localllm.bench.client.calls import Target
from localllm.bench.serving.address import chosen
from localllm.bench.serving.asking import ask
from localllm.bench.serving.failures import KEY_REFUSED, key_refused
from localllm.bench.serving.servers import kept
from localllm.bench.serving.servers.listening import free_port, listeners
from localllm.bench.serving.servers.process_tree import ProcessTree
from localllm.bench.serving.servers.starting import OURS, Starting
from localllm.errors import LocalLLMError, ModelRefused, NotEnoughMemory, ServerUnreachable, UsageError, pasteable

HURRIED_S = 2.0
"""How long a server may take to end where a signal ended the benchmark."""
_POLL_S = 0.05
_POLL_TIMEOUT_S = 5.0
_HOST = "127.0.0.1"
_REFUSALS: Mapping[int, type[LocalLLMError]] = {2: UsageError, 3: ModelRefused, 4: NotEnoughMemory}


class StartedServer:
    """A server that runs while the context is entered: `with StartedServer(starting) as running`.

    Nothing it started is left on exit, nor where it does not come up (then `start` raises), nor
    where this process dies. Its log is kept in a file without a name.
    """

    def __init__(self, starting: Starting) -> None:
        self._starting = starting
        self._tree: ProcessTree | None = None
        self._port = 0
        self._ready_s: float | None = None
        self._kept: Path | None = None  # the KV on disk of a server of ours, over restarts

    @property
    def name(self) -> str:
        """What it is called."""
        return self._starting.name

    @property
    def url(self) -> str:
        """Where it answers, with the model that is meant; "" before it was started."""
        return chosen(f"http://{_HOST}:{self._port}", self._starting.serves) if self._port else ""

    @property
    def ready_s(self) -> float | None:
        """Seconds from its last start until it answered."""
        return self._ready_s

    @property
    def can_restart(self) -> bool:
        """Whether it can be stopped and started again: always."""
        return True

    def pids(self) -> tuple[int, ...]:
        """Return its processes, children included."""
        return () if self._tree is None else self._tree.pids()

    def last_lines(self, n: int = 6) -> list[str]:
        """Return the end of what it printed since its last start."""
        return [] if self._tree is None else self._tree.last_lines(n)

    def __enter__(self) -> StartedServer:
        if self._starting.is_ours and kept.VARIABLE not in self._starting.whole_environment(0):
            self._kept = kept.make_folder()
        try:
            self.start()
        except BaseException:
            self._forget_kept()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._tree is not None and kind is not None and issubclass(kind, KeyboardInterrupt):
            self._tree.end(HURRIED_S)  # the user waits
        self.stop()
        self._forget_kept()

    def start(self) -> None:
        """Start it and wait until it answers. Nothing is left where that fails.

        Raises: UsageError where the command cannot be run; ServerUnreachable with its last words
        where it ends or does not answer in time; of our own server, what it says when it refuses.
        """
        self.stop()
        self._port, self._ready_s = self._starting.port or free_port(), None
        began_s = time.monotonic()
        try:
            self._tree = self._spawned()
            self._ready_s = self._await_ready(self._tree, began_s + self._starting.ready_timeout_s) - began_s
        except BaseException:
            self.stop()
            raise

    def restart(self) -> None:
        """Stop it and start it again, on another free port. Raises as `start`."""
        self.start()

    def stop(self) -> None:
        """Ask it to end, then kill what is left of it and of what it started. Idempotent."""
        if self._tree is not None:
            self._tree.end()
            self._tree = None

    def _spawned(self) -> ProcessTree:
        words = self._starting.words(self._port)
        environment = self._starting.whole_environment(self._port)
        if self._kept is not None:
            environment[kept.VARIABLE] = str(self._kept)
        try:
            return ProcessTree(words, environment, self._starting.folder)
        except (FileNotFoundError, NotADirectoryError):
            raise UsageError(
                f"There is no program {words[0]}.", f"install it, or give its path: {pasteable(*words)}"
            ) from None
        except PermissionError:
            raise UsageError(f"{words[0]} may not be run.", pasteable("chmod", "+x", words[0])) from None
        except (OSError, ValueError) as error:
            raise UsageError(f"{words[0]} cannot be run: {error}.", pasteable(*words)) from None

    def _forget_kept(self) -> None:
        if self._kept is not None:
            kept.remove_folder(self._kept)
            self._kept = None

    def _await_ready(self, tree: ProcessTree, give_up_s: float) -> float:
        """Return when it was seen to answer."""
        while time.monotonic() < give_up_s:
            code = tree.exit_code()
            if code is not None:
                raise self._ended(tree, code)
            status, seen_s = _status_when_ready(self._port, self._starting.key), time.monotonic()
            if status in KEY_REFUSED and self._is_answering(tree):
                hint = pasteable(*self._starting.words(self._port))
                raise key_refused(self.name, has_key=self._starting.key is not None, status=status, hint=hint)
            if status == 200 and tree.exit_code() is None and self._is_answering(tree):
                return seen_s
            time.sleep(_POLL_S)
        raise ServerUnreachable(
            f"{self.name} did not answer within {self._starting.ready_timeout_s:g} s: {_words(tree)}",
            pasteable(*self._starting.words(self._port)),
        )

    def _is_answering(self, tree: ProcessTree) -> bool:
        """Say whether it is this server that answers, as far as it can be seen, not one that took the port before."""
        pids = tree.pids()
        found = listeners(self._port)
        return not found or any(process.pid in pids for process in found)

    def _ended(self, tree: ProcessTree, code: int) -> LocalLLMError:
        """Return that it ended before it answered: in its own words, with its own exit code where it is ours."""
        lines = tree.last_lines(20)
        hint = pasteable(*self._starting.words(self._port))
        if self._starting.is_ours and code in _REFUSALS:
            said = next((line for line in reversed(lines) if line.startswith("error: ")), "")
            advice = next((line for line in reversed(lines) if line.startswith("hint: ")), "")
            if said:
                return _REFUSALS[code](said.removeprefix("error: "), advice.removeprefix("hint: "))
        how = f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"
        return ServerUnreachable(f"{self.name} {how} before it answered: {_words(tree)}", hint)


def own_server(model: str) -> StartedServer:
    """Return `localllm serve MODEL` with the user's settings, on a free port of loopback.

    It is started by `with` or `.start()`, which raise what it says where it refuses the model. Entered by
    `with`, it keeps KV on disk in an empty folder of its own.
    """
    command = (OURS, "serve", "{model}", "--host", _HOST, "--port", "{port}")
    return StartedServer(Starting(OURS, command, model))


def _status_when_ready(port: int, key: str | None) -> int | None:
    """Return the status of a server's list of models; None while it is not there, or says that it is not well yet."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    status = _status(port, "/v1/models", headers)
    if status == 200 and _status(port, "/health", headers) not in (200, 404):
        return None
    return status


def _status(port: int, path: str, headers: Mapping[str, str]) -> int | None:
    target = Target(_HOST, port, headers=tuple(headers.items()), timeout_s=_POLL_TIMEOUT_S)
    try:
        return ask(target, path).status
    except ServerUnreachable:
        return None


def _words(tree: ProcessTree) -> str:
    return " | ".join(tree.last_lines(3))[-500:] or "it said nothing"
