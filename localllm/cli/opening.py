"""A model for a verb: in a running server that holds it as the flags say, else loaded in this process."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

from localllm.cli.output import Notes
from localllm.errors import LocalLLMError

if TYPE_CHECKING:
    from pathlib import Path

    from localllm.runtime.config import LoadConfig, TierConfig
    from localllm.runtime.service import Service
    from localllm.runtime.stream import TokenStream
    from localllm.runtime.types import Request
    from localllm.worker.client import RemoteService


class ModelKind(Protocol):
    """What a model's file says of itself, as far as it is printed."""

    @property
    def architecture(self) -> str:
        """The header's name of it."""
        ...

    @property
    def quant(self) -> str:
        """The file type's name."""
        ...


class OpenedModel(Protocol):
    """What is printed of a loaded model. `n_ctx`: tokens of its context."""

    @property
    def name(self) -> str:
        """What it is called."""
        ...

    @property
    def path(self) -> Path:
        """Its file."""
        ...

    @property
    def sha256(self) -> str | None:
        """The file's hash, where it is known."""
        ...

    @property
    def info(self) -> ModelKind:
        """What its file says."""
        ...

    @property
    def n_ctx(self) -> int:
        """Tokens of its context."""
        ...

    @property
    def is_deterministic(self) -> bool:
        """Say whether equal requests get answers equal to the last bit."""
        ...

    @property
    def notes(self) -> tuple[str, ...]:
        """What was decided when it was loaded."""
        ...


class OpenedService(Protocol):
    """A loaded model at work, wherever that is: `runtime.service.Service` or `worker.client.RemoteService`."""

    @property
    def model(self) -> OpenedModel:
        """What is loaded."""
        ...

    @property
    def can_chat(self) -> bool:
        """Say whether there is a chat template."""
        ...

    @property
    def is_alive(self) -> bool:
        """Say whether submitted work will be done."""
        ...

    def submit(self, request: Request) -> TokenStream:
        """Begin a request. Raises what refuses it."""
        ...

    def prompt_tokens(self, request: Request) -> list[int]:
        """Return the ids that a request's prompt becomes."""
        ...

    def close(self) -> None:
        """End what is at work and leave the model."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Opener:
    """Opens models under one set of flags.

    `tell` gets a line on where the model is, and why not in a server that was asked; `in_process`
    asks none. `tiers`: where a model that is loaded here keeps what it computed.
    """

    def __init__(self, notes: Notes, *, tell: Callable[[str], None], in_process: bool, tiers: TierConfig) -> None:
        self._notes = notes
        self._tiers = tiers
        self._tell = tell
        self._in_process = in_process

    def open(self, model: str, config: LoadConfig, sized_for: Request | None) -> OpenedService:
        """Return the model at work. With `sized_for`, an automatic context is just long enough for that request.

        Raises: what loading raises; Stopped, where a signal came meanwhile.
        """
        return self.find(model, config, sized_for) or self.load(model, config, sized_for)

    def find(self, model: str, config: LoadConfig, sized_for: Request | None) -> RemoteService | None:
        """Return the model where a running server of this user holds it with these settings, if one is to be asked."""
        from localllm.worker import registry

        records = [] if self._in_process else registry.running()
        if not records:
            return None
        from localllm import __version__
        from localllm.models.resolve import resolve
        from localllm.worker import client

        path = resolve(model).path
        for record in records:
            why = ""
            if record.version != __version__:
                why = f"it is localllm {record.version}"
            else:
                try:
                    service = client.attach(record, path, config)
                    if is_long_enough(service, config, sized_for):
                        self._tell(f"through the server at {record.url} (process {record.pid})")
                        return service
                    service.close()
                    why = f"its context of {service.model.n_ctx} tokens is too short for this prompt and its answer"
                except LocalLLMError as error:
                    why = error.message
            self._tell(f"not through the server at {record.url}: {why.rstrip('.')}")
        return None

    def load(self, model: str, config: LoadConfig, sized_for: Request | None) -> Service:
        """Load a model beside the main thread, which stays open to signals and the time limit.

        Raises: as `open`.
        """
        from localllm.cli.signals import in_thread

        def load() -> Service:
            from localllm import compose
            from localllm.runtime.config import RuntimeConfig

            return compose.open(model, config, runtime=RuntimeConfig(tiers=self._tiers), sized_for=sized_for)

        notes = self._notes
        notes.progress(f"loading {model}")
        started_s = time.monotonic()
        gc.disable()  # nothing that a start makes is garbage: looking for it takes a twentieth of the start
        try:
            service = in_thread(load)
        finally:
            gc.freeze()
            gc.enable()
            notes.clear()
        for line in service.model.notes:
            notes.explain(line)
        if self._tiers.disk_dir and service.model.sha256 is None:
            notes.explain(f"nothing of this goes to disk: its file was not hashed yet (localllm show {model})")
        notes.explain(f"loaded in {time.monotonic() - started_s:.2f} s, context of {service.model.n_ctx} tokens")
        return service


def is_long_enough(service: OpenedService, config: LoadConfig, sized_for: Request | None) -> bool:
    """Say whether a context holds what an automatic one would be sized for."""
    if sized_for is None or config.ctx is not None:
        return True
    from localllm.runtime.config import ANSWER_TOKENS

    wanted = sized_for.options.max_tokens
    n_answer = ANSWER_TOKENS if wanted is None else wanted
    return len(service.prompt_tokens(sized_for)) + n_answer <= service.model.n_ctx
