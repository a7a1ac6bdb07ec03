"""One answer from a service to stdout: what `run` does once and `chat` does a turn."""

from __future__ import annotations

from typing import TYPE_CHECKING

from localllm.cli.fences import Everything, FenceExtractor, Selection
from localllm.cli.options import OutputFlags
from localllm.cli.output import Answer, Notes
from localllm.cli.render import Encoder, JsonlEncoder, Outcome, SilentEncoder, TextEncoder, show_progress
from localllm.cli.signals import Interrupts
from localllm.runtime import events

if TYPE_CHECKING:
    from localllm.cli.opening import OpenedService
    from localllm.runtime.types import Request


class Answering:
    """Streams answers of one service under one set of output flags."""

    def __init__(
        self, service: OpenedService, flags: OutputFlags, out: Answer, *, notes: Notes, interrupts: Interrupts
    ) -> None:
        self._service = service
        self._flags = flags
        self._notes = notes
        self._interrupts = interrupts
        self._out = out

    def stream(self, request: Request, wanted_tokens: int | None) -> Outcome:
        """Write the answer to `request` as it comes; return what it came to.

        A signal or the time limit cancels it and is kept in `interrupts.stopped`. `wanted_tokens`:
        the length asked for, told on stderr where the context clips it.
        Raises: the error that ended it, after what there was is written; OutputClosed.
        """
        selection: Selection = FenceExtractor() if self._flags.extract else Everything()
        outcome = Outcome(request.request_id)
        readers: tuple[Encoder, ...] = (outcome, self._encoder())
        with self._interrupts.cancelling() as cancel_by:
            stream = self._service.submit(request)
            cancel_by(stream.cancel)
            try:
                for event in stream:
                    show_progress(event, self._notes)
                    shown = selection.push(event.text) if isinstance(event, events.Token) else ""
                    for reader in readers:
                        reader.event(event, shown)
                    self._tell_clipping(event, wanted_tokens)
                    if selection.closed and outcome.usage is None:
                        stream.cancel()
                rest = selection.flush()
                for reader in readers:
                    reader.end(rest)
            except BaseException:
                stream.cancel()
                raise
        outcome.found = selection.found
        if selection.closed and self._interrupts.stopped is None:
            outcome.finish_reason = "stop"
        return outcome

    def _encoder(self) -> Encoder:
        if self._flags.jsonl:
            return JsonlEncoder(self._out)
        return SilentEncoder() if self._flags.json else TextEncoder(self._out, may_be_nothing=self._flags.extract)

    def _tell_clipping(self, event: events.Event, wanted_tokens: int | None) -> None:
        if isinstance(event, events.Admitted) and wanted_tokens is not None and event.max_tokens < wanted_tokens:
            self._notes.say(
                f"note: the answer is limited to {event.max_tokens} tokens, not {wanted_tokens}: "
                f"the context holds {self._service.model.n_ctx} (--ctx)"
            )
