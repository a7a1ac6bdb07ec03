"""Tells what an endpoint's answer was: tokens and when they came, usage, an error; and whether it kept the rules.

For OpenAI's chat and text completions, streamed or whole, as any server sends them: unknown
fields are passed over, missing ones are noted as a fault of the answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from localllm.bench.client.http1 import data_of


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[Any] | None = None


class _Choice(msgspec.Struct):
    index: int = 0
    delta: _Delta | None = None
    message: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None


class _CachedTokens(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _CachedTokens | None = None


class _Body(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    timings: dict[str, Any] | None = None
    error: Any = None
    data: list[msgspec.Raw] | None = None


_decoder = msgspec.json.Decoder(_Body)


@dataclass(slots=True)
class Answer:
    """What an answer amounted to. Mutated by `fold` alone.

    `token_s`: when each piece of text came (streams only), `answer_s`: the first that is not
    reasoning. `faults`: rules that it broke, in words. `terminals`: "done", "error", in order.
    """

    token_s: list[float] = field(default_factory=list)
    answer_s: float | None = None
    texts: list[str] = field(default_factory=list)
    finish_reasons: dict[int, str] = field(default_factory=dict)
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    timings: dict[str, Any] | None = None
    error_code: str | None = None
    error_message: str = ""
    terminals: list[str] = field(default_factory=list)
    n_comments: int = 0
    faults: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The text of all choices, in order of arrival."""
        return "".join(self.texts)


def fold_stream(events: Sequence[tuple[float, bytes]]) -> Answer:
    """Return what a stream amounted to. `events`: when each came, and its bytes."""
    answer = Answer()
    for arrived_s, event in events:
        data = data_of(event)
        if data is None:
            answer.n_comments += 1
        elif data == b"[DONE]":
            _terminal(answer, "done")
        else:
            _fold_chunk(answer, arrived_s, data)
    if not answer.terminals:
        answer.faults.append("the stream ended without [DONE] or an error event")
    elif answer.terminals == ["done"] and not answer.finish_reasons:
        answer.faults.append("no choice has a finish_reason")
    return answer


def _terminal(answer: Answer, kind: str) -> None:
    # Some servers close an error with [DONE] too: one end, told twice.
    if answer.terminals and answer.terminals != ["error"]:
        answer.faults.append(f"{kind} after {answer.terminals[-1]}")
    elif answer.terminals == ["error"] and kind == "error":
        answer.faults.append("two error events")
    answer.terminals.append(kind)


def _fold_chunk(answer: Answer, arrived_s: float, data: bytes) -> None:
    try:
        chunk = _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        answer.faults.append(f"a chunk is not what it should be: {_kind(error)}")
        return
    if chunk.error:
        _terminal(answer, "error")
        _note_error(answer, chunk.error)
        return
    if answer.terminals:
        answer.faults.append(f"a chunk after {answer.terminals[-1]}")
    for choice in chunk.choices:
        _fold_choice(answer, arrived_s, choice)
    _note_usage(answer, chunk)


def _fold_choice(answer: Answer, arrived_s: float, choice: _Choice) -> None:
    delta = choice.delta
    text = choice.text if delta is None else delta.content
    thought = delta and (delta.reasoning or delta.reasoning_content)
    if text or thought or (delta and delta.tool_calls):
        if choice.index in answer.finish_reasons:
            answer.faults.append(f"text of choice {choice.index} after its finish_reason")
        answer.token_s.append(arrived_s)
        if answer.answer_s is None and not thought:
            answer.answer_s = arrived_s
    if text:
        answer.texts.append(text)
    if choice.finish_reason is not None:
        if choice.index in answer.finish_reasons:
            answer.faults.append(f"two finish_reasons of choice {choice.index}")
        answer.finish_reasons[choice.index] = choice.finish_reason


def fold_body(status: int, body: bytes) -> Answer:
    """Return what an answer that was no stream amounted to."""
    answer = Answer()
    try:
        whole = _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        answer.faults.append(f"the body is not what it should be: {_kind(error)}")
        return answer
    if whole.error:
        answer.terminals.append("error")
        _note_error(answer, whole.error)
        if status < 400:
            answer.faults.append(f"an error with status {status}")
        return answer
    answer.terminals.append("done")
    if status >= 400:
        answer.faults.append(f"status {status} without an error")
    for choice in whole.choices:
        content = choice.text if choice.message is None else choice.message.content
        answer.texts.append(content or "")
        if choice.finish_reason is None:
            answer.faults.append(f"choice {choice.index} has no finish_reason")
        else:
            answer.finish_reasons[choice.index] = choice.finish_reason
    _note_usage(answer, whole)
    return answer


def _note_usage(answer: Answer, body: _Body) -> None:
    if body.timings is not None:
        answer.timings = body.timings
    if body.usage is None:
        return
    answer.prompt_tokens = body.usage.prompt_tokens
    answer.completion_tokens = body.usage.completion_tokens
    details = body.usage.prompt_tokens_details
    answer.cached_tokens = details.cached_tokens if details else None


def _note_error(answer: Answer, error: Any) -> None:
    if isinstance(error, dict):
        answer.error_code = str(error.get("code") or error.get("type") or "")
        answer.error_message = str(error.get("message", ""))
    else:
        answer.error_message = str(error)


def _kind(error: Exception) -> str:
    return "not UTF-8" if isinstance(error, UnicodeDecodeError) else str(error)
