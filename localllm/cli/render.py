"""From events to what a terminal, a pipe or a program reads: text, one JSON document, or JSONL."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from localllm.cli.output import Answer, Notes
from localllm.runtime import events
from localllm.runtime.events import Event

if TYPE_CHECKING:
    from localllm.cli.opening import OpenedModel

MIN_SHOWN_PROGRESS_TOKENS = 256


class Encoder(Protocol):
    """Writes the events of one answer in one form; `shown` is what is selected of the text so far."""

    def event(self, event: Event, shown: str) -> None:
        """Take the next event."""
        ...

    def end(self, shown: str) -> None:
        """The stream is over, for whatever reason: write what is still held."""
        ...


class TextEncoder:
    """The shown text as it comes, with a newline at its end.

    `may_be_nothing`: where nothing is selected, not even the newline is written.
    """

    def __init__(self, out: Answer, *, may_be_nothing: bool) -> None:
        self._out = out
        self._may_be_nothing = may_be_nothing
        self._last = ""

    def event(self, event: Event, shown: str) -> None:
        """Write the shown text."""
        self._out.write(shown)
        self._last = shown or self._last

    def end(self, shown: str) -> None:
        """Write the rest, and the newline that the text lacks."""
        last = shown or self._last
        if not last.endswith("\n") and (last or not self._may_be_nothing):
            shown += "\n"
        self._out.write(shown)


class JsonlEncoder:
    """Each event as one JSON object on a line."""

    def __init__(self, out: Answer) -> None:
        self._out = out

    def event(self, event: Event, shown: str) -> None:
        """Write the event."""
        self._out.document(events.encode(event))

    def end(self, shown: str) -> None:
        """Nothing is held."""


class SilentEncoder:
    """Nothing while the answer runs: the document is written when it is whole."""

    def event(self, event: Event, shown: str) -> None:
        """Nothing is written."""

    def end(self, shown: str) -> None:
        """Nothing is held."""


@dataclass(slots=True)
class Outcome:
    """What an answer came to, folded from its events.

    `text` is the whole answer, `shown` what `--extract` leaves of it; `found` is False where it
    met no code block.
    """

    request_id: str
    text: str = ""
    shown: str = ""
    found: bool = True
    finish_reason: events.FinishReason = "cancelled"
    stop: str | None = None
    seed: int | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    max_tokens: int = 0
    usage: events.Usage | None = None
    error: events.Error | None = None

    def event(self, event: Event, shown: str) -> None:
        """Take the next event."""
        self.shown += shown
        match event:
            case events.Admitted():
                self.seed, self.max_tokens, self.prompt_tokens = event.seed, event.max_tokens, event.prompt_tokens
            case events.Token():
                self.text += event.text
                self.completion_tokens += len(event.ids)
            case events.Finished():
                self.finish_reason, self.stop = event.reason, event.stop
            case events.Usage():
                self.usage = event
            case events.Error():
                self.error = event
            case _:
                pass

    def end(self, shown: str) -> None:
        """Take the rest of what is shown."""
        self.shown += shown


def document(outcome: Outcome, model: OpenedModel) -> dict[str, Any]:
    """Return the answer as the one document of `--json`."""
    usage = outcome.usage or events.Usage(outcome.prompt_tokens, outcome.completion_tokens, {})
    return {
        "v": events.VERSION,
        "request_id": outcome.request_id,
        "text": outcome.shown,
        "finish_reason": outcome.finish_reason,
        "stop": outcome.stop,
        "seed": outcome.seed,
        "max_tokens": outcome.max_tokens,
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            "cached_tokens": dict(usage.cached_tokens),
            "accepted_draft_tokens": usage.accepted_draft_tokens,
            "rejected_draft_tokens": usage.rejected_draft_tokens,
        },
        "timings_ms": dict(usage.timings_ms),
        "model": {
            "name": model.name,
            "path": str(model.path),
            "sha256": model.sha256,
            "architecture": model.info.architecture,
            "quant": model.info.quant,
            "n_ctx": model.n_ctx,
        },
        **({"localllm": {"deterministic": True}} if model.is_deterministic else {}),
    }


def stats_line(outcome: Outcome) -> str:
    """Return counts and speeds of an answer as one line."""
    usage = outcome.usage
    if usage is None:
        return "no statistics: the answer ended before its usage was known"
    cached = sum(usage.cached_tokens.values())
    prefill_s, decode_s = (usage.timings_ms.get(name, 0.0) / 1000 for name in ("prefill", "decode"))
    parts = [
        f"prompt {usage.prompt_tokens} tokens ({cached} cached){_speed(usage.prompt_tokens - cached, prefill_s)}",
        # The first token comes out of the prefill: decoding paid for the others.
        f"answer {usage.completion_tokens} tokens{_speed(usage.completion_tokens - 1, decode_s)}",
        f"ended by {outcome.finish_reason}",
        f"seed {outcome.seed}",
    ]
    return " · ".join(parts)


def show_progress(event: Event, notes: Notes) -> None:
    """Show how far a long prompt is read, and take the line away when text begins."""
    if isinstance(event, events.Progress) and event.total_tokens >= MIN_SHOWN_PROGRESS_TOKENS:
        notes.progress(f"reading the prompt: {event.done_tokens} of {event.total_tokens} tokens")
    elif isinstance(event, (events.Token, events.Finished, events.Error)):
        notes.clear()


def _speed(n_tokens: int, elapsed_s: float) -> str:
    if n_tokens <= 0 or elapsed_s <= 0:
        return ""
    return f" in {elapsed_s:.2f} s, {n_tokens / elapsed_s:.1f} tok/s"
