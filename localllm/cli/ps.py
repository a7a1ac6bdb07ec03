"""`localllm ps`: the servers of this user, and the models in them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from localllm.cli.options import Json

if TYPE_CHECKING:
    from localllm.worker.registry import ServerRecord

TIMEOUT_S = 5.0


def ps(json: Json = False) -> None:
    """List running servers and their models."""
    from localllm.cli.output import Answer, Notes
    from localllm.worker import registry

    records = registry.running()
    servers = [_ask(record) for record in records]
    if json:
        Answer().document({"servers": servers})
        return
    if not servers:
        Notes().say("no server of yours is running (localllm serve)")
        return
    Answer().write(_table(servers))
    notes = Notes()
    for server in servers:
        for model in server["models"]:
            if why := _why(model):
                notes.say(f"{model['name']} at {server['url']}: {why}")


def _ask(record: ServerRecord) -> dict[str, Any]:
    """Return what a server says of itself; `problem` where it does not."""
    from localllm.errors import LocalLLMError
    from localllm.worker import client

    facts: dict[str, Any] = {
        "pid": record.pid,
        "url": record.url,
        "socket": str(record.socket),
        "version": record.version,
        "started_s": record.started_s,
        "models": [],
        "problem": None,
    }
    try:
        models = client.call(record, "ps", timeout_s=TIMEOUT_S)
        facts["models"] = [model for model in models if model["state"] != "unloaded"]
    except LocalLLMError as error:
        facts["problem"] = error.message
    return facts


def _table(servers: list[dict[str, Any]]) -> str:
    from localllm.cli.tables import size, table

    rows = []
    for server in servers:
        for model in server["models"]:
            rows.append(
                (
                    model["name"],
                    model["state"],
                    size(model["size_bytes"]),
                    str(model["n_requests"]),
                    _ago(model["last_used_s"]),
                    str(model["pid"] or "-"),
                    server["url"],
                )
            )
        if not server["models"]:
            rows.append(
                ("-", server["problem"] or "no model is loaded", "-", "-", "-", str(server["pid"]), server["url"])
            )
    return table(("MODEL", "STATE", "SIZE", "REQUESTS", "LAST USED", "PID", "SERVER"), rows, frozenset((2, 3)))


def _why(model: dict[str, Any]) -> str:
    """Return why a model is not as it should be; "" where it is. Too long for the table."""
    return str(model["reason"] or ("its file has changed since it was loaded" if model["is_changed"] else ""))


def _ago(moment_s: float) -> str:
    """Return how long ago something was, in its largest unit; "never" for 0."""
    if not moment_s:
        return "never"
    passed = max(0, int(time.time() - moment_s))
    for unit, seconds in (("d", 86400), ("h", 3600), ("min", 60)):
        if passed >= seconds:
            return f"{passed // seconds} {unit} ago"
    return f"{passed} s ago"
