"""A model whose caches are asked: in a running server that holds it, else loaded here."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from localllm.cli.output import Notes
from localllm.errors import LocalLLMError

if TYPE_CHECKING:
    from localllm.cli.options import CacheFlags, LoadFlags
    from localllm.runtime.service import Service
    from localllm.worker.client import RemoteService
    from localllm.worker.registry import ServerRecord

TIMEOUT_S = 10.0
_FLUSH_S = 60.0  # what is warmed is to lie on disk when the command ends
_STOPPING_S = 20.0  # a model may write for ten when it is unloaded, after a step
_LOOK_S = 0.1


@contextmanager
def opened(
    model: str,
    load: LoadFlags,
    cache: CacheFlags,
    notes: Notes,
    *,
    in_process: bool = False,
    is_hashed: bool = False,
) -> Iterator[Service | RemoteService]:
    """Give the model, wherever it is, until the block ends. Raises: what loading raises.

    `is_hashed`: see to it that the file's hash is known: without it nothing goes to disk.
    """
    remote = None if in_process else _running(model)
    if remote is not None:
        with remote as service:
            notes.explain(f"in the server at {service.record.url}")
            yield service
        return
    from localllm import compose
    from localllm.cli.keeping import tier_config
    from localllm.cli.signals import Interrupts, in_thread
    from localllm.cli.wishes import load_config
    from localllm.models.hashes import sha256_of
    from localllm.models.resolve import resolve
    from localllm.runtime.config import RuntimeConfig

    config = load_config(load, deterministic=cache.deterministic)
    runtime = RuntimeConfig(tiers=tier_config(cache, flush_s=_FLUSH_S))

    def load_model() -> Service:
        if is_hashed:
            sha256_of(resolve(model).path)
        return compose.open(model, config, runtime=runtime)

    with Interrupts(None):
        notes.progress(f"loading {model}")
        try:
            local = in_thread(load_model)
        finally:
            notes.clear()
        with local:
            yield local


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


def _running(model: str) -> RemoteService | None:
    from localllm.worker import registry

    records = registry.running()
    if not records:
        return None
    from localllm import __version__
    from localllm.models.resolve import resolve
    from localllm.worker import client

    path = resolve(model).path
    for record in records:
        if record.version == __version__:
            try:
                return client.attach(record, path, None)
            except LocalLLMError:
                continue
    return None
