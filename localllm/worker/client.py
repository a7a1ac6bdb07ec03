"""A running server as the command line uses it: one call, or a model that it holds, over its private socket."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import msgspec

from localllm.errors import ServerUnreachable
from localllm.runtime.config import LoadConfig
from localllm.runtime.events import Event
from localllm.runtime.kv.explain import CacheStats, Cleared, Explanation, Warmed
from localllm.runtime.stream import TokenStream, rebuild
from localllm.runtime.types import GenerationRequest, Request
from localllm.runtime.warming import warm
from localllm.worker.description import config_to_wire
from localllm.worker.local_connection import Connection
from localllm.worker.local_exchange import Exchange
from localllm.worker.protocol import (
    VERSION,
    AnyFrame,
    Attach,
    BadFrame,
    Call,
    Failed,
    Result,
    failure_event,
    submit_frame,
)
from localllm.worker.registry import ServerRecord

ATTACH_TIMEOUT_S = 2.0
"""How long a server may take to say whether it holds a model: a model is loaded here meanwhile, or not at all."""

CALL_TIMEOUT_S = 30.0

T = TypeVar("T")


def call(
    record: ServerRecord,
    verb: str,
    argument: Any = None,
    timeout_s: float = CALL_TIMEOUT_S,
    *,
    path: Path | None = None,
) -> Any:
    """Ask a server, or the model of the file at `path` in it, for something that is no generation; return its answer.

    Raises: ServerUnreachable, TimedOut, and the failure that the server tells of.
    """
    wish = Attach(VERSION) if path is None else Attach(VERSION, os.path.abspath(path), {})
    connection, _ = Connection.open(record, wish, timeout_s)
    try:
        connection.send(Call(1, verb, argument))
        return _result(connection.receive())
    except (OSError, BadFrame) as error:
        raise ServerUnreachable(f"The server at {record.url} broke off: {error}.", "localllm ps") from None
    finally:
        connection.close()


def attach(record: ServerRecord, path: Path, config: LoadConfig | None) -> RemoteService:
    """Return the model of the file at `path`, loaded with these settings (None = any), in a running server.

    Raises: ServerUnreachable, TimedOut; ModelNotFound, UsageError (other settings), Unavailable.
    """
    if config is not None and config.template is not None:
        config = replace(config, template=config.template.absolute())
    wish = Attach(VERSION, os.path.abspath(path), {} if config is None else config_to_wire(config))
    connection, model = Connection.open(record, wish, ATTACH_TIMEOUT_S)
    return RemoteService(record, connection, model)


@dataclass(frozen=True, slots=True)
class RemoteInfo:
    """What the command line tells of a model's file."""

    architecture: str
    quant: str


@dataclass(frozen=True, slots=True)
class RemoteModel:
    """A model that a server holds. `n_ctx`: the most that one request may use, prompt and answer."""

    name: str
    path: Path
    sha256: str | None
    info: RemoteInfo
    n_ctx: int
    notes: tuple[str, ...] = ()
    is_deterministic: bool = False


class RemoteService:
    """A model in a running server, as `runtime.service.Service` is one in process. Thread safe.

    `is_cache_shared`: whether what is computed through this is found by the server's HTTP clients, and the other way.
    """

    def __init__(self, record: ServerRecord, connection: Connection, model: Mapping[str, Any]) -> None:
        self.record = record
        self.model = RemoteModel(
            name=model["name"],
            path=Path(model["path"]),
            sha256=model["sha256"],
            info=RemoteInfo(model["architecture"], model["quant"]),
            n_ctx=min(model["n_ctx"], model["max_sequence_tokens"]),
            notes=tuple(model["notes"]),
            is_deterministic=model["is_deterministic"],
        )
        self.can_chat: bool = model["can_chat"]
        self.is_cache_shared: bool = model["is_cache_shared"]
        self._exchange = Exchange(connection, record.url)

    @property
    def is_alive(self) -> bool:
        """Say whether submitted work will be done."""
        return self._exchange.is_alive

    def submit(self, request: Request) -> TokenStream:
        """Hand a request to the server; its events come through the stream.

        Returns when the server took it. Raises: what refused it, as in process; ServerUnreachable.
        """
        return self._exchange.submit(request)

    def prompt_tokens(self, request: Request) -> list[int]:
        """Return the ids that a request's prompt becomes. Raises what refuses it; ServerUnreachable."""
        return list(self._exchange.call("prompt_tokens", _argument(request))["tokens"])

    def explain(self, request: Request) -> Explanation:
        """Return what the server's caches know of a prompt, and why not more. Raises as `prompt_tokens`."""
        return _converted(self._exchange.call("explain", _argument(request)), Explanation)

    def warm(self, request: GenerationRequest, on_event: Callable[[Event], None] = lambda event: None) -> Warmed:
        """Have a prompt's beginning computed and pinned there, as in process. Raises as `submit`."""
        return warm(self, request, on_event)

    def document(self, request: Request) -> list[int]:
        """Return the ids with which every prompt begins that goes on after this one. Raises as `prompt_tokens`."""
        return list(self._exchange.call("document", _argument(request))["tokens"])

    def kept(self, request: GenerationRequest) -> Mapping[str, int]:
        """Return how many of a prompt's leading tokens each tier holds there. Raises as `prompt_tokens`."""
        return dict(self._exchange.call("kept", _argument(request)))

    def cache_stats(self) -> CacheStats:
        """Return what the server's caches of this model hold. Raises: ServerUnreachable."""
        return _converted(self._exchange.call("cache_stats", None), CacheStats)

    def clear_cache(self) -> Cleared:
        """Forget all that the server keeps of this model's ended requests. Raises: ServerUnreachable."""
        return _converted(self._exchange.call("clear_cache", None), Cleared)

    def close(self) -> None:
        """Leave the server; what is at work there for this connection ends. Idempotent."""
        self._exchange.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _argument(request: Request) -> dict[str, Any]:
    """Return a request as calls take it."""
    asked = submit_frame(0, request)
    return {"kind": asked.kind, "request": asked.request}


def _converted(value: Any, kind: type[T]) -> T:
    """Return an answer as the struct that it is of. Raises: ServerUnreachable for something else."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError:
        raise ServerUnreachable("The server answered something else.", "localllm ps") from None


def _result(frame: AnyFrame) -> Any:
    match frame:
        case Result():
            return frame.value
        case Failed():
            raise rebuild(failure_event(frame))
        case _:
            raise ServerUnreachable("The server answered something else.", "localllm ps")
