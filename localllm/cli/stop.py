"""`localllm stop`: end a running server as Ctrl-C in its terminal would."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from localllm.cli.options import Json, TalkFlags
from localllm.errors import ServerUnreachable, TimedOut, UsageError, pasteable

if TYPE_CHECKING:
    from localllm.worker.registry import ServerRecord

WAIT_S = 60.0
"""How long running answers may keep a server from ending before that is told."""

CALL_TIMEOUT_S = 5.0
_POLL_S = 0.05
_CLOCKS_DIFFER_S = 1.0

WhichServer: TypeAlias = Annotated[
    str | None, typer.Argument(metavar="[SERVER]", help="Port, address or process of the server, where several run.")
]


def stop(server: WhichServer = None, *, talk: TalkFlags, json: Json = False) -> None:
    """Stop a running server and wait until it is gone.

    Its running answers may end first (serve --drain-timeout).
    """
    from localllm.cli.output import Answer, Notes

    record = choose(server)
    notes = Notes(quiet=talk.quiet, verbose=talk.verbose)
    started_s = time.monotonic()
    end(record, WAIT_S)
    took_s = time.monotonic() - started_s
    notes.say(f"stopped {record.url} (process {record.pid}) in {took_s:.1f} s")
    if json:
        Answer().document({"pid": record.pid, "url": record.url, "took_s": round(took_s, 3)})


def choose(wanted: str | None) -> ServerRecord:
    """Return the server that is meant. Raises: ServerUnreachable, or UsageError where several could be."""
    from localllm.worker import registry

    records = registry.running()
    if not records:
        raise ServerUnreachable("No server of yours is running.", "localllm serve MODEL")
    fitting = [record for record in records if wanted is None or _is_meant(record, wanted)]
    if not fitting:
        urls = ", ".join(record.url for record in records)
        raise ServerUnreachable(f"No server of yours is {wanted!r}; running: {urls}.", "localllm ps")
    if len(fitting) > 1:
        urls = ", ".join(record.url for record in fitting)
        raise UsageError(f"Several servers are running: {urls}.", pasteable("localllm", "stop", str(fitting[0].pid)))
    return fitting[0]


def end(record: ServerRecord, wait_s: float) -> None:
    """Ask a server to stop and wait until its process is gone. Raises: ServerUnreachable, TimedOut."""
    from localllm.worker import client, registry

    try:
        client.call(record, "stop", timeout_s=CALL_TIMEOUT_S)
    except (ServerUnreachable, TimedOut) as error:
        if not registry.is_running(record):
            return
        raise ServerUnreachable(
            f"The server at {record.url} does not listen: {error.message}", f"kill {record.pid}"
        ) from None
    give_up_s = time.monotonic() + wait_s
    while is_there(record):
        if time.monotonic() > give_up_s:
            raise TimedOut(
                f"The server at {record.url} is still ending its answers after {wait_s:.0f} s.", f"kill {record.pid}"
            )
        time.sleep(_POLL_S)


def is_there(record: ServerRecord) -> bool:
    """Say whether the process of a server is still there (one that nobody waited for is not)."""
    import psutil

    from localllm.worker import registry

    if registry.is_running(record):
        return True
    try:
        process = psutil.Process(record.pid)
        is_same = process.create_time() <= record.started_s + _CLOCKS_DIFFER_S
        return bool(is_same and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def _is_meant(record: ServerRecord, wanted: str) -> bool:
    from urllib.parse import urlsplit

    address = urlsplit(record.url)
    return wanted.rstrip("/") in (record.url, address.netloc, str(address.port), str(record.pid))
