"""How sequences, texts and requests end: off the queue, out of their slots, and told once.

Owns who has ended; `running` is the scheduler's, which they leave here. Mutated by the engine's thread alone.
"""

from __future__ import annotations

from localllm.errors import LocalLLMError
from localllm.runtime.admission import Admission
from localllm.runtime.embedding import EmbedSeat
from localllm.runtime.events import FinishReason
from localllm.runtime.kv.tiers import Tiers
from localllm.runtime.readers import Readers
from localllm.runtime.room import Room
from localllm.runtime.sequence import Embedding, Phase, RequestRun, Sequence


class Ends:
    """Ends what was queued or runs, whatever the reason, and remembers the sequences that ended."""

    def __init__(
        self,
        running: list[Sequence],
        admission: Admission,
        embeds: EmbedSeat,
        room: Room,
        readers: Readers,
        tiers: Tiers,
    ) -> None:
        self._running = running
        self._admission = admission
        self._embeds = embeds
        self._room = room
        self._readers = readers
        self._tiers = tiers
        self._ended: list[Sequence] = []

    def take(self) -> list[Sequence]:
        """Hand over the sequences that ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def end(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a sequence before it has ended by itself. Idempotent."""
        if sequence.phase is not Phase.FINISHED:
            self._admission.waiting.remove(sequence)
            sequence.finish(reason)
            self.leave(sequence)

    def leave(self, sequence: Sequence) -> None:
        """Give a finished sequence's slot to the prefix cache; end its request with its last choice."""
        self._stop_running(sequence)
        self._ended.append(sequence)
        self._room.retire(sequence)
        if sequence.run.is_finished:
            sequence.run.close()

    def cancel(self, run: RequestRun) -> None:
        """End what is left of a request."""
        for sequence in run.sequences:
            self.end(sequence, "cancelled")
        if run.embedding is not None:
            self._end_texts(run.embedding)
            run.close()

    def fail(self, run: RequestRun, error: LocalLLMError) -> None:
        """End a request with an error, told with the readers' next `send`; its slots are cleared. Idempotent."""
        if self._readers.fail(run, error):
            self._release(run)

    def fail_all(self, error: LocalLLMError) -> None:
        """End every request with an error; what they computed is kept like that of others that end."""
        for run in self._readers.fail_all(error):
            self._release(run, is_kept=True)

    def _release(self, run: RequestRun, *, is_kept: bool = False) -> None:
        for sequence in run.sequences:
            sequence.phase = Phase.FINISHED
            self._admission.waiting.remove(sequence)
            self._stop_running(sequence)
            if is_kept:
                self._room.retire(sequence)
            else:
                self._room.vacate(sequence)
            self._ended.append(sequence)
        if run.embedding is not None:
            self._end_texts(run.embedding)

    def _end_texts(self, embedding: Embedding) -> None:
        self._admission.waiting.remove(embedding)
        if self._embeds.sitter is embedding:
            self._embeds.leave()
        embedding.finish()

    def _stop_running(self, sequence: Sequence) -> None:
        self._tiers.forget(sequence.lookup)
        if sequence in self._running:
            self._running.remove(sequence)
            self._admission.reopen()
