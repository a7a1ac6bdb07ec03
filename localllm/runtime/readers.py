"""Open requests and those who read their events: who is told what, and when whoever sends it on hears of it."""

from __future__ import annotations

from collections.abc import Callable

from localllm.errors import LocalLLMError
from localllm.runtime.sequence import RequestRun
from localllm.runtime.stream import EventSink, told


class Readers:
    """The requests that have not ended, by their sinks. Mutated by the engine's thread alone.

    `published`: called after events were handed over, once for all that came together.
    """

    def __init__(self, published: Callable[[], None]) -> None:
        self._published = published
        self._has_news = False
        self._runs: dict[EventSink, RequestRun] = {}  # by identity: a request may be submitted twice

    def add(self, run: RequestRun) -> None:
        """Take in a request that begins."""
        self._runs[run.stream] = run

    def run_of(self, sink: EventSink) -> RequestRun | None:
        """Return a sink's request; None where it has ended."""
        return self._runs.get(sink)

    def publish(self) -> None:
        """Flush events to the readers, and forget requests that ended."""
        for run in [run for run in self._runs.values() if run.outbox]:
            self._has_news |= run.flush()
            if run.is_finished:
                del self._runs[run.stream]
        self.send()

    def fail(self, run: RequestRun, error: LocalLLMError) -> bool:
        """Tell a request that it failed, with the next `send`; False = it had ended already."""
        if self._runs.pop(run.stream, None) is None:
            return False
        run.outbox = [told(error)]
        self._has_news |= run.flush()
        return True

    def fail_all(self, error: LocalLLMError) -> list[RequestRun]:
        """Tell every request that it failed, and return them."""
        runs = [run for run in list(self._runs.values()) if self.fail(run, error)]
        self.send()
        return runs

    def send(self) -> None:
        """Let whoever collects the events know that they are complete."""
        if self._has_news:
            self._has_news = False
            self._published()
