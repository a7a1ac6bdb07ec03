"""A model whose caches are asked: in a running server that holds it, else loaded here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from localllm.cli.output import Notes
from localllm.errors import LocalLLMError

if TYPE_CHECKING:
    from localllm.cli.options import LoadFlags
    from localllm.runtime.service import Service
    from localllm.worker.client import RemoteService
    from localllm.worker.registry import ServerRecord

PS_TIMEOUT_S = 5.0


@contextmanager
def opened(model: str, load: LoadFlags, notes: Notes) -> Iterator[Service | RemoteService]:
    """Give the model, wherever it is, until the block ends. Raises: what loading raises."""
    remote = _running(model)
    if remote is not None:
        with remote as service:
            notes.explain(f"in the server at {service.record.url}")
            yield service
        return
    from localllm import compose
    from localllm.cli.keeping import tier_config
    from localllm.cli.options import CacheFlags
    from localllm.cli.signals import Interrupts, in_thread
    from localllm.cli.wishes import load_config
    from localllm.runtime.config import RuntimeConfig

    runtime = RuntimeConfig(tiers=tier_config(CacheFlags(), flush_s=_FLUSH_S))
    with Interrupts(None):
        notes.progress(f"loading {model}")
        try:
            local = in_thread(lambda: compose.open(model, load_config(load), runtime=runtime))
        finally:
            notes.clear()
        with local:
            yield local


def serving() -> Iterator[tuple[ServerRecord, str, RemoteService]]:
    """Yield every model that a running server of this user holds: server, name, and the model itself."""
    from pathlib import Path

    from localllm.worker import client, registry

    for record in registry.running():
        try:
            held = client.call(record, "ps", timeout_s=PS_TIMEOUT_S)
        except LocalLLMError:
            continue
        for entry in held:
            if entry["state"] == "ready":
                try:
                    service = client.attach(record, Path(entry["path"]), None)
                except LocalLLMError:
                    continue
                with service:
                    yield record, entry["name"], service


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
