"""`localllm ps`: the servers of this user, and the models in them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from localllm.cli.options import Json

if TYPE_CHECKING:
    from localllm.worker.registry import ServerRecord

TIMEOUT_S = 5.0
STATS_TIMEOUT_S = 1.0
_KEPT = ("ram_bytes", "ram_limit_bytes", "retained_cells")


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
        facts["models"] = [_with_kept(record, model) for model in models if model["state"] != "unloaded"]
    except LocalLLMError as error:
        facts["problem"] = error.message
    return facts


def _with_kept(record: ServerRecord, model: dict[str, Any]) -> dict[str, Any]:
    """Return a model's facts with what it keeps of prompts; None where it does not say so at once."""
    from pathlib import Path

    from localllm.errors import LocalLLMError
    from localllm.worker import client

    if model["state"] != "ready":
        return {**model, "kept": None}
    try:
        stats = client.call(record, "stats", timeout_s=STATS_TIMEOUT_S, path=Path(model["path"]))
        return {**model, "kept": {name: stats[name] for name in _KEPT}}
    except (LocalLLMError, KeyError):
        return {**model, "kept": None}


def _table(servers: list[dict[str, Any]]) -> str:
    from localllm.cli.tables import ago, size, table

    rows = []
    for server in servers:
        for model in server["models"]:
            rows.append(
                (
                    model["name"],
                    model["state"],
                    size(model["size_bytes"]),
                    size(model["kept"]["ram_bytes"]) if model["kept"] else "-",
                    str(model["n_requests"]),
                    ago(time.time() - model["last_used_s"]) if model["last_used_s"] else "never",
                    str(model["pid"] or "-"),
                    server["url"],
                )
            )
        if not server["models"]:
            rows.append(
                ("-", server["problem"] or "no model is loaded", "-", "-", "-", "-", str(server["pid"]), server["url"])
            )
    return table(
        ("MODEL", "STATE", "SIZE", "KV IN RAM", "REQUESTS", "LAST USED", "PID", "SERVER"), rows, frozenset((2, 3, 4))
    )


def _why(model: dict[str, Any]) -> str:
    """Return why a model is not as it should be; "" where it is. Too long for the table."""
    return str(model["reason"] or ("its file has changed since it was loaded" if model["is_changed"] else ""))
