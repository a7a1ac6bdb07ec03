"""Records the golden of a model, and checks it later: after an upgrade of a wheel, a driver, or the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from localllm.bench.goldens.checking import PromptCheck, compare
from localllm.bench.goldens.prompts import PROMPTS, Prompt
from localllm.bench.goldens.recording import OnProgress, load_config, take
from localllm.bench.goldens.shelf import Shelf, model_id, place
from localllm.bench.machine import fingerprint
from localllm.errors import LocalLLMError, ModelNotFound, pasteable
from localllm.models.info import ModelInfo
from localllm.models.resolve import ModelFile
from localllm.models.store import Store
from localllm.runtime.config import LoadConfig, RuntimeConfig
from localllm.runtime.service import Service

Golden = Mapping[str, Any]


class OpensModels(Protocol):
    """Finds and loads models: `compose`, or a fake."""

    def find(self, model: str, /) -> tuple[ModelFile, ModelInfo]:
        """Return a model's files and facts."""
        ...

    def open(self, model: str, config: LoadConfig, /, *, runtime: RuntimeConfig) -> Service:
        """Load it behind a service."""
        ...


@dataclass(frozen=True, slots=True)
class Bench:
    """What recording and checking work with.

    `load` runs a load and returns what it returns: the command line waits for it in a thread.
    """

    opens: OpensModels
    shelf: Shelf = field(default_factory=Shelf)
    on_progress: OnProgress = lambda what, done, total: None
    load: Callable[[Callable[[], Service]], Service] = lambda work: work()

    def service(self, model: str, config: LoadConfig) -> Service:
        """Load a model."""
        # Chunks that end where time tells would move logprobs from one check to the next.
        runtime = RuntimeConfig(fixed_chunks=True)
        return self.load(lambda: self.opens.open(model, config, runtime=runtime))


@dataclass(frozen=True, slots=True)
class GoldenCheck:
    """What moved since a golden was recorded.

    `model_id`: the hash of the bytes that are there now. `stale`: what of machine and software is
    another since, in sentences; `settings`: which of the effective settings. `failed`: why the model
    could not be asked at all.
    """

    golden: Golden
    model_id: str
    stale: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    prompts: tuple[PromptCheck, ...] = ()
    failed: str = ""

    @property
    def is_another_file(self) -> bool:
        """Whether other bytes go by the model's name now."""
        return bool(self.golden["model"]["id"] != self.model_id)

    @property
    def has_moved(self) -> bool:
        """Whether anything is not as it was, beyond drift."""
        return self.is_another_file or bool(self.failed) or any(prompt.moves for prompt in self.prompts)


def record(model: str, bench: Bench) -> tuple[dict[str, Any], Path]:
    """Take the answers of a model and keep them; return the golden and its file.

    Raises as `compose.open`; OSError where it cannot be kept.
    """
    found, info = bench.opens.find(model)
    with closing(bench.service(model, load_config(info.n_ctx_train))) as service:
        entries, settings = take(service, PROMPTS, bench.on_progress), _settings(service)
    golden = {
        "model": fingerprint.model(info) | place(found) | {"id": model_id(found)},
        "recorded_at": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "fingerprint": fingerprint_now(),
        "settings": settings,
        "entries": entries,
    }
    return golden, bench.shelf.put(golden)


def check(model: str, bench: Bench) -> GoldenCheck:
    """Ask a model again what its golden keeps.

    Raises ModelNotFound where it has none, Unavailable where a later version wrote it; as `compose.open`.
    """
    found, info = bench.opens.find(model)
    now = model_id(found)
    golden = bench.shelf.of(found, now)
    if golden is None:
        hint = pasteable("localllm", "bench", "golden", "record", model)
        raise ModelNotFound(f"There is no golden of {found.name}.", hint)
    # The threads are those of then: another number moves every logprob.
    config = load_config(info.n_ctx_train, golden["settings"].get("n_threads"))
    prompts = [Prompt.of(entry) for entry in golden["entries"]]
    with closing(bench.service(model, config)) as service:
        entries, settings = take(service, prompts, bench.on_progress), _settings(service)
    compared = tuple(compare(old, new) for old, new in zip(golden["entries"], entries, strict=True))
    stale = tuple(is_stale(golden, fingerprint_now()))
    return GoldenCheck(golden, now, stale, tuple(_setting_changes(golden["settings"], settings)), compared)


def check_all(bench: Bench, store: Store) -> list[GoldenCheck]:
    """Check every model of the store that has a golden; one that fails is told of, and the next is checked.

    Raises ModelNotFound where none has one.
    """
    checks = list(_checks(bench, store))
    if not checks:
        raise ModelNotFound("No model of the store has a golden.", "localllm bench golden record MODEL")
    return checks


def _checks(bench: Bench, store: Store) -> Iterator[GoldenCheck]:
    for stored in store.list():
        if stored.problem or not stored.sha256:
            continue
        found = ModelFile(stored.name, stored.path, stored.files, stored.sha256, "store")
        golden = bench.shelf.of(found, stored.sha256)
        if golden is not None:
            try:
                yield check(stored.name, bench)
            except LocalLLMError as error:
                yield GoldenCheck(golden, stored.sha256, failed=error.message)


def fingerprint_now() -> dict[str, Any]:
    """Return the machine and the software as they are, llama.cpp's commit too."""
    found: dict[str, Any] = {"machine": fingerprint.machine(), "software": fingerprint.software(native=True)}
    return found | {"fingerprint_id": fingerprint.fingerprint_id(found)}


def is_stale(golden: Golden, now: Mapping[str, Any]) -> list[str]:
    """Return why what was measured then may not hold now, in sentences; [] = it holds.

    `golden`: any document that keeps a `fingerprint` (tuned settings too). `now`: a fingerprint.
    """
    return fingerprint.changes(golden["fingerprint"], now)


def _settings(service: Service) -> dict[str, Any]:
    """Return the effective settings as JSON has them."""
    plain = (str, int, float, bool, type(None))
    return {name: value if isinstance(value, plain) else str(value) for name, value in service.model.settings.items()}


def _setting_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    for name in dict.fromkeys((*old, *new)):
        if old.get(name) != new.get(name):
            yield f"{name}: {old.get(name)}, now {new.get(name)}"
