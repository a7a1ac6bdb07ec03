"""What one HTTP request turned out to be, in numbers and names of ours; never text of the request.

Owned by the task that answers the request; folded from its events, then told once to metrics and log.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from localllm.runtime import events
from localllm.runtime.events import Event
from localllm.server.histograms import TOKEN_BOUNDS_S, Histogram

CLIENT_GONE = 499
"""The code that log and metrics give to a request whose client closed the connection before an answer."""


@dataclass(slots=True)
class RequestRecord:
    """The facts of one request. Times are `time.monotonic()` seconds.

    `route`: the path as registered ("/v1/models/{model}"), never as sent. `model`: the registered name
    that the request was resolved to, "" before. `client`: opaque (a short hash or a port). `code`:
    the HTTP status that was sent; `error`: our code where one was told, also inside a stream.
    `ipc_ms`: spent between the processes, as the event stream counts it.
    """

    request_id: str
    route: str
    method: str = "POST"
    client: str = ""
    model: str = ""
    code: int = 0
    error: str = ""
    is_stream: bool = False
    is_cancelled: bool = False
    started_s: float = field(default_factory=time.monotonic)
    ended_s: float | None = None
    admitted_s: float | None = None
    first_token_s: float | None = None
    finish_reason: str = ""
    n_prompt_tokens: int = 0
    n_completion_tokens: int = 0
    cached_tokens: Mapping[str, int] = field(default_factory=dict)
    n_inputs: int = 0
    itl: Histogram = field(default_factory=lambda: Histogram(TOKEN_BOUNDS_S))
    itl_max_s: float = 0.0
    timings_ms: Mapping[str, float] = field(default_factory=dict)
    ipc_ms: float | None = None
    _last_token_s: dict[int, float] = field(default_factory=dict)

    def see(self, batch: Iterable[Event], now_s: float) -> None:
        """Fold events that arrived together at `now_s`."""
        n_tokens, n_completion = Counter[int](), None
        for event in batch:
            match event:
                case events.Token():
                    n_tokens[event.choice] += len(event.ids)
                case events.Admitted():
                    self.admitted_s = now_s
                    self.n_prompt_tokens, self.cached_tokens = event.prompt_tokens, event.cached_tokens
                case events.Embedded():
                    self.n_inputs += 1
                case events.Finished():
                    self._finished(event)
                case events.Usage():
                    self.n_prompt_tokens, self.cached_tokens = event.prompt_tokens, event.cached_tokens
                    n_completion, self.timings_ms = event.completion_tokens, event.timings_ms
                case events.Error():
                    self.error, self.finish_reason = event.code, "error"
                case _:
                    pass
        for choice, n in n_tokens.items():
            self._tokens_came(choice, n, now_s)
        if n_completion is not None:  # end tokens count too, and the last tokens came with it
            self.n_completion_tokens = n_completion

    def end(self, now_s: float | None = None) -> None:
        """Fix the end; a second call changes nothing."""
        if self.ended_s is None:
            self.ended_s = time.monotonic() if now_s is None else now_s

    @property
    def total_s(self) -> float:
        """From the request's arrival to its end, or to now."""
        return (time.monotonic() if self.ended_s is None else self.ended_s) - self.started_s

    @property
    def ttft_s(self) -> float | None:
        """From the request's arrival to its first token, None before."""
        return None if self.first_token_s is None else self.first_token_s - self.started_s

    @property
    def queue_s(self) -> float | None:
        """Time spent waiting for admission, None where it is not known."""
        return self.timings_ms["queue"] / 1000 if "queue" in self.timings_ms else None

    @property
    def phases_s(self) -> dict[str, float]:
        """Seconds by phase, as far as they are known; "ipc" among them."""
        phases = {name: ms / 1000 for name, ms in self.timings_ms.items()}
        return phases if self.ipc_ms is None else {**phases, "ipc": self.ipc_ms / 1000}

    def _tokens_came(self, choice: int, n: int, now_s: float) -> None:
        """Count `n` tokens of a choice that came together: they share the time since the last one."""
        if n == 0:
            return
        self.n_completion_tokens += n
        last_s = self._last_token_s.get(choice)
        self._last_token_s[choice] = now_s
        if self.first_token_s is None:
            self.first_token_s = now_s
        if last_s is None:
            self.itl.observe(0.0, n - 1)
            return
        self.itl.observe((now_s - last_s) / n, n)
        self.itl_max_s = max(self.itl_max_s, now_s - last_s)

    def _finished(self, event: events.Finished) -> None:
        """Take the reason of a choice; of several, the one that tells most."""
        if event.reason == "cancelled":
            self.is_cancelled = True
        order = ("", "stop", "length", "cancelled", "error")
        if order.index(event.reason) > order.index(self.finish_reason):
            self.finish_reason = event.reason
