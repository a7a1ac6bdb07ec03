"""What every part of the server shares: its settings, its limits, the supervisor, and who is at work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.types import Scope

from localllm.errors import LocalLLMError, Unavailable
from localllm.server.errors import HttpRefusal
from localllm.server.metrics import Metrics
from localllm.server.record import RequestRecord
from localllm.server.request_log import LogFormat, RequestLog

if TYPE_CHECKING:
    from localllm.worker.supervisor import Supervisor


@dataclass(frozen=True, slots=True)
class Limits:
    """What one client may cost. Times in seconds, sizes in bytes.

    `header_s`: until the headers of a request are complete. `body_s` and `body_rate`: a body may take
    `body_s` plus its size by that rate. `idle_s`: an open connection without a request. `n_active`:
    requests that are complete and at work; `n_incomplete`: connections without a complete one, of
    which the oldest is dropped. `stalled_s`: a reader that takes nothing is dropped; so is one for
    whom more than `output_bytes` wait. `silence_s`: headers go out after it, and comments follow.
    """

    header_s: float = 10.0
    header_bytes: int = 32 * 1024
    body_bytes: int = 8 * 1024 * 1024
    body_s: float = 30.0
    body_rate: float = 64 * 1024
    idle_s: float = 20.0
    n_active: int = 64
    n_incomplete: int = 128
    stalled_s: float = 30.0
    output_bytes: int = 256 * 1024
    silence_s: float = 15.0
    load_wait_s: float = 15.0


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """How to listen, whom to let in, and what to tell.

    `allow_hosts`: further names in the Host header, with any port, or one where they give it.
    `allow_origins`: origins whose pages may ask. `api_keys`: any of them lets in, () = none is asked for. `strict`:
    refuse fields that mean nothing here. `drain_timeout_s`: what a stop leaves to requests at work.
    `socket_path`: of the private socket, None = in the user's runtime folder. `is_cache_shared` False: requests
    share KV only with those of the same key. `keeps_agent_headers`: conversations are rendered with the lines that
    agents put before them anew each time.
    """

    host: str = "127.0.0.1"
    port: int = 8080
    allow_hosts: tuple[str, ...] = ()
    allow_origins: tuple[str, ...] = ()
    api_keys: tuple[bytes, ...] = field(default=(), repr=False)
    strict: bool = False
    tls_cert: Path | None = None
    tls_key: Path | None = None
    drain_timeout_s: float = 5.0
    log_format: LogFormat = "text"
    socket_path: Path | None = None
    is_cache_shared: bool = True
    keeps_agent_headers: bool = False
    limits: Limits = Limits()


class ServerState:
    """One running server. All of it belongs to the event loop's thread; `log` and `metrics` to any.

    `port` is the one that is bound. `is_draining`: no new work. `cuts` end the streams at work, each
    with the error it is given; a stream puts its own in and takes it out.
    """

    def __init__(self, settings: ServerSettings, supervisor: Supervisor, log: RequestLog) -> None:
        self.settings = settings
        self.supervisor = supervisor
        self.port = settings.port
        self.metrics = Metrics()
        self.log = log
        self.is_draining = False
        self.cuts: set[Callable[[LocalLLMError], None]] = set()
        self.n_active = 0

    def finish(self, record: RequestRecord) -> None:
        """Tell metrics and log of a request that ended."""
        record.end()
        self.metrics.observe(record)
        self.log.write(record)

    def enter(self, scope: Scope) -> None:
        """Count a request that is complete and begins its work. Raises: HttpRefusal beyond the limit."""
        if self.n_active >= self.settings.limits.n_active:
            raise HttpRefusal(503, "too_many_requests", "Too many requests are at work.", "try again in a moment")
        self.n_active += 1
        scope["state"]["is_counted"] = True

    def leave(self, scope: Scope) -> None:
        """Count it no more, if it was. Idempotent."""
        if scope["state"].pop("is_counted", False):
            self.n_active -= 1

    def refuse_while_draining(self) -> None:
        """Raise Unavailable (code "draining") once the server is stopping."""
        if self.is_draining:
            raise draining(self.settings.drain_timeout_s)


def draining(wait_s: float) -> Unavailable:
    """Return what is told to those who come, or are still there, while the server stops."""
    return Unavailable("The server is stopping.", "try again when it is back", code="draining", retry_after_s=wait_s)


def record_of(scope: Scope) -> RequestRecord:
    """Return the record of the request that is being answered (`request.state.record` in an endpoint)."""
    record: RequestRecord = scope["state"]["record"]
    return record
