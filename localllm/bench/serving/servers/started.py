"""Servers to measure: started from a command and ended for certain, or given by their address."""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from urllib.parse import quote

import psutil

from localllm.bench.client.calls import Target
from localllm.bench.serving.asking import ask
from localllm.bench.serving.servers.process_tree import ProcessTree, listeners
from localllm.errors import LocalLLMError, ModelRefused, NotEnoughMemory, ServerUnreachable, UsageError, pasteable

READY_TIMEOUT_S = 600.0
HURRIED_S = 2.0
"""How long a server may take to end where a signal ended the benchmark."""
PLACEHOLDERS = ("port", "model")
OURS = "localllm"
_PLACEHOLDER = re.compile(r"\{([a-z_]+)\}")
_POLL_S = 0.05
_POLL_TIMEOUT_S = 5.0
_HOST = "127.0.0.1"
_FORWARDERS = ("ssh", "sshd", "docker-proxy", "com.docker.backend", "kubectl", "rootlessport", "socat")
"""Programs that listen for a server elsewhere: their memory is not its memory."""
_REFUSALS: Mapping[int, type[LocalLLMError]] = {2: UsageError, 3: ModelRefused, 4: NotEnoughMemory}


@dataclass(frozen=True, slots=True)
class Starting:
    """How a server is started.

    `command`: words; "localllm" as the first is this program. `variables` are set in its
    environment, which is `environment` else (None = ours as it is then). In both {port} and {model}
    stand for its port and the model (a path or a name). `port` 0: a free one at each start.
    `serves`: which of its models is meant, where it lists several. `folder`: where it runs. `key`:
    the bearer key it asks for.
    """

    name: str
    command: tuple[str, ...]
    model: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] | None = None
    port: int = 0
    serves: str = ""
    folder: Path | None = None
    key: str | None = None
    ready_timeout_s: float = READY_TIMEOUT_S

    @property
    def is_ours(self) -> bool:
        """Whether it is this program that serves."""
        return self.command[0] == OURS

    def words(self, port: int) -> list[str]:
        """Return the command line for a port."""
        words = [self._filled(word, port) for word in self.command]
        return [sys.executable, "-m", OURS, *words[1:]] if self.is_ours else words

    def whole_environment(self, port: int) -> dict[str, str]:
        """Return the environment for a port."""
        ours = os.environ if self.environment is None else self.environment
        return {**ours, **{name: self._filled(value, port) for name, value in self.variables.items()}}

    def _filled(self, text: str, port: int) -> str:
        known = {"port": str(port), "model": self.model}
        return _PLACEHOLDER.sub(lambda found: known.get(found[1], found[0]), text)


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
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._tree is not None and kind is not None and issubclass(kind, KeyboardInterrupt):
            self._tree.end(HURRIED_S)  # the user waits
        self.stop()

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
        try:
            return ProcessTree(words, self._starting.whole_environment(self._port), self._starting.folder)
        except (FileNotFoundError, NotADirectoryError):
            raise UsageError(
                f"There is no program {words[0]}.", f"install it, or give its path: {pasteable(*words)}"
            ) from None
        except PermissionError:
            raise UsageError(f"{words[0]} may not be run.", pasteable("chmod", "+x", words[0])) from None
        except (OSError, ValueError) as error:
            raise UsageError(f"{words[0]} cannot be run: {error}.", pasteable(*words)) from None

    def _await_ready(self, tree: ProcessTree, give_up_s: float) -> float:
        """Return when it was seen to answer."""
        while time.monotonic() < give_up_s:
            code = tree.exit_code()
            if code is not None:
                raise self._ended(tree, code)
            status, seen_s = _status_when_ready(self._port, self._starting.key), time.monotonic()
            if status in (401, 403) and self._is_answering(tree):
                asks = "does not take the key" if self._starting.key else "asks for a key"
                raise ServerUnreachable(f"{self.name} {asks}.", pasteable(*self._starting.words(self._port)))
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
        found = [process for process in listeners(self._port) if _name(process) not in _FORWARDERS]
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


class GivenServer:
    """A server that runs already, somewhere; it is left alone.

    Its processes are known where it listens on loopback, now, and they are ours to see.
    """

    def __init__(self, url: str, name: str = "") -> None:
        self.url = url
        self.name = name or url
        self.ready_s: float | None = None
        self.can_restart = False
        self._listening = _local_listeners(url)

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


def own_server(model: str) -> StartedServer:
    """Return `localllm serve MODEL` with the user's settings, on a free port of loopback.

    It is started by `with` or `.start()`, which raise what it says where it refuses the model.
    """
    command = (OURS, "serve", "{model}", "--host", _HOST, "--port", "{port}")
    return StartedServer(Starting(OURS, command, model))


def chosen(url: str, model: str) -> str:
    """Return the address of one of a server's models; of its first where `model` is ""."""
    return f"{url}?model={quote(model, safe='')}" if model else url


def placeholders(words: Sequence[str]) -> list[str]:
    """Return the names in braces in a command, known ones or not."""
    return [name for word in words for name in _PLACEHOLDER.findall(word)]


def free_port() -> int:
    """Return a port of loopback that is free now."""
    with socket.socket() as sock:
        sock.bind((_HOST, 0))
        return int(sock.getsockname()[1])


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


def _local_listeners(url: str) -> list[psutil.Process]:
    try:
        target = Target.of_url(url.partition("?")[0])
    except (UsageError, ValueError):
        return []  # who asks it for something will say so
    is_local = target.host == "localhost"
    with suppress(ValueError):
        address = ipaddress.ip_address(target.host)
        is_local = address.is_loopback or address.is_unspecified
    if not is_local:
        return []
    port = target.port
    return [process for process in listeners(port) if _name(process) not in _FORWARDERS]


def _name(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return str(process.name())
    return ""
