"""`localllm serve` from the first to the last moment: bind, supervise, answer, drain, leave nothing."""

from __future__ import annotations

import asyncio
import signal
import socket
import ssl
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final

from localllm.errors import UsageError
from localllm.models.catalog import DEFAULT_ALIAS
from localllm.server.app import create_app
from localllm.server.binding import bind, url_of
from localllm.server.listener import Listener
from localllm.server.request_log import RequestLog
from localllm.server.state import ServerSettings, ServerState, draining
from localllm.worker import registry
from localllm.worker.local_server import LocalServer
from localllm.worker.supervisor import Supervisor, SupervisorSettings

_EXIT_CODES: Final = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}
_LOOK_EVERY_S: Final = 0.02
_SILENT_S: Final = 1.0
_CUT_SHARE: Final = 0.8  # of the drain's time: then streams still at work are told that it ends


def run_server(settings: ServerSettings, supervisor_settings: SupervisorSettings, notices: Sequence[str] = ()) -> int:
    """Serve until a signal or `localllm stop`; return the exit code (130, 143, 129, 0). `notices` are logged first.

    Raises: UsageError (address, port, certificate, socket path), ModelNotFound; nothing is left running.
    """
    sockets = bind(settings.host, settings.port)
    try:
        return asyncio.run(_Run(settings, supervisor_settings, sockets, notices).serve())
    finally:
        for sock in sockets:
            sock.close()


class _Run:
    """One server's life. All of it happens on the event loop's thread."""

    def __init__(
        self,
        settings: ServerSettings,
        supervisor_settings: SupervisorSettings,
        sockets: list[socket.socket],
        notices: Sequence[str],
    ) -> None:
        self._settings = settings
        self._supervisor_settings = supervisor_settings
        self._sockets = sockets
        self._notices = notices
        self._exit_code = 0
        self._stopping = asyncio.Event()
        self._at_once = asyncio.Event()

    async def serve(self) -> int:
        """Start everything, wait for the end, end everything."""
        settings = self._settings
        loop = asyncio.get_running_loop()
        for number in _EXIT_CODES:
            if signal.getsignal(number) is not signal.SIG_IGN:  # background jobs and nohup ignore them
                loop.add_signal_handler(number, self._stop, _EXIT_CODES[number])
        log = RequestLog(settings.log_format, sys.stderr)
        for notice in self._notices:
            log.note("info", notice)
        supervisor = Supervisor(self._supervisor_settings, log.note)
        state = ServerState(settings, supervisor, log)
        state.port = self._sockets[0].getsockname()[1]
        loop.set_exception_handler(_log_failures(state))
        listener = Listener(state, create_app(state))
        path = settings.socket_path or registry.default_socket()
        local = LocalServer(supervisor, path, lambda: self._stop(0), log.note, is_cache_shared=settings.is_cache_shared)
        url = url_of("https" if settings.tls_cert else "http", settings.host, state.port)
        try:
            await supervisor.start()
            await local.start(url)
            await _start(listener, self._sockets)
            _announce(state, url)
            if not self._supervisor_settings.models:
                log.note("info", _without_models(bool(supervisor.entries())))
            await self._stopping.wait()
            await self._drain(state, local)
        finally:
            await local.close()
            await self._end(supervisor, log)
            await listener.close()
            log.close()
        return self._exit_code

    def _stop(self, exit_code: int) -> None:
        """Begin the end; a second time, at once."""
        if self._stopping.is_set():
            self._at_once.set()
        else:
            self._exit_code = exit_code
            self._stopping.set()

    async def _drain(self, state: ServerState, local: LocalServer) -> None:
        """Refuse new work, let what is at work end, and cut what does not end in time."""
        timeout_s = state.settings.drain_timeout_s
        state.is_draining = True
        local.begin_drain()
        if state.n_active + local.n_streams:
            state.log.note("info", f"stopping: {state.n_active + local.n_streams} requests may end for {timeout_s:g} s")
        await self._idle(state, local, timeout_s * _CUT_SHARE)
        for cut in list(state.cuts):
            cut(draining(timeout_s))
        if not self._at_once.is_set():
            await self._idle(state, local, timeout_s * (1 - _CUT_SHARE) / 2)

    async def _end(self, supervisor: Supervisor, log: RequestLog) -> None:
        """End the models, with what they keep on disk; after a second signal at once."""
        closing = asyncio.ensure_future(supervisor.close())
        hurried = asyncio.ensure_future(self._at_once.wait())
        await asyncio.wait({closing, hurried}, timeout=_SILENT_S, return_when=asyncio.FIRST_COMPLETED)
        if not (closing.done() or hurried.done()):
            log.note("info", "writing to disk what was computed of prompts; another signal ends that")
            await asyncio.wait({closing, hurried}, return_when=asyncio.FIRST_COMPLETED)
        hurried.cancel()
        if not closing.done():
            supervisor.hurry()
        await closing

    async def _idle(self, state: ServerState, local: LocalServer, timeout_s: float) -> None:
        """Wait until nothing is at work, for a while; not at all after a second signal."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        while state.n_active + local.n_streams and loop.time() < deadline_s and not self._at_once.is_set():
            await asyncio.sleep(_LOOK_EVERY_S)


async def _start(listener: Listener, sockets: list[socket.socket]) -> None:
    try:
        await listener.start(sockets)
    except (ssl.SSLError, OSError) as error:
        unread = "one of them is not PEM" if isinstance(error, ssl.SSLError) else error.strerror
        why = getattr(error, "reason", None) or unread
        raise UsageError(f"The certificate or its key is of no use: {why}.", "check --tls-cert and --tls-key") from None


def _announce(state: ServerState, url: str) -> None:
    """Tell the address: to people as a bare line, to programs as one of the log."""
    if state.settings.log_format == "json":
        state.log.note("info", f"listening on {url}")
    else:
        print(f"listening on {url}", file=sys.stderr, flush=True)


def _without_models(has_stored: bool) -> str:
    """Return what somebody who named no model may expect."""
    if has_stored:
        return "no model is loaded yet: a request loads the one it names (localllm ls)"
    return f"there is no model here yet: localllm pull {DEFAULT_ALIAS}"


def _log_failures(state: ServerState) -> Callable[[asyncio.AbstractEventLoop, dict[str, Any]], None]:
    """Return the loop's handler of failures that nobody awaits: their kind is logged, never their text."""

    def log(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if error is not None and not isinstance(error, OSError):  # clients that go
            state.log.note("error", f"{type(error).__name__} in the event loop")

    return log
