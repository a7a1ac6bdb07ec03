"""A private socket at work in a thread of this process, over a fake supervisor."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from localllm.runtime.config import LoadConfig
from localllm.worker import registry
from localllm.worker.description import config_to_wire
from localllm.worker.lifecycle import ModelEntry
from localllm.worker.local_server import LocalServer
from localllm.worker.registry import ServerRecord
from tests.fake_engine import FakeEngine, fake_service
from tests.server.fakes import FakeSupervisor, FakeWorker

URL = "http://127.0.0.1:8080"


class FileSupervisor(FakeSupervisor):
    """A fake supervisor whose models lie where their descriptions say."""

    is_changed = False

    def entry(self, name: str | None) -> ModelEntry:
        """Return the entry with the file's real path."""
        entry = super().entry(name)
        return replace(entry, path=Path(entry.model["path"]), is_changed=self.is_changed) if entry.model else entry


def supervisor_of(
    file: Path, engine: FakeEngine | None = None, config: LoadConfig = LoadConfig(), **service: Any
) -> FileSupervisor:
    """Return a supervisor that holds the model of `file`, loaded with `config`."""
    file.touch()
    model = {"path": str(file), "config": config_to_wire(config)}
    return FileSupervisor(FakeWorker("fake", fake_service(engine, **service), model=model))


@dataclass
class Local:
    """A private socket at work."""

    server: LocalServer
    loop: asyncio.AbstractEventLoop
    stops: list[str] = field(default_factory=list)
    log: list[str] = field(default_factory=list)

    @property
    def record(self) -> ServerRecord:
        """The record that others find."""
        (record,) = registry.running()
        return record

    @property
    def worker(self) -> FakeWorker:
        """The model's worker."""
        return self.server.supervisor.fakes["fake"]  # type: ignore[attr-defined,no-any-return]

    def run(self, coroutine: Any) -> Any:
        """Run a coroutine on the server's loop and return what it gives."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(20)

    def call(self, function: Any, *arguments: Any) -> Any:
        """Call a function on the server's loop and return what it gives."""

        async def calling() -> Any:
            return function(*arguments)

        return self.run(calling())


async def _left() -> set[asyncio.Task[Any]]:
    """Return the tasks that do not end by themselves."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    if not others:
        return set()
    _, left = await asyncio.wait(others, timeout=5)
    return left


@contextmanager
def listening(supervisor: FakeSupervisor, path: Path | None = None, *, is_cache_shared: bool = True) -> Iterator[Local]:
    """Listen on a private socket until the block ends; nothing of it is left then."""
    loop = asyncio.new_event_loop()
    stops: list[str] = []
    log: list[str] = []
    path = registry.default_socket() if path is None else path
    server = LocalServer(
        supervisor,  # type: ignore[arg-type]
        path,
        on_stop=lambda: stops.append("stop"),
        log=lambda level, text: log.append(f"{level}: {text}"),
        is_cache_shared=is_cache_shared,
    )
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    local = Local(server, loop, stops, log)
    try:
        local.run(server.start(URL))
        yield local
    finally:
        local.run(server.close())
        left = local.run(_left())
        local.run(loop.shutdown_default_executor())
        loop.call_soon_threadsafe(loop.stop)
        thread.join(20)
        loop.close()
        for worker in supervisor.fakes.values():
            worker.service.close()
        assert not path.exists(), "the socket is left"
        assert not left, left
