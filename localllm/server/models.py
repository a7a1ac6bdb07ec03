"""`/v1/models`: what can be asked for, in OpenAI's list with the fields of llama.cpp and vLLM, and in Ollama's.

Loading and unloading are POST only: no page and no link reaches them. No path of a file is told.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from localllm.server.body import read
from localllm.server.fields import NOTHING_REFUSED, ignored_fields
from localllm.server.replies import reply
from localllm.server.state import ServerState, record_of
from localllm.worker.lifecycle import ModelEntry, ModelState

LIST_PATH: Final = "/v1/models"
LOAD_PATH: Final = "/v1/models/load"
UNLOAD_PATH: Final = "/v1/models/unload"

StatusValue = Literal["loaded", "loading", "unloaded"]

_STATUS: Final[Mapping[ModelState, StatusValue]] = {
    ModelState.READY: "loaded",
    ModelState.LOADING: "loading",
    ModelState.RESTARTING: "loading",
}


class ModelBody(msgspec.Struct, frozen=True, kw_only=True):
    """The model to load or unload, by name."""

    model: Annotated[str, Meta(min_length=1)]


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """Where a model stands: llama.cpp's word, ours, and why, where something is wrong."""

    value: StatusValue
    state: ModelState
    failed: bool
    reason: str | None


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Facts of a loaded model; of others only the file's size in bytes."""

    size: int
    n_vocab: int | None = None
    n_ctx: int | None = None
    n_ctx_train: int | None = None
    n_embd: int | None = None
    n_params: int | None = None


class Modalities(msgspec.Struct, frozen=True, kw_only=True):
    """What goes in and comes out."""

    input_modalities: list[str]
    output_modalities: list[str]


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """One model. `max_model_len`: the longest sequence in tokens, null unless it is loaded."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int | None
    aliases: list[str]
    capabilities: list[str]
    meta: ModelFacts
    architecture: Modalities
    status: Status


class OllamaDetails(msgspec.Struct, frozen=True, kw_only=True):
    """What Ollama's clients show."""

    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class OllamaModel(msgspec.Struct, frozen=True, kw_only=True):
    """One model as Ollama lists it."""

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    capabilities: list[str]
    details: OllamaDetails


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """Those named at start first, then the store's."""

    object: Literal["list"]
    data: list[ModelCard]
    models: list[OllamaModel]


def routes(state: ServerState) -> list[BaseRoute]:
    """Return the routes; those with a name of their own first."""
    models = Models(state)
    return [
        Route(LIST_PATH, models.list_all, methods=["GET"]),
        Route(LOAD_PATH, models.load, methods=["POST"]),
        Route(UNLOAD_PATH, models.unload, methods=["POST"]),
        Route(LIST_PATH + "/{model:path}", models.show, methods=["GET"]),
    ]


class Models:
    """Asks the supervisor. Each raises what refuses it."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def list_all(self, request: Request) -> Response:
        """Answer with every model."""
        entries = self._state.supervisor.entries()
        return reply(ModelList(object="list", data=[*map(card, entries)], models=[*map(ollama_model, entries)]))

    async def show(self, request: Request) -> Response:
        """Answer with one model."""
        name = request.path_params["model"]
        if f"{LIST_PATH}/{name}" in (LOAD_PATH, UNLOAD_PATH):
            raise HTTPException(405, headers={"Allow": "POST"})
        entry = self._state.supervisor.entry(name)
        record_of(request.scope).model = entry.name
        return reply(card(entry))

    async def load(self, request: Request) -> Response:
        """Load a model, wait for it, and answer with it."""
        return await self._change(request, self._state.supervisor.load)

    async def unload(self, request: Request) -> Response:
        """Unload a model and answer with it; requests at work in it end with an error."""
        return await self._change(request, self._state.supervisor.unload)

    async def _change(self, request: Request, change: Callable[[str], Awaitable[ModelEntry]]) -> Response:
        body = await read(request.scope, request.receive, self._state, ModelBody)
        headers = ignored_fields(body, NOTHING_REFUSED, self._state.settings.strict)
        entry = await change(body.value.model)
        record_of(request.scope).model = entry.name
        return reply(card(entry), headers=headers)


def card(entry: ModelEntry) -> ModelCard:
    """Return a model as OpenAI's list has it, with what llama.cpp and vLLM add."""
    model = entry.model
    return ModelCard(
        id=entry.name,
        object="model",
        created=entry.created_s,
        owned_by="localllm",
        root=entry.name,
        parent=None,
        max_model_len=model.get("max_sequence_tokens"),
        aliases=list(entry.aliases),
        capabilities=_capabilities(model),
        meta=ModelFacts(
            size=entry.size_bytes,
            **{name: model.get(name) for name in ("n_vocab", "n_ctx", "n_ctx_train", "n_embd", "n_params")},
        ),
        architecture=Modalities(input_modalities=["text"], output_modalities=["text"]),
        status=Status(
            value=_STATUS.get(entry.state, "unloaded"),
            state=entry.state,
            failed=entry.state in (ModelState.FAILED, ModelState.REFUSED),
            reason=entry.reason or None,
        ),
    )


def ollama_model(entry: ModelEntry) -> OllamaModel:
    """Return a model as Ollama's list has it; what is not known unless it is loaded is ""."""
    model = entry.model
    family = model.get("architecture") or ""
    return OllamaModel(
        name=entry.name,
        model=entry.name,
        modified_at=datetime.fromtimestamp(entry.created_s, UTC).isoformat(),
        size=entry.size_bytes,
        digest=model.get("sha256") or "",
        capabilities=_capabilities(model),
        details=OllamaDetails(
            parent_model="",
            format="gguf",
            family=family,
            families=[family] if family else [],
            parameter_size=parameter_size(model.get("n_params")),
            quantization_level=model.get("quant") or "",
        ),
    )


def parameter_size(n_params: int | None) -> str:
    """Return a number of parameters as model names spell it: 134.5M, 7B."""
    if not n_params:
        return ""
    size, unit = (n_params / 1e9, "B") if n_params >= 1e9 else (n_params / 1e6, "M")
    return f"{size:.1f}".removesuffix(".0") + unit


def _capabilities(model: Mapping[str, Any]) -> list[str]:
    """Return what a loaded model can do; nothing is claimed of one that is not loaded."""
    if not model:
        return []
    wanted = {"completion": True, "chat": model.get("can_chat"), "insert": model.get("can_fill_in"), "embedding": True}
    return [name for name, can in wanted.items() if can]
