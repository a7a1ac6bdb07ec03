"""A model whose caches are asked: in a running server that holds it, else loaded here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localllm.cli.output import Notes
from localllm.errors import LocalLLMError

if TYPE_CHECKING:
    from localllm.cli.options import CacheFlags, LoadFlags
    from localllm.runtime.service import Service
    from localllm.worker.client import RemoteService

TIMEOUT_S = 10.0


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


def answers(verb: str, notes: Notes) -> list[dict[str, Any]]:
    """Ask every model that a running server of this user holds; return what each says, with its name and server.

    One that does not answer is told of.
    """
    from localllm.worker import client, registry

    found = []
    for record in registry.running():
        who = f"the server at {record.url}"
        try:
            entries = client.call(record, "ps", timeout_s=TIMEOUT_S)
            for entry in (entry for entry in entries if entry["state"] == "ready"):
                who = f"{entry['name']} at {record.url}"
                answer = client.call(record, verb, timeout_s=TIMEOUT_S, path=Path(entry["path"]))
                found.append({"model": entry["name"], "server": record.url, **answer})
        except LocalLLMError as error:
            notes.always(f"note: not asked, {who}: {error.message}")
    return found


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


_FLUSH_S = 60.0  # what is warmed is to lie on disk when the command ends
