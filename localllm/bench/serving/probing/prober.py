"""Sends the probe requests to an endpoint: before candidates are compared, it must be known that they do the same."""

from __future__ import annotations

import asyncio
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from localllm.bench.client.calls import Call, End, Outcome
from localllm.bench.client.client import Client
from localllm.bench.client.loose import as_count, as_dict
from localllm.bench.serving.asking import Reply
from localllm.bench.serving.asking import ask as ask_whole
from localllm.bench.serving.endpoint import Endpoint
from localllm.bench.serving.failures import UNSUPPORTED
from localllm.bench.serving.probing import asks
from localllm.bench.serving.probing.greedy import Greedy, greedy_of, is_nearly, parting
from localllm.bench.serving.probing.probes import Honour, Probes
from localllm.bench.serving.wire import CHAT, COMPLETIONS, SEED, call_of, cannot_send, is_valid
from localllm.bench.workloads.ask import Ask, Message
from localllm.errors import LocalLLMError

_USAGE: Final = {"include_usage": True}
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
        self._has_logprobs = True
        self._has_usage = False
        self._has_cached_tokens = False

    async def all(self) -> Probes:
        counts = [await self._count(number, chat) for number, chat in enumerate(asks.CHATS, 1)]
        greedy = [await self._greedy(number, text) for number, text in enumerate(asks.GREEDY, 1)]
        short = [await self._answer("a short question", question, asks.EXACT_TOKENS) for question, _, _ in asks.EXACT]
        exact = [read(one.text, form) if one else "" for one, (_, form, _) in zip(short, asks.EXACT, strict=True)]
        is_same, has_stream_usage = await self._streamed()
        return Probes(
            prompt_tokens=tuple(counts),
            greedy=tuple(greedy),
            short=tuple(short),
            exact=tuple(exact),
            n_right=sum(given == right for given, (_, _, right) in zip(exact, asks.EXACT, strict=True)),
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
        first = await self._answer(f"greedy {number}", text, asks.GREEDY_TOKENS)
        again = await self._answer(f"greedy {number}, again", text, asks.GREEDY_TOKENS)
        if first is None or again is None:
            return None
        apart = parting(first, again)
        return replace(first, repeats=apart is None or apart.is_near_tie)

    async def _answer(self, what: str, text: str, max_tokens: int) -> Greedy | None:
        """Return a greedy answer with its logprobs, without them where the server has none; None for no answer."""
        path, fields = self._request(_user(text), max_tokens)
        logprobs: Mapping[str, Any] = {"logprobs": True, "top_logprobs": asks.N_ALTERNATIVES}
        if path == COMPLETIONS:
            logprobs = {"logprobs": asks.N_ALTERNATIVES}
        if self._has_logprobs:
            reply = await self._asked(path, {**fields, **logprobs})
            self._has_logprobs = reply is None or reply.status not in UNSUPPORTED
        if not self._has_logprobs:
            reply = await self._asked(path, fields)
        answer = greedy_of(reply.json) if reply is not None and reply.status == 200 else None
        if reply is None or answer is None:
            self._failures.append(f"{what}: " + ("no answer" if reply is None else f"HTTP {reply.status}, no answer"))
            return None
        self._note_usage(as_dict(as_dict(reply.json).get("usage")))
        return answer

    async def _asked(self, path: str, fields: Mapping[str, Any]) -> Reply | None:
        try:
            return await asyncio.to_thread(ask_whole, self._endpoint.target, path, fields)
        except LocalLLMError:
            return None

    def _note_usage(self, usage: Mapping[str, Any]) -> None:
        counts = [as_count(usage.get(name)) for name in ("prompt_tokens", "completion_tokens")]
        self._has_usage = self._has_usage or None not in counts
        details = as_dict(usage.get("prompt_tokens_details"))
        self._has_cached_tokens = self._has_cached_tokens or as_count(details.get("cached_tokens")) is not None

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

    async def _streamed(self) -> tuple[bool | None, bool]:
        """Say whether a stream has the text of the whole answer, and whether it tells its usage.

        The whole answer is asked for after it, and both once more where they differ: the first of them may find
        less in a cache, which is reason enough to part at a near tie.
        """
        is_same, has_usage = None, False
        for _ in range(2):
            streamed = await self._send(
                "a stream", _user(asks.GREEDY[0]), asks.GREEDY_TOKENS, stream=True, stream_options=_USAGE
            )
            whole = await self._answer("a whole answer", asks.GREEDY[0], asks.GREEDY_TOKENS)
            if streamed.end is not End.ANSWER or whole is None:
                return None, has_usage
            has_usage = streamed.prompt_tokens is not None and streamed.completion_tokens is not None
            if streamed.text == whole.text:
                is_same = _reason(streamed) == whole.finish_reason
            else:
                is_same = is_nearly(whole, streamed.text)
            if is_same:
                break
        return is_same, has_usage

    def _call_of(self, ask: Ask) -> Call:
        return call_of(ask, self._endpoint, fills_length=False, keep_text=True)

    def _request(self, chat: Sequence[Message], max_tokens: int) -> tuple[str, dict[str, Any]]:
        """Return a greedy request: its path and its fields."""
        fields = {"model": self._endpoint.model, "max_tokens": max_tokens, "temperature": 0, "seed": SEED}
        if self._endpoint.api == "openai-completions":
            prompt = "\n\n".join(f"{message['role']}: {message['content']}" for message in chat)
            return COMPLETIONS, {**fields, "prompt": prompt}
        return CHAT, {**fields, "messages": list(chat)}

    async def _send(
        self, what: str, chat: Sequence[Message], max_tokens: int, *, is_greedy: bool = True, **more: Any
    ) -> Outcome:
        path, fields = self._request(chat, max_tokens)
        if not is_greedy:
            del fields["temperature"], fields["seed"]
        return await self._sent(what, Call.of(path, {**fields, **more}, keep_text=True))

    async def _sent(self, what: str, call: Call) -> Outcome:
        outcome = await self._client.send(call)
        if outcome.end is not End.ANSWER:
            status = f"HTTP {outcome.status}" if outcome.status else outcome.fault
            self._failures.append(f"{what}: {outcome.end.value} ({status})")
        return outcome


def read(text: str, form: str) -> str:
    """Return what a short answer says: the first thing of that form in its first line, of numbers the last."""
    line = next((line for line in text.splitlines() if line.strip()), "")
    found: list[str] = re.findall(rf"\b(?:{form})\b", unicodedata.normalize("NFKC", line).lower())
    if not found:
        return ""
    return found[-1] if form == asks.NUMBER else found[0]


def _user(text: str) -> tuple[Message, ...]:
    return ({"role": "user", "content": text},)


def _reason(outcome: Outcome) -> str:
    return outcome.finish_reasons[0] if outcome.finish_reasons else ""


def _refusal(outcome: Outcome) -> Honour:
    return "refused" if outcome.end is End.REFUSED and outcome.status in UNSUPPORTED else "unclear"


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
        body = ask_whole(endpoint.target, "/api/show", {"model": endpoint.model}).json
    except LocalLLMError:
        return {}
    parameters = body.get("parameters") if isinstance(body, dict) else None
    lines = parameters.splitlines() if isinstance(parameters, str) else []
    pairs = [line.split(maxsplit=1) for line in lines]
    return {pair[0]: pair[1] for pair in pairs if len(pair) == 2 and pair[0] in _SAMPLING}
