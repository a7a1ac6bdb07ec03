"""The events of several requests of one body as those of one: choices counted through, costs added up."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from localllm.runtime import events
from localllm.runtime.events import Event
from localllm.runtime.types import Request


class Stream(Protocol):
    """What is read of a worker's stream (`worker.supervisor.EventStream`)."""

    @property
    def ipc_ms(self) -> float:
        """Time that its events spent between the processes."""
        ...

    @property
    def held_bytes(self) -> int:
        """About what is held of events that nobody took."""
        ...

    async def next_events(self) -> list[Event]:
        """Return all events there are, at least one; [] after the end."""
        ...

    def cancel(self) -> None:
        """Ask for the end."""
        ...


class MergedStream:
    """Several streams read as one. The first error ends all; one `Done` follows the last of them."""

    def __init__(self, streams: Sequence[Stream], n_choices: Sequence[int]) -> None:
        self._streams = streams
        self._first_choice = [sum(n_choices[:i]) for i in range(len(streams))]
        self._usages: list[events.Usage] = []
        self._admitted: list[events.Admitted] = []
        self._reads: dict[asyncio.Future[list[Event]], int] = {}
        self._is_ended = False

    @staticmethod
    def of(streams: Sequence[Stream], requests: Sequence[Request]) -> Stream:
        """Return one stream of all: the only one as it is."""
        if len(streams) == 1:
            return streams[0]
        return MergedStream(streams, [request.options.n for request in requests])

    @property
    def ipc_ms(self) -> float:
        return sum(stream.ipc_ms for stream in self._streams)

    @property
    def held_bytes(self) -> int:
        return sum(stream.held_bytes for stream in self._streams)

    def cancel(self) -> None:
        for stream in self._streams:
            stream.cancel()

    async def next_events(self) -> list[Event]:
        if self._is_ended:
            return []
        if not self._reads and not self._usages:
            for at in range(len(self._streams)):
                self._read(at)
        told: list[Event] = []
        while not told:
            done, _ = await asyncio.wait(self._reads, return_when=asyncio.FIRST_COMPLETED)
            for read in done:
                self._take(self._reads.pop(read), read.result(), told)
        return told

    def _read(self, at: int) -> None:
        self._reads[asyncio.ensure_future(self._streams[at].next_events())] = at

    def _take(self, at: int, batch: Sequence[Event], told: list[Event]) -> None:
        """Append what a stream's events are in the whole; nothing after its end."""
        for event in batch if not self._is_ended else ():
            match event:
                case events.Token() | events.Finished():
                    told.append(replace(event, choice=event.choice + self._first_choice[at]))
                case events.Admitted():
                    self._admitted.append(event)
                    if len(self._admitted) == len(self._streams):
                        told.append(_all_admitted(self._admitted))
                case events.Usage():
                    self._usages.append(event)
                case events.Error():
                    self._fail(event, told)
                    return
                case events.Done():
                    self._finish(told)
                    return
                case _:  # progress and places in the queue are of one prompt only
                    pass
        if not self._is_ended:
            self._read(at)

    def _fail(self, error: events.Error, told: list[Event]) -> None:
        self._is_ended = True
        self.cancel()
        for read in self._reads:
            read.cancel()
        told.append(error)

    def _finish(self, told: list[Event]) -> None:
        if len(self._usages) == len(self._streams) and not self._reads:
            self._is_ended = True
            told += [_added_up(self._usages), events.Done()]


def _all_admitted(admitted: Sequence[events.Admitted]) -> events.Admitted:
    return events.Admitted(
        prompt_tokens=sum(one.prompt_tokens for one in admitted),
        cached_tokens=_sums(one.cached_tokens for one in admitted),
        seed=admitted[0].seed,
        max_tokens=min(one.max_tokens for one in admitted),
    )


def _added_up(usages: Sequence[events.Usage]) -> events.Usage:
    """Return the usage of all: tokens add up, times are those of the slowest."""
    names = {name for usage in usages for name in usage.timings_ms}
    return events.Usage(
        prompt_tokens=sum(usage.prompt_tokens for usage in usages),
        completion_tokens=sum(usage.completion_tokens for usage in usages),
        cached_tokens=_sums(usage.cached_tokens for usage in usages),
        accepted_draft_tokens=sum(usage.accepted_draft_tokens for usage in usages),
        rejected_draft_tokens=sum(usage.rejected_draft_tokens for usage in usages),
        timings_ms={name: max(usage.timings_ms.get(name, 0.0) for usage in usages) for name in sorted(names)},
    )


def _sums(counts: Iterable[Mapping[str, int]]) -> Mapping[str, int]:
    total: Counter[str] = Counter()
    for count in counts:
        total.update(count)
    return dict(total)
