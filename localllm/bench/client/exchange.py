"""One request on the wire: what came of its answer and when, and how it ended in the end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from localllm.bench.client.answers import CUT, Answer, StreamFold, fold_body
from localllm.bench.client.calls import Call, End, Outcome
from localllm.bench.client.http1 import AnswerReader, EventSplitter, Malformed, is_done

MAX_BODY_BYTES = 64 << 20
MAX_EVENTS = 1 << 18
"""Of one answer, comments included: what goes on beyond is no answer, and would fill the memory."""
AFTER_DONE_S = 1.0
"""So long is waited after [DONE] for the end of the answer, or for what should not follow."""
EVENTS_AT_ONCE = 64
"""So many events of an ended answer are decoded (0.3 ms) before other connections are looked at again."""


class Exchange:
    """Takes what arrives. `end` is set where the exchange did not end by its answer; `done` when it ended."""

    def __init__(self, call: Call, on_event: Callable[[float], None] | None) -> None:
        self.call = call
        self.reader = AnswerReader()
        self.end: End | None = None
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._on_event = on_event
        self._fault = ""
        self._has_head = False
        self._ended_s = 0.0
        self._is_stream = False
        self._events: list[tuple[float, bytes]] = []
        self._body: list[bytes] = []
        self._n_bytes = 0
        self._splitter = EventSplitter()

    @property
    def is_stale(self) -> bool:
        """Whether the connection ended without a byte of an answer."""
        return self.end is End.LOST and not self.reader.has_begun

    def take(self, now_s: float, data: bytes) -> None:
        """Take what arrived at `now_s`."""
        try:
            pieces = self.reader.feed(data)
            if not self._has_head and self.reader.status is not None:
                self._has_head = True
                self._is_stream = self._header("content-type").lower().startswith("text/event-stream")
                if self._header("content-encoding").lower() not in ("", "identity"):
                    raise Malformed("the answer is compressed, which was not asked for")
            for piece in pieces:
                self._take_body(now_s, piece)
        except Malformed as error:
            self.finish(now_s, End.MALFORMED, str(error))
            return
        if self.reader.is_complete:
            self.finish(now_s)
        elif self._is_stream and self._events and is_done(self._events[-1][1]):
            # Some servers neither close a stream nor end it: the API's own end is enough.
            asyncio.get_running_loop().call_later(AFTER_DONE_S, self.finish, now_s)
        elif self.call.cancel_after_events is not None and len(self._events) >= self.call.cancel_after_events:
            self.finish(now_s, End.CANCELLED)

    def _take_body(self, now_s: float, piece: bytes) -> None:
        self._n_bytes += len(piece)
        if self._n_bytes > MAX_BODY_BYTES:
            raise Malformed(f"the answer does not end: it is longer than {MAX_BODY_BYTES >> 20} MiB")
        if not self._is_stream:
            self._body.append(piece)
            return
        for event in self._splitter.feed(piece):
            self._events.append((now_s, event))
            if self._on_event is not None:
                self._on_event(now_s)
        if len(self._events) > MAX_EVENTS:
            raise Malformed(f"the answer does not end: it has more than {MAX_EVENTS} events")

    def lose(self) -> None:
        """Note that the connection ended."""
        now_s = time.perf_counter()
        if self.reader.end():
            self.finish(now_s)
        else:
            fault = "the connection ended in the answer" if self.reader.has_begun else "no answer"
            self.finish(now_s, End.LOST, fault)

    def finish(self, now_s: float, end: End | None = None, fault: str = "") -> None:
        """Note how it ended. The first end counts."""
        if not self.done.done():
            self._ended_s, self.end, self._fault = now_s, end, fault
            self.done.set_result(None)

    async def outcome(self, client: int, due_s: float, started_s: float, n_sends: int) -> Outcome:
        """Decode what came, giving way to other connections, and return what became of the call."""
        answer = await self._answer()
        end, fault = self._judged(answer)
        return Outcome(
            label=self.call.label,
            client=client,
            end=end,
            is_stream=self._is_stream,
            status=self.reader.status,
            due_s=due_s,
            started_s=started_s,
            ended_s=self._ended_s,
            token_s=tuple(answer.token_s),
            answer_s=answer.answer_s,
            prompt_tokens=answer.prompt_tokens,
            completion_tokens=answer.completion_tokens,
            cached_tokens=answer.cached_tokens,
            accepted_draft_tokens=answer.accepted_draft_tokens,
            rejected_draft_tokens=answer.rejected_draft_tokens,
            tool_calls=answer.tool_calls,
            finish_reasons=tuple(answer.finish_reasons.values()),
            error_code=answer.error_code,
            error_message=answer.error_message,
            retry_after_s=_seconds(self._header("retry-after")),
            request_id=self._header("x-request-id") or None,
            timings=answer.timings,
            n_comments=answer.n_comments,
            fault=fault,
            text=answer.text if self.call.keep_text else "",
            n_sends=n_sends,
        )

    async def _answer(self) -> Answer:
        status = self.reader.status
        if status is None:
            return Answer()
        if not self._is_stream:
            return fold_body(status, b"".join(self._body)) if self.end is None else Answer()
        fold = StreamFold()
        for n, (arrived_s, event) in enumerate(self._events, 1):
            fold.take(arrived_s, event)
            if n % EVENTS_AT_ONCE == 0:
                await asyncio.sleep(0)
        return fold.finished(self._splitter.rest if self.end is None else b"")

    def _judged(self, answer: Answer) -> tuple[End, str]:
        """Return how it ended, and why that is wrong where it is."""
        status = self.reader.status
        if self.end is End.CANCELLED:  # what came before must be right all the same
            wrong = self._is_stream and not answer.is_cut and answer.faults
            return (End.MALFORMED, answer.faults[0]) if wrong else (End.CANCELLED, "")
        if self.end is not None:
            return self.end, self._fault
        if self._is_stream and not answer.terminals:
            return End.LOST, CUT if self._splitter.rest else answer.faults[-1]
        if answer.faults:
            return End.MALFORMED, answer.faults[0]
        if status is not None and status >= 400:
            return End.REFUSED, ""
        return (End.ERROR_EVENT, "") if "error" in answer.terminals else (End.ANSWER, "")

    def _header(self, name: str) -> str:
        return self.reader.headers.get(name, "")


def _seconds(text: str) -> float | None:
    """Return a header's seconds; None for a date, and for what is no time to wait."""
    return float(text) if text.strip().isdecimal() and text.isascii() else None
