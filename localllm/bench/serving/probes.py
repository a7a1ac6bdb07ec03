"""Sends the probe requests to an endpoint: before candidates are compared, it must be known that they do the same."""

from __future__ import annotations

import asyncio
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any, Final

from localllm.bench.client.calls import Call, End, Outcome
from localllm.bench.client.client import Client
from localllm.bench.serving import probe_asks as asks
from localllm.bench.serving.asking import ask as ask_for_facts
from localllm.bench.serving.endpoint import Endpoint
from localllm.bench.serving.probed import Difference, Greedy, Honour, Probes, differences
from localllm.bench.serving.wire import CHAT, COMPLETIONS, SEED, call_of, cannot_send, is_valid
from localllm.bench.workloads.ask import Ask, Message
from localllm.errors import LocalLLMError

__all__ = ["Difference", "Probes", "differences", "probe"]

_REFUSALS: Final = (400, 404, 405, 415, 422, 501)
_SAMPLING: Final = (
    *("temperature", "top_k", "top_p", "min_p", "typical_p", "seed", "repeat_penalty", "repeat_last_n"),
    *("presence_penalty", "frequency_penalty", "dry_multiplier", "xtc_probability", "mirostat", "samplers"),
)


def probe(endpoint: Endpoint) -> Probes:
    """Send every probe request, one after another; about forty short answers. Never raises for what comes back."""
    return asyncio.run(_probed(endpoint))


async def _probed(endpoint: Endpoint) -> Probes:
    client = Client(endpoint.target)
    try:
        return await _Prober(endpoint, client).all()
    finally:
        client.close()


class _Prober:
    """One endpoint being probed."""

    def __init__(self, endpoint: Endpoint, client: Client) -> None:
        self._endpoint = endpoint
        self._client = client
        self._failures: list[str] = []
        self._has_usage = False
        self._has_cached_tokens = False

    async def all(self) -> Probes:
        counts = [await self._count(number, chat) for number, chat in enumerate(asks.CHATS, 1)]
        greedy = [await self._greedy(number, text) for number, text in enumerate(asks.GREEDY, 1)]
        exact = [await self._exact(question) for question, _ in asks.EXACT]
        is_same, has_stream_usage = await self._streamed(greedy)
        return Probes(
            prompt_tokens=tuple(counts),
            greedy=tuple(greedy),
            exact=tuple(exact),
            n_right=sum(given == right for given, (_, right) in zip(exact, asks.EXACT, strict=True)),
            sampling=await self._sampling(),
            stated_sampling=await asyncio.to_thread(_stated, self._endpoint),
            max_tokens=await self._limit(),
            stop=await self._stop(greedy),
            ignore_eos=await self._ignore_eos(),
            json_schema=await self._json(),
            offered_tools=await self._tools("auto"),
            forced_tools=await self._tools("required"),
            stream_equals_whole=is_same,
            has_usage=self._has_usage,
            has_stream_usage=has_stream_usage,
            has_cached_tokens=self._has_cached_tokens,
            failures=tuple(self._failures),
        )

    async def _count(self, number: int, chat: Sequence[Message]) -> int | None:
        outcome = await self._send(f"chat {number}", chat, 1)
        return outcome.prompt_tokens if outcome.end is End.ANSWER else None

    async def _greedy(self, number: int, text: str) -> Greedy | None:
        first = await self._send(f"greedy {number}", _user(text), asks.GREEDY_TOKENS)
        again = await self._send(f"greedy {number}, again", _user(text), asks.GREEDY_TOKENS)
        if first.end is not End.ANSWER or again.end is not End.ANSWER:
            return None
        self._has_cached_tokens = self._has_cached_tokens or again.cached_tokens is not None
        return Greedy(first.text, _reason(first), first.text == again.text)

    async def _exact(self, question: str) -> str:
        outcome = await self._send("a short question", _user(question), asks.EXACT_TOKENS)
        return normalised(outcome.text)

    async def _sampling(self) -> Any:
        """Say what happens without sampling fields: the greedy answer each time, or not."""
        chat = _user(asks.SAMPLED)
        greedy = await self._send("greedy", chat, asks.SAMPLED_TOKENS)
        free = [
            await self._send("without sampling fields", chat, asks.SAMPLED_TOKENS, is_greedy=False)
            for _ in range(asks.N_SAMPLED)
        ]
        if any(outcome.end is not End.ANSWER for outcome in (greedy, *free)):
            return ""
        return "greedy" if all(outcome.text == greedy.text for outcome in free) else "sampled"

    async def _limit(self) -> Honour:
        outcome = await self._send("max_tokens", _user(asks.LONG), asks.LIMIT_TOKENS)
        if outcome.end is not End.ANSWER:
            return _refusal(outcome)
        n_tokens = outcome.completion_tokens
        if n_tokens is None:  # a token is at least a letter, and seldom more than a long word
            n_tokens = 0 if len(outcome.text.split()) <= asks.LIMIT_TOKENS else len(outcome.text.split())
        if n_tokens > asks.LIMIT_TOKENS:
            return "ignored"
        return "honoured" if n_tokens == asks.LIMIT_TOKENS else "unclear"

    async def _stop(self, greedy: Sequence[Greedy | None]) -> Honour:
        """Ask a greedy probe again with a word of its own answer as the end."""
        for text, known in zip(asks.GREEDY, greedy, strict=True):
            words = known.text.split() if known is not None and known.repeats else []
            word = next((word for word in words[2:] if known is not None and known.text.find(word) > 0), None)
            if known is None or word is None:
                continue
            outcome = await self._send("stop", _user(text), asks.GREEDY_TOKENS, stop=[word])
            if outcome.end is not End.ANSWER:
                return _refusal(outcome)
            if word in outcome.text:
                return "ignored"
            before = known.text[: known.text.index(word)]
            return "honoured" if outcome.text.strip() == before.strip() else "unclear"
        return "unclear"

    async def _ignore_eos(self) -> Honour:
        for text in asks.SHORT:
            natural = await self._send("an answer that ends early", _user(text), asks.FILLED_TOKENS)
            if natural.end is not End.ANSWER or natural.completion_tokens is None:
                return "unclear"
            if natural.completion_tokens < asks.FILLED_TOKENS:
                filled = await self._send("ignore_eos", _user(text), asks.FILLED_TOKENS, ignore_eos=True)
                if filled.end is not End.ANSWER:
                    return _refusal(filled)
                is_filled = (filled.completion_tokens or 0) >= asks.FILLED_TOKENS
                return "honoured" if is_filled else "ignored"
        return "unclear"

    async def _json(self) -> Honour:
        ask = asks.json_ask()
        if cannot_send(ask, self._endpoint.api):
            return "refused"
        outcome = await self._sent("response_format", self._call_of(ask))
        if outcome.end is not End.ANSWER:
            return _refusal(outcome)
        if is_valid(ask, outcome.text):
            return "honoured"
        return "unclear" if "length" in outcome.finish_reasons and outcome.text.lstrip()[:1] == "{" else "ignored"

    async def _tools(self, choice: str) -> Honour:
        ask = asks.tool_ask(choice)
        if cannot_send(ask, self._endpoint.api):
            return "refused"
        outcome = await self._sent(f"tool_choice {choice}", self._call_of(ask))
        if outcome.end is not End.ANSWER:
            return _refusal(outcome)
        if choice == "auto":
            return "honoured"
        if outcome.tool_calls:
            return "honoured"
        return "unclear" if "length" in outcome.finish_reasons else "ignored"

    async def _streamed(self, greedy: Sequence[Greedy | None]) -> tuple[bool | None, bool]:
        """Say whether a stream has the text of the whole answer, and whether it tells its usage."""
        known = greedy[0]
        streamed = await self._send(
            "a stream", _user(asks.GREEDY[0]), asks.GREEDY_TOKENS, stream=True, stream_options={"include_usage": True}
        )
        if streamed.end is not End.ANSWER:
            return None, False
        has_usage = streamed.prompt_tokens is not None and streamed.completion_tokens is not None
        if known is None or not known.repeats:
            return None, has_usage
        return streamed.text == known.text and _reason(streamed) == known.finish_reason, has_usage

    def _call_of(self, ask: Ask) -> Call:
        return call_of(ask, self._endpoint, fills_length=False, keep_text=True)

    async def _send(
        self, what: str, chat: Sequence[Message], max_tokens: int, *, is_greedy: bool = True, **more: Any
    ) -> Outcome:
        fields: dict[str, Any] = {"model": self._endpoint.model, "max_tokens": max_tokens, **more}
        if is_greedy:
            fields |= {"temperature": 0, "seed": SEED}
        if self._endpoint.api == "openai-completions":
            path = COMPLETIONS
            fields["prompt"] = "\n\n".join(f"{message['role']}: {message['content']}" for message in chat)
        else:
            path = CHAT
            fields["messages"] = list(chat)
        return await self._sent(what, Call.of(path, fields, keep_text=True))

    async def _sent(self, what: str, call: Call) -> Outcome:
        outcome = await self._client.send(call)
        if outcome.end is not End.ANSWER:
            status = f"HTTP {outcome.status}" if outcome.status else outcome.fault
            self._failures.append(f"{what}: {outcome.end.value} ({status})")
        elif not outcome.is_stream and outcome.prompt_tokens is not None and outcome.completion_tokens is not None:
            self._has_usage = True
        return outcome


def normalised(text: str) -> str:
    """Return an answer's first line in lower case without punctuation and spaces around it."""
    line = next((line for line in text.strip().splitlines() if line.strip()), "")
    words = unicodedata.normalize("NFKC", line).lower().split()
    return " ".join(words).strip(" .,:;!?\"'`*()[]")


def _user(text: str) -> tuple[Message, ...]:
    return ({"role": "user", "content": text},)


def _reason(outcome: Outcome) -> str:
    return outcome.finish_reasons[0] if outcome.finish_reasons else ""


def _refusal(outcome: Outcome) -> Honour:
    return "refused" if outcome.end is End.REFUSED and outcome.status in _REFUSALS else "unclear"


def _stated(endpoint: Endpoint) -> Mapping[str, Any]:
    """Return the sampling defaults that the server states: llama.cpp's /props and ours, Ollama's /api/show."""
    props = endpoint.facts.get("props")
    settings = props.get("default_generation_settings") if isinstance(props, Mapping) else None
    if isinstance(settings, Mapping):
        inner = settings.get("params")
        stated = inner if isinstance(inner, Mapping) else settings
        return {name: stated[name] for name in _SAMPLING if name in stated}
    if "api_version" not in endpoint.facts:
        return {}
    try:
        body = ask_for_facts(endpoint.target, "/api/show", {"model": endpoint.model}).json
    except LocalLLMError:
        return {}
    parameters = body.get("parameters") if isinstance(body, dict) else None
    lines = parameters.splitlines() if isinstance(parameters, str) else []
    pairs = [line.split(maxsplit=1) for line in lines]
    return {pair[0]: pair[1] for pair in pairs if len(pair) == 2 and pair[0] in _SAMPLING}
