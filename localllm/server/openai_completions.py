"""`POST /v1/completions`: text that is already rendered, or token ids, continued or filled in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from localllm.errors import UsageError
from localllm.runtime.stream import Answer, Choice
from localllm.runtime.types import CompletionRequest
from localllm.server import body, generation, options
from localllm.server.answers import Costs, Identity, whole_body
from localllm.server.isolation import Sender, sender_of
from localllm.server.logprobs import CompletionLogprobs
from localllm.server.sse import CompletionChunks
from localllm.server.state import ServerState, record_of
from localllm.server.wire import CompletionBody

if TYPE_CHECKING:
    from localllm.worker.supervisor import Worker

MAX_PROMPTS: Final = 64
"""Prompts of one body. Each is a request of its own in the queue."""

Prompt = str | tuple[int, ...]


def routes(state: ServerState) -> list[BaseRoute]:
    """Return this dialect's routes."""
    return [Route("/v1/completions", Completions(state), methods=["POST"])]


class Completions:
    """The route, as an ASGI app: a stream's chunks pass through nothing else."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. Raises: what refuses it before its answer begins."""
        state = self._state
        decoded = await body.read(scope, receive, state, CompletionBody)
        asked = decoded.value
        ignored = options.check_fields(decoded, state.settings.strict)
        requests = requests_of(asked, sender_of(scope, state.settings))
        worker = await state.supervisor.worker(asked.model, state.settings.limits.load_wait_s)
        echo = await _echo(worker, requests) if asked.echo else []
        identity = Identity.of(f"cmpl-{record_of(scope).request_id}", worker)
        streams = asked.stream_options or {}
        chunks = CompletionChunks(
            identity,
            sum(request.options.n for request in requests),
            has_usage=bool(streams.get("include_usage")),
            is_counting=bool(streams.get("continuous_usage_stats")),
            echo=echo,
        )
        job = generation.Job(
            requests=requests,
            chunks=chunks if asked.stream else None,
            whole=lambda answer, costs: _whole(identity, answer, costs, echo, asked.logprobs is not None),
            headers=ignored,
            asked_tokens=requests[0].options.max_tokens,
            is_detailed=bool(asked.timings),
            has_progress=bool(asked.return_progress),
        )
        await generation.respond(scope, receive, send, state, worker, job)


def requests_of(asked: CompletionBody, sender: Sender) -> list[CompletionRequest]:
    """Return what a body asks for, a request a prompt. Raises: UsageError naming what cannot be honoured."""
    options.check_format(asked)
    prompts = _prompts(asked.prompt)
    if asked.echo and asked.logprobs is not None:
        raise UsageError("echo and logprobs together would need those of the prompt.", "leave one out", field="echo")
    if asked.best_of is not None and asked.best_of != (1 if asked.n is None else asked.n):
        raise UsageError("best_of can only be n: answers are not ranked.", "leave it out", field="best_of")
    chosen = options.generation_options(asked, sender.options, max_tokens=asked.max_tokens, logprobs=asked.logprobs)
    ids = [sender.request_id] if len(prompts) == 1 else [f"{sender.request_id}-{i}" for i in range(len(prompts))]
    return [
        CompletionRequest(prompt, chosen, suffix=asked.suffix, request_id=request_id)
        for prompt, request_id in zip(prompts, ids, strict=True)
    ]


def _prompts(prompt: str | list[str | int | list[int]]) -> list[Prompt]:
    """Return the prompts of a body: a text or its tokens, or a list of either."""
    if isinstance(prompt, str):
        return [prompt]
    ids = [token for token in prompt if isinstance(token, int)]
    if ids and len(ids) == len(prompt):
        return [tuple(ids)]
    if not prompt or ids:
        raise UsageError(
            "prompt must be a text, token ids, or a list of either.", "send one kind, and at least one", field="prompt"
        )
    if len(prompt) > MAX_PROMPTS:
        raise UsageError(f"{len(prompt)} prompts, at most {MAX_PROMPTS}.", "send fewer at once", field="prompt")
    return [part if isinstance(part, str) else tuple(part) for part in prompt if not isinstance(part, int)]


async def _echo(worker: Worker, requests: Sequence[CompletionRequest]) -> list[str]:
    """Return each choice's prompt as text."""
    texts: list[str] = []
    for request in requests:
        text = request.prompt
        if not isinstance(text, str):
            text = (await worker.call("detokenize", {"tokens": list(text)}))["text"]
        texts += [text] * request.options.n
    return texts


def _whole(identity: Identity, answer: Answer, costs: Costs, echo: Sequence[str], has_logprobs: bool) -> dict[str, Any]:
    before = echo or [""] * len(answer.choices)
    choices = [_choice(i, choice, before[i], has_logprobs) for i, choice in enumerate(answer.choices)]
    return whole_body("text_completion", identity, choices, costs)


def _choice(index: int, choice: Choice, before: str, has_logprobs: bool) -> dict[str, Any]:
    return {
        "index": index,
        "text": before + choice.text,
        "logprobs": CompletionLogprobs().of(choice.logprobs) if has_logprobs else None,
        "finish_reason": choice.finish_reason,
    }
