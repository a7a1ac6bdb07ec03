"""`/livez`, `/readyz` and `/health`: whether the process answers, whether it takes work, whether engines do it."""

from __future__ import annotations

import asyncio
from typing import Any, Final, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from localllm.errors import Unavailable
from localllm.server.answer_schemas import ErrorFacts
from localllm.server.errors import error_body, error_headers
from localllm.server.replies import reply
from localllm.server.state import ServerState
from localllm.worker.lifecycle import ModelEntry, ModelState

PING_S: Final = 1.0
"""How long an engine may take to answer; one that is in a step which is not overdue counts as well."""

Trouble = Literal["draining", "loading", "restarting", "failed", "silent"]
_WAITS_S: Final[dict[Trouble, float]] = {"draining": 5, "loading": 2, "restarting": 2, "failed": 30, "silent": 10}
_TOLD: Final[dict[Trouble, str]] = {
    "draining": "The server is stopping.",
    "loading": "A model is being loaded.",
    "restarting": "A model's process died and is being started again.",
    "failed": "A model could not be loaded, or died too often.",
    "silent": "A model's engine does not answer.",
}


class Alive(msgspec.Struct, frozen=True, kw_only=True):
    """The process answers."""

    status: Literal["ok"]


class ModelHealth(msgspec.Struct, frozen=True, kw_only=True):
    """One model. `engine`: whether its engine answered, null unless it is loaded. `pid`: of its process."""

    id: str
    state: ModelState
    engine: Literal["ok", "silent"] | None
    reason: str | None
    pid: int | None
    requests: int


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """The server works, and so do its models; those that are on disk only are left out."""

    status: Literal["ok"]
    models: list[ModelHealth]


class Unready(msgspec.Struct, frozen=True, kw_only=True):
    """Why no work is taken, in one word and as every other error."""

    status: Trouble
    error: ErrorFacts


class Unhealthy(Unready, frozen=True, kw_only=True):
    """What is wrong, and how the models are."""

    models: list[ModelHealth]


def routes(state: ServerState) -> list[BaseRoute]:
    """Return the three routes."""
    health = HealthRoutes(state)
    return [
        Route("/health", health.health, methods=["GET"]),
        Route("/livez", health.livez, methods=["GET"]),
        Route("/readyz", health.readyz, methods=["GET"]),
    ]


class HealthRoutes:
    """Looks at the supervisor's models. Only `/health`, which needs the key, says which ones."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def livez(self, request: Request) -> Response:
        """Answer, as long as the process does."""
        return reply(Alive(status="ok"))

    async def readyz(self, request: Request) -> Response:
        """Say whether work is taken: not while stopping, nor before the models named at start are there."""
        trouble = self._trouble(self._state.supervisor.entries(), {})
        return reply(Alive(status="ok")) if trouble is None else _unready(trouble, {})

    async def health(self, request: Request) -> Response:
        """Ask every engine, and say whether all that should work does."""
        answers = await self._ask_engines()
        entries = [e for e in self._state.supervisor.entries() if e.is_pinned or e.state is not ModelState.UNLOADED]
        trouble = self._trouble(entries, answers)
        models = [_health_of(entry, answers) for entry in entries]
        if trouble is None:
            return reply(Health(status="ok", models=models))
        return _unready(trouble, {"models": models})

    async def _ask_engines(self) -> dict[str, bool]:
        workers = self._state.supervisor.workers()
        answers = await asyncio.gather(*(worker.ping(PING_S) for worker in workers))
        return {worker.name: answer for worker, answer in zip(workers, answers, strict=True)}

    def _trouble(self, entries: list[ModelEntry], answers: dict[str, bool]) -> Trouble | None:
        """Return what is worst. Of models that nobody named at start, only a silent engine counts."""
        if self._state.is_draining:
            return "draining"
        states = {entry.state for entry in entries if entry.is_pinned}
        is_silent = any(e.state is ModelState.READY and answers.get(e.name) is False for e in entries)
        found: dict[Trouble, bool] = {
            "failed": bool(states & {ModelState.FAILED, ModelState.REFUSED}),
            "silent": is_silent,
            "restarting": ModelState.RESTARTING in states,
            "loading": ModelState.LOADING in states,
        }
        return next((trouble for trouble, is_so in found.items() if is_so), None)


def _health_of(entry: ModelEntry, answers: dict[str, bool]) -> ModelHealth:
    answer = answers.get(entry.name)
    return ModelHealth(
        id=entry.name,
        state=entry.state,
        engine=None if answer is None else "ok" if answer else "silent",
        reason=entry.reason or None,
        pid=entry.pid,
        requests=entry.n_requests,
    )


def _unready(trouble: Trouble, more: dict[str, Any]) -> Response:
    """Return a 503 that tells of trouble in the words of every other error, and in one word."""
    error = Unavailable(_TOLD[trouble], code=trouble, retry_after_s=_WAITS_S[trouble])
    return reply({"status": trouble, **more, **error_body(error)}, error.http_status, error_headers(error))
