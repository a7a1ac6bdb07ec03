"""One chat at work: its conversation, its settings, and a turn of it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from localllm.cli.answering import Answering
from localllm.cli.conversation import Conversation
from localllm.cli.options import OutputFlags, SamplingFlags
from localllm.cli.output import Answer, Notes
from localllm.cli.render import Outcome, stats_line
from localllm.cli.run import finish
from localllm.cli.signals import Interrupts
from localllm.cli.wishes import generation_options
from localllm.errors import UsageError
from localllm.runtime.types import ChatRequest

if TYPE_CHECKING:
    from localllm.cli.opening import OpenedService
    from localllm.runtime.types import GenerationOptions


class Session:
    """What the commands of a chat act on. A turn that fails leaves the conversation as it was.

    `own`: the options of every request, of the flags that are not about sampling.
    """

    def __init__(
        self,
        service: OpenedService,
        output: OutputFlags,
        sampling: SamplingFlags,
        conversation: Conversation,
        *,
        out: Answer,
        notes: Notes,
        interrupts: Interrupts,
        own: GenerationOptions,
    ) -> None:
        self.service = service
        self.sampling = sampling
        self.conversation = conversation
        self.notes = notes
        self.last: Outcome | None = None
        self._output = output
        self._own = own
        self._interrupts = interrupts
        self._answering = Answering(service, output, out, notes=notes, interrupts=interrupts)
        self._n_repeats = 0

    def ask(self, question: str) -> None:
        """Answer a new question on stdout and keep both.

        Raises: what refused or ended the answer; AfterOutput for a signal, the time limit, a
        missing code block or --strict-length, after what there is was kept.
        """
        self._n_repeats = 0
        self._turn(question, self.conversation)

    def regenerate(self) -> None:
        """Answer the last question again, with another seed where one is set; then the old answer goes."""
        shorter = Conversation(self.conversation.system, list(self.conversation.turns))
        question, _ = shorter.undo()
        self._n_repeats += 1
        self._turn(question, shorter)

    def rearm(self) -> None:
        """Let the next signal be a first one again."""
        self._interrupts.rearm(None)

    def n_tokens(self) -> int:
        """Return how many tokens the conversation so far takes; 0 before the first turn."""
        messages = self.conversation.messages()
        return len(self.service.prompt_tokens(ChatRequest(messages, self._own))) if self.conversation.turns else 0

    def set(self, flags: SamplingFlags) -> None:
        """Use other sampling settings from the next turn on. Raises UsageError for a bad one."""
        generation_options(flags, self._own)
        self.sampling = flags

    def statistics(self) -> str:
        """Return the last answer's counts and speeds. Raises UsageError before the first one."""
        if self.last is None:
            raise UsageError("There is no answer yet.", "ask something first")
        return stats_line(self.last)

    def _turn(self, question: str, before: Conversation) -> None:
        options = generation_options(self.sampling, self._own)
        if options.seed is not None:
            options = replace(options, seed=options.seed + self._n_repeats)
        self._interrupts.rearm(self._output.timeout)
        try:
            outcome = self._answering.stream(ChatRequest(before.messages(question), options), self.sampling.max_tokens)
            if outcome.error is None and (outcome.text or outcome.finish_reason != "cancelled"):
                before.turns.append((question, outcome.text))
                self.conversation, self.last = before, outcome
            finish(outcome, self._output, self.notes, self._interrupts)
        finally:
            self._interrupts.rearm(None)
