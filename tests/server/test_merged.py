"""Several streams read as one."""

from __future__ import annotations

import asyncio
import random

from localllm.runtime import events
from localllm.runtime.events import Event
from localllm.runtime.stream import collect
from localllm.server.merged import MergedStream
from tests.server.fakes import FakeStream


def answer(text: str, n_prompt: int) -> list[Event]:
    return [
        events.Queued("r", 0),
        events.Admitted(n_prompt, {"device": 1, "ram": 1}, 7, 50 + n_prompt),
        events.Progress(1, n_prompt),
        *(events.Token(choice, f"{character}{choice}", (65,)) for character in text for choice in (0, 1)),
        events.Finished(0, "stop"),
        events.Finished(1, "length"),
        events.Usage(n_prompt, len(text), {"device": 1, "ram": 1}, 2, 3, {"queue": float(n_prompt)}),
        events.Done(),
    ]


async def read(merged: MergedStream) -> list[Event]:
    seen: list[Event] = []
    while batch := await merged.next_events():
        seen += batch
    return seen


async def merge(parts: list[list[Event]], seed: int) -> list[Event]:
    """Put the events of each part in pieces, in a random order, and read the whole."""
    streams = [FakeStream(str(i)) for i in range(len(parts))]
    merged = MergedStream(streams, [2] * len(parts))
    reading = asyncio.ensure_future(read(merged))
    rng = random.Random(seed)
    left = [list(part) for part in parts]
    while any(left):
        at = rng.choice([i for i, part in enumerate(left) if part])
        n = rng.randint(1, 4)
        streams[at].put(left[at][:n])
        del left[at][:n]
        for _ in range(rng.randint(0, 3)):
            await asyncio.sleep(0)
    return await asyncio.wait_for(reading, 5)


def test_choices_are_counted_through_and_costs_added_up_in_any_order() -> None:
    for seed in range(30):
        seen = asyncio.run(merge([answer("ab", 5), answer("xyz", 3), answer("", 2)], seed))
        assert [type(event) for event in seen].count(events.Done) == 1
        assert seen[-1] == events.Done()
        whole = collect(seen)
        assert [choice.text for choice in whole.choices] == ["a0b0", "a1b1", "x0y0z0", "x1y1z1", "", ""]
        assert [choice.finish_reason for choice in whole.choices] == ["stop", "length"] * 3
        assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (10, 5)
        assert whole.usage.cached_tokens == {"device": 3, "ram": 3}
        assert whole.usage.timings_ms == {"queue": 5.0}
        assert (whole.usage.accepted_draft_tokens, whole.max_tokens) == (6, 52)


def test_the_first_error_ends_all() -> None:
    async def work() -> None:
        streams = [FakeStream(str(i)) for i in range(3)]
        merged = MergedStream(streams, [1, 1, 1])
        reading = asyncio.ensure_future(read(merged))
        streams[0].put(answer("ab", 5)[:3])
        await asyncio.sleep(0)
        streams[1].put([events.Error("worker_died", "died")])
        streams[2].put([events.Error("worker_died", "died")])
        seen = await asyncio.wait_for(reading, 5)
        assert seen[-1] == events.Error("worker_died", "died")
        assert sum(isinstance(event, events.Error) for event in seen) == 1
        assert all(stream.n_cancels for stream in streams)
        assert await merged.next_events() == []
        left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        await asyncio.gather(*left, return_exceptions=True)

    asyncio.run(work())


def test_one_stream_stays_as_it_is() -> None:
    async def work() -> None:
        stream = FakeStream("a")
        assert MergedStream.of([stream], []) is stream

    asyncio.run(work())
