"""Events reach one reader, by thread or by event loop, and `collect` makes the answer of them."""

from __future__ import annotations

import asyncio
import threading

import pytest

from localllm.errors import ContextOverflow, LocalLLMError
from localllm.runtime import events
from localllm.runtime.stream import TokenStream, collect, rebuild, told
from localllm.runtime.types import CompletionRequest, GenerationOptions
from tests.fake_engine import fake_service

SCRIPT: list[events.Event] = [
    events.Queued("r", 0),
    events.Admitted(3, {"device": 1}, seed=7, max_tokens=9),
    events.Token(1, "x", (1,)),
    events.Token(0, "he", (2,)),
    events.Token(0, "y", (3, 4)),
    events.Finished(1, "length"),
    events.Finished(0, "stop", "!"),
    events.Usage(3, 4, {"device": 1}),
    events.Done(),
]


def test_collect_joins_each_choice() -> None:
    answer = collect(SCRIPT)
    assert [(c.text, c.ids, c.finish_reason, c.stop) for c in answer.choices] == [
        ("hey", (2, 3, 4), "stop", "!"),
        ("x", (1,), "length", None),
    ]
    assert (answer.seed, answer.max_tokens, answer.usage.completion_tokens) == (7, 9, 4)


@pytest.mark.parametrize(("code", "kind"), [("context_length_exceeded", ContextOverflow), ("no_such", LocalLLMError)])
def test_an_error_event_is_raised_as_what_it_was(code: str, kind: type[Exception]) -> None:
    with pytest.raises(kind, match="too long"):
        collect([events.Error(code, "too long", "shorten it")])


def test_nothing_follows_the_terminal_event() -> None:
    stream = TokenStream("r", lambda stream: None)
    stream.put(SCRIPT)
    stream.put([events.Error("late", "late")])
    assert list(stream) == SCRIPT


def test_cancel_after_the_end_is_not_sent_by_a_complete_iteration() -> None:
    cancels: list[int] = []
    stream = TokenStream("r", lambda stream: cancels.append(1))
    stream.put(SCRIPT)
    list(stream)
    assert cancels == []


def test_async_iteration_gives_the_same_events() -> None:
    stream = TokenStream("r", lambda stream: None)

    def feed() -> None:
        for event in SCRIPT:
            stream.put([event])

    async def read() -> list[events.Event]:
        threading.Thread(target=feed).start()
        return [event async for event in stream]

    assert asyncio.run(read()) == SCRIPT


def test_many_async_streams_at_once() -> None:
    async def answer(service: object, letter: int) -> str:
        stream = service.submit(  # type: ignore[attr-defined]
            CompletionRequest((letter,) * 9, GenerationOptions(max_tokens=15, ignore_eos=True))
        )
        return "".join([e.text async for e in stream if isinstance(e, events.Token)])

    async def all_of_them() -> list[str]:
        with fake_service() as service:
            return await asyncio.gather(*[answer(service, 65 + i) for i in range(10)])

    texts = asyncio.run(all_of_them())
    assert len(set(texts)) == 10
    assert all(len(t) == 15 for t in texts)


def test_encoded_events_are_versioned_and_plain() -> None:
    import json

    token = events.Token(0, "é", (5,), (events.TokenLogprob(5, b"\xc3", -0.5, (events.TokenLogprob(6, b"a", -1.0),)),))
    body = json.loads(json.dumps(events.encode(token)))
    assert body["v"] == 1
    assert body["event"] == "token"
    assert body["logprobs"][0]["raw"] == [195]
    assert "logprobs" not in events.encode(events.Token(0, "a", (1,)))
    assert events.encode(events.Finished(0, "stop")) == {"v": 1, "event": "finished", "choice": 0, "reason": "stop"}


def test_an_error_keeps_its_numbers_through_its_event() -> None:
    error = ContextOverflow("too long", "shorten it", n_ctx=5, field="input", index=2, path=object())
    event = told(error)
    assert (event.index, event.details) == (2, {"n_ctx": 5, "field": "input", "index": 2})
    again = rebuild(event)
    assert type(again) is ContextOverflow
    assert (again.message, again.hint, again.details) == ("too long", "shorten it", event.details)
