"""The bare loop that our decode is measured against: llama_decode, argmax, and nothing else.

It has no guard, no slots and no events: what a loop over the C API costs, on the same settings.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from localllm.backends.llamacpp.batch import BatchPacker
from localllm.backends.llamacpp.context import NativeContext
from localllm.backends.llamacpp.model import LlamaModel
from localllm.backends.llamacpp.settings import ContextSettings
from localllm.errors import EngineError
from localllm.runtime.engine import BatchItem


@dataclass(frozen=True, slots=True)
class BareTimes:
    """Seconds that the prompts took, up to the first token of each, and that the steps after took."""

    prefill_s: float
    decode_s: float


class BareLoop:
    """A context of its own over loaded weights. `close` frees it."""

    def __init__(self, model: LlamaModel, settings: ContextSettings) -> None:
        self._context = NativeContext(model, settings)
        self._packer = BatchPacker(model.native, self._context.n_batch)
        self._n_slots = self._context.n_slots

    def decode(self, prompts: Sequence[Sequence[int]], n_steps: int) -> float:
        """Prefill the prompts on an empty cache, then return the seconds that `n_steps` steps took. Raises as `run`."""
        return self.run(prompts, n_steps).decode_s

    def run(self, prompts: Sequence[Sequence[int]], n_steps: int) -> BareTimes:
        """Prefill the prompts on an empty cache, in full batches, then decode `n_steps` steps.

        Each step runs one row a prompt and takes the best logit of each.
        Raises: EngineError where the prompts do not fit, or native code fails.
        """
        if not 0 < len(prompts) <= self._n_slots or min(map(len, prompts)) == 0:
            raise EngineError(f"The bare loop takes 1 to {self._n_slots} prompts that are not empty.")
        for slot in range(self._n_slots):
            self._context.remove(slot)
        started = time.perf_counter()
        best = self._prefill(prompts)
        prefill_s = time.perf_counter() - started
        items = tuple(BatchItem(slot, len(prompt), (best[slot],), 1) for slot, prompt in enumerate(prompts))
        batch, n_rows = self._packer.pack(items)
        return BareTimes(prefill_s, self._steps(batch, n_rows, n_steps))

    def close(self) -> None:
        """Free the context; idempotent."""
        self._context.close()

    def _prefill(self, prompts: Sequence[Sequence[int]]) -> list[int]:
        """Return the best first token of each prompt."""
        best = [0] * len(prompts)
        for items in _batches(prompts, self._context.n_batch):
            batch, n_rows = self._packer.pack(items)
            if self._context.decode(batch):
                raise EngineError("The bare loop's prefill failed.")
            ended = [item.slot for item in items if item.n_logits]
            for slot, row in zip(ended, self._context.logits(n_rows), strict=True):
                best[slot] = int(row.argmax())
        return best

    def _steps(self, batch: object, n_rows: int, n_steps: int) -> float:
        """Time the steps; tokens and positions are written where the packed batch points."""
        tokens, positions = self._packer.token_rows(n_rows)
        decode, logits = self._context.decode, self._context.logits
        started = time.perf_counter()
        for _ in range(n_steps):
            if decode(batch):
                raise EngineError("The bare loop's forward failed.")
            tokens[:] = logits(n_rows).argmax(axis=1)
            positions += 1
        return time.perf_counter() - started


def _batches(prompts: Sequence[Sequence[int]], n_batch: int) -> Iterator[tuple[BatchItem, ...]]:
    """Yield the prompts one after another in batches of `n_batch` rows; the last row of each wants logits."""
    items: list[BatchItem] = []
    n_free = n_batch
    for slot, prompt in enumerate(prompts):
        start = 0
        while start < len(prompt):
            part = prompt[start : start + n_free]
            items.append(BatchItem(slot, start, part, int(start + len(part) == len(prompt))))
            start, n_free = start + len(part), n_free - len(part)
            if n_free == 0:
                yield tuple(items)
                items, n_free = [], n_batch
    if items:
        yield tuple(items)
