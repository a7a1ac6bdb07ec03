"""Server-sent events of the OpenAI dialects, encoded from events: one prebuilt frame round each text."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from localllm.runtime.events import Finished, Progress, Token, TokenLogprob
from localllm.server import logprobs
from localllm.server.answers import Costs, Identity

DONE: Final = b"data: [DONE]\n\n"
HEADERS: Final = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
_json: Final = msgspec.json.Encoder().encode
_BREAKS: Final = tuple((char.encode(), rb"\u%04x" % ord(char)) for char in "\x85\u2028\u2029")
"""No ends of lines by the standard, but to clients that cut a stream with Unicode's rules."""


def encode(value: object) -> bytes:
    """Return JSON that is one line to every reader."""
    data = _json(value)
    if not data.isascii():
        for char, escape in _BREAKS:
            data = data.replace(char, escape)
    return data


def comment(text: str) -> bytes:
    """Return a line that clients ignore, and that keeps the connection alive."""
    return b": " + text.encode() + b"\n\n"


class Chunks(ABC):
    """The chunks of one answer, as bytes. `object`, `before` and `after` make the dialect.

    A choice reads `{"index": i, <before> text <after>, "logprobs": ..., "finish_reason": ...}`.
    """

    object: str
    before: bytes
    after: bytes

    def __init__(self, identity: Identity, n_choices: int, *, has_usage: bool, is_counting: bool) -> None:
        """`has_usage`: usage was asked for, so that it is null until the end; `is_counting`: told all along."""
        self._n_choices = n_choices
        self._is_counting = is_counting and has_usage
        self._has_usage = has_usage
        self._n_prompt = self._n_completion = 0
        self._head = b'data: {"id":%b,"object":%b,"created":%d,"model":%b,"system_fingerprint":%b,%b"choices":[' % (
            encode(identity.id),
            encode(self.object),
            identity.created_s,
            encode(identity.model),
            encode(identity.fingerprint),
            b"".join(encode(name) + b":" + encode(value) + b"," for name, value in identity.own_fields.items()),
        )
        self._tail = b'],"usage":null}\n\n' if has_usage else b"]}\n\n"
        self._starts = [b'%b{"index":%d,%b' % (self._head, i, self.before) for i in range(n_choices)]
        self._end = self.after + b',"logprobs":null,"finish_reason":null}'
        self._whole_end = self._end + self._tail

    def admitted(self, n_prompt_tokens: int) -> None:
        """Take note of the prompt's length, for usage that is told all along."""
        self._n_prompt = n_prompt_tokens

    def first(self) -> bytes:
        """Return what stands before the first text of each choice."""
        return b""

    def token(self, event: Token) -> bytes:
        """Return the chunk of a token; nothing while its text is held back and no more is to be told of it."""
        if not event.logprobs and not self._is_counting:
            return self._starts[event.choice] + encode(event.text) + self._whole_end if event.text else b""
        self._n_completion += len(event.ids)
        told = encode(self.logprobs(event.choice, event.logprobs)) if event.logprobs else b"null"
        if not event.text and not event.logprobs:
            return b""
        middle = self.after + b',"logprobs":' + told + b',"finish_reason":null}'
        return self._starts[event.choice] + encode(event.text) + middle + self._counted()

    def finished(self, event: Finished) -> bytes:
        """Return the chunk that tells why a choice ended."""
        return b"%b%b%b" % (self._head, self.last_choice(event), self._counted())

    @abstractmethod
    def last_choice(self, event: Finished) -> bytes:
        """Return the choice of a finish chunk."""

    @abstractmethod
    def logprobs(self, choice: int, entries: Sequence[TokenLogprob]) -> Mapping[str, Any]:
        """Return the dialect's form of the log-probabilities of a choice's next tokens."""

    def progress(self, event: Progress, n_cached: int, elapsed_ms: float) -> bytes:
        """Return the chunk that tells how much of the prompt was computed."""
        told = {
            "total": event.total_tokens,
            "cache": n_cached,
            "processed": event.done_tokens,
            "time_ms": round(elapsed_ms, 3),
        }
        return self._head + b'],"prompt_progress":' + encode(told) + b"}\n\n"

    def costs(self, costs: Costs) -> bytes:
        """Return the last chunk: no choice, but what was asked for of usage and times."""
        parts = b""
        if self._has_usage:
            parts += b',"usage":' + encode(costs.usage_body())
        if self._has_usage or costs.is_detailed:
            return self._head + b"]" + parts + b',"timings":' + encode(costs.timings_body()) + b"}\n\n"
        return b""

    def _counted(self) -> bytes:
        if not self._is_counting:
            return self._tail
        n_prompt, n_completion = self._n_prompt, self._n_completion
        usage = {
            "prompt_tokens": n_prompt,
            "completion_tokens": n_completion,
            "total_tokens": n_prompt + n_completion,
        }
        return b'],"usage":' + encode(usage) + b"}\n\n"


class ChatChunks(Chunks):
    """`chat.completion.chunk`: the role first, then content, then the reason."""

    object = "chat.completion.chunk"
    before = b'"delta":{"content":'
    after = b"}"

    def first(self) -> bytes:
        choice = b'{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'
        return b"".join(self._head + choice % i + self._tail for i in range(self._n_choices))

    def last_choice(self, event: Finished) -> bytes:
        reason = encode(event.reason)
        return b'{"index":%d,"delta":{},"logprobs":null,"finish_reason":%b}' % (event.choice, reason)

    def logprobs(self, choice: int, entries: Sequence[TokenLogprob]) -> Mapping[str, Any]:
        return logprobs.of_chat(entries)


class CompletionChunks(Chunks):
    """`text_completion`: texts only. `echo` holds what is told before each choice's first text."""

    object = "text_completion"
    before = b'"text":'
    after = b""

    def __init__(
        self, identity: Identity, n_choices: int, *, has_usage: bool, is_counting: bool, echo: Sequence[str] = ()
    ) -> None:
        super().__init__(identity, n_choices, has_usage=has_usage, is_counting=is_counting)
        self._echo = echo
        self._logprobs = [logprobs.CompletionLogprobs() for _ in range(n_choices)]

    def first(self) -> bytes:
        return b"".join(self._starts[i] + encode(text) + self._whole_end for i, text in enumerate(self._echo))

    def last_choice(self, event: Finished) -> bytes:
        return b'{"index":%d,"text":"","logprobs":null,"finish_reason":%b}' % (event.choice, encode(event.reason))

    def logprobs(self, choice: int, entries: Sequence[TokenLogprob]) -> Mapping[str, Any]:
        return self._logprobs[choice].of(entries)
