"""`POST /v1/chat/completions`: OpenAI's chat, whole or as a stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from localllm.errors import UsageError
from localllm.runtime.stream import Answer, Choice
from localllm.runtime.types import MAX_TOP_LOGPROBS, ChatRequest
from localllm.server import agent_headers, body, generation, logprobs, options
from localllm.server.answers import Costs, Identity, whole_body
from localllm.server.isolation import Sender, sender_of
from localllm.server.sse import ChatChunks
from localllm.server.state import ServerState
from localllm.server.wire import ChatBody

if TYPE_CHECKING:
    from localllm.server.tokens import TemplateBody

_TEXT_PARTS = frozenset(("text", "input_text", "output_text", "refusal"))


def routes(state: ServerState) -> list[BaseRoute]:
    """Return this dialect's routes."""
    return [Route("/v1/chat/completions", ChatCompletions(state), methods=["POST"])]


class ChatCompletions:
    """The route, as an ASGI app: a stream's chunks pass through nothing else."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. Raises: what refuses it before its answer begins."""
        state = self._state
        decoded = await body.read(scope, receive, state, ChatBody)
        asked = decoded.value
        ignored = options.check_fields(decoded, state.settings.strict)
        request, left_out = request_of(asked, sender_of(scope, state.settings))
        worker = await state.supervisor.worker(asked.model, state.settings.limits.load_wait_s)
        identity = Identity.of(f"chatcmpl-{request.request_id}", worker)
        streams = asked.stream_options or {}
        chunks = ChatChunks(
            identity,
            request.options.n,
            has_usage=bool(streams.get("include_usage")),
            is_counting=bool(streams.get("continuous_usage_stats")),
        )
        job = generation.Job(
            requests=[request],
            chunks=chunks if asked.stream else None,
            whole=lambda answer, costs: _whole(identity, answer, costs, request.options.logprobs is not None),
            headers=ignored | left_out | _told_of_tools(request, worker.model),
            asked_tokens=request.options.max_tokens,
            is_detailed=bool(asked.timings),
            has_progress=bool(asked.return_progress),
        )
        await generation.respond(scope, receive, send, state, worker, job)


def request_of(asked: ChatBody, sender: Sender) -> tuple[ChatRequest, dict[str, str]]:
    """Return what a body asks for, and the header that tells what of it was left out.

    Raises: UsageError naming the field that cannot be honoured.
    """
    options.check_format(asked)
    request, left_out = conversation_of(asked, sender)
    _check_tool_choice(asked.tool_choice)
    chosen = options.generation_options(asked, request.options, max_tokens=_limit(asked), logprobs=_n_logprobs(asked))
    return replace(request, options=chosen), left_out


def conversation_of(asked: ChatBody | TemplateBody, sender: Sender) -> tuple[ChatRequest, dict[str, str]]:
    """Return a body's conversation as the model is to see it, and the header that tells what of it was left out.

    Raises: UsageError for what is no conversation of texts.
    """
    check_messages(asked.messages)
    messages, left_out = agent_headers.leave_out(asked.messages, is_kept=sender.keeps_agent_headers)
    request = ChatRequest(
        tuple(messages),
        sender.options,
        tools=tuple(asked.tools or ()),
        template_kwargs=asked.chat_template_kwargs or {},
        request_id=sender.request_id,
    )
    return request, left_out


def _limit(asked: ChatBody) -> int | None:
    """Return the most tokens that are wanted, by either name; a wrong one is refused by the name it came under."""
    limits = {limit for limit in (asked.max_tokens, asked.max_completion_tokens) if limit is not None}
    if len(limits) > 1:
        raise UsageError("max_tokens and max_completion_tokens disagree.", "send one of them", field="max_tokens")
    limit = next(iter(limits), None)
    if limit is not None and limit != options.ANY:
        name = "max_completion_tokens" if asked.max_tokens is None else "max_tokens"
        options.check_whole(name, limit, 1)
    return limit


def _n_logprobs(asked: ChatBody) -> int | None:
    if asked.logprobs:
        n_best = asked.top_logprobs or 0
        options.check_whole("top_logprobs", n_best, 0, MAX_TOP_LOGPROBS)
        return n_best
    if asked.top_logprobs:
        raise UsageError("top_logprobs needs logprobs.", 'send "logprobs": true', field="top_logprobs")
    return None


def check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    """Refuse what is no conversation of texts, by the place in it."""
    if not messages:
        raise UsageError("The conversation has no messages.", "send at least one", field="messages")
    for i, message in enumerate(messages):
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or not role:
            raise UsageError(f"Message {i} has no role.", "send system, user or assistant", field=f"messages[{i}].role")
        if isinstance(content, list):
            for j, part in enumerate(content):
                _check_part(part, f"messages[{i}].content[{j}]")
        elif content is not None and not isinstance(content, str):
            raise UsageError(
                f"The content of message {i} is neither text nor a list of parts.",
                "send a text",
                field=f"messages[{i}].content",
            )
        _check_calls(message.get("tool_calls"), f"messages[{i}].tool_calls")
        for name in ("name", "tool_call_id"):
            if not isinstance(message.get(name), str | None):
                raise UsageError(f"The {name} of message {i} is no text.", "send a text", field=f"messages[{i}].{name}")


def _check_calls(calls: Any, where: str) -> None:
    """Refuse what is no list of calls, whatever the template would make of it."""
    if calls is None:
        return
    if not isinstance(calls, list):
        raise UsageError("tool_calls of a message is no list.", "send the calls as a list", field=where)
    for i, call in enumerate(calls):
        if not isinstance(call, dict) or not isinstance(call.get("function", call), dict):
            raise UsageError("A tool call of a message is no object.", "send what was answered", field=f"{where}[{i}]")


def _check_part(part: Any, where: str) -> None:
    kind = part.get("type") if isinstance(part, dict) else "text" if isinstance(part, str) else None
    if not isinstance(kind, str) or kind not in _TEXT_PARTS:
        raise UsageError("This model reads text only, and a part of a message is none.", "send text parts", field=where)


def _check_tool_choice(choice: Any) -> None:
    if choice not in (None, "auto", "none"):
        raise UsageError(
            "tool_choice can only be auto or none: calls cannot be forced yet.", "leave it out", field="tool_choice"
        )


def _told_of_tools(request: ChatRequest, model: Mapping[str, Any]) -> dict[str, str]:
    """Return the header that says what became of tools: shown to the model (a call comes back as text), or not."""
    if not request.tools:
        return {}
    return {"x-localllm-tools": "rendered" if model.get("takes_tools") else "ignored-by-template"}


def _whole(identity: Identity, answer: Answer, costs: Costs, has_logprobs: bool) -> dict[str, Any]:
    choices = [_choice(i, choice, has_logprobs) for i, choice in enumerate(answer.choices)]
    return whole_body("chat.completion", identity, choices, costs)


def _choice(index: int, choice: Choice, has_logprobs: bool) -> dict[str, Any]:
    return {
        "index": index,
        "message": {"role": "assistant", "content": choice.text, "refusal": None},
        "logprobs": logprobs.of_chat(choice.logprobs) if has_logprobs else None,
        "finish_reason": choice.finish_reason,
    }
