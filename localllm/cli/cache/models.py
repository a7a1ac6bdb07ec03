"""A model whose caches are asked: where `run` would have it answer."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from localllm.cli.output import Notes
from localllm.errors import LocalLLMError

if TYPE_CHECKING:
    from localllm.cli.options import CacheFlags, LoadFlags
    from localllm.runtime.service import Service
    from localllm.runtime.types import GenerationRequest
    from localllm.worker.client import RemoteService
    from localllm.worker.registry import ServerRecord

TIMEOUT_S = 10.0
_FLUSH_S = 60.0  # what is warmed is to lie on disk when the command ends
_STOPPING_S = 20.0  # a model may write for ten when it is unloaded, after a step
_LOOK_S = 0.1


@dataclass(frozen=True, slots=True)
class Flags:
    """The flags that say where a model is, and how it is loaded."""

    load: LoadFlags
    cache: CacheFlags
    no_server: bool


@contextmanager
def opened(
    model: str, flags: Flags, notes: Notes, request: GenerationRequest, *, must_last: bool = False
) -> Iterator[Service | RemoteService]:
    """Give the model until the block ends, in the server that `run` would take for this prompt, else loaded here.

    `must_last`: not where nothing of what is computed could be kept. Raises: what loading raises; as `require_disk`.
    """
    from localllm.cli.cache.lasting import require_disk
    from localllm.cli.keeping import tier_config
    from localllm.cli.opening import Opener
    from localllm.cli.wishes import load_config

    config = load_config(flags.load, deterministic=flags.cache.deterministic)
    tiers = tier_config(flags.cache, flush_s=_FLUSH_S)
    opener = Opener(notes, tell=notes.say, in_process=flags.no_server, tiers=tiers)
    wanted = replace(request, options=replace(request.options, max_tokens=1))  # nothing is answered
    service: Service | RemoteService | None = opener.find(model, config, wanted)
    if service is None:
        if must_last:
            require_disk(model, flags.cache)
        service = opener.load(model, config, wanted)
    with service:
        yield service


def isolating(service: Service | RemoteService) -> str | None:
    """Return the address of the server that the model is in, where its HTTP clients find nothing of what is ours."""
    from localllm.worker.client import RemoteService

    return service.record.url if isinstance(service, RemoteService) and not service.is_cache_shared else None


def answers(verb: str, notes: Notes, timeout_s: float = TIMEOUT_S) -> tuple[list[dict[str, Any]], list[str]]:
    """Ask every model that a running server of this user holds; return what each says, with its name and server.

    Then the names of those that did not answer, each of which is told of.
    """
    from localllm.worker import client

    found, silent = list[dict[str, Any]](), list[str]()
    for record, entries in _servers(notes, silent):
        for entry in (entry for entry in entries if entry["state"] == "ready"):
            try:
                answer = client.call(record, verb, {"name": entry["name"]}, timeout_s)
            except LocalLLMError as error:
                _note_silent(f"{entry['name']} at {record.url}", error.message, notes, silent)
            else:
                found.append({"model": entry["name"], "server": record.url, **answer})
    return found, silent


def wait_stopping(notes: Notes) -> list[str]:
    """Wait for models that servers are unloading: they write what they keep. Return those that take too long."""
    end_s = time.monotonic() + _STOPPING_S
    while True:
        servers = _servers(Notes(quiet=True), [])
        late = [
            f"{one['name']} at {record.url}" for record, all in servers for one in all if one["state"] == "stopping"
        ]
        if not late or time.monotonic() > end_s:
            break
        time.sleep(_LOOK_S)
    for who in late:
        notes.always(f"note: not waited for, {who}: it is still being unloaded")
    return late


def _servers(notes: Notes, silent: list[str]) -> list[tuple[ServerRecord, list[dict[str, Any]]]]:
    """Return the running servers with their models; one that does not answer is told of and added to `silent`."""
    from localllm.worker import client, registry

    found: list[tuple[ServerRecord, list[dict[str, Any]]]] = []
    for record in registry.running():
        try:
            found.append((record, client.call(record, "ps", timeout_s=TIMEOUT_S)))
        except LocalLLMError as error:
            _note_silent(f"the server at {record.url}", error.message, notes, silent)
    return found


def _note_silent(who: str, why: str, notes: Notes, silent: list[str]) -> None:
    notes.always(f"note: not asked, {who}: {why}")
    silent.append(who)
