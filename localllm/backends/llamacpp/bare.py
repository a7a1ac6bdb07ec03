"""The bare loop that our decode is measured against: llama_decode, argmax, and nothing else.

It has no guard, no slots and no events: what a loop over the C API costs, on the same settings.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from localllm.backends.llamacpp.batch import BatchPacker
from localllm.backends.llamacpp.context import NativeContext
from localllm.backends.llamacpp.model import LlamaModel
from localllm.backends.llamacpp.settings import ContextSettings
from localllm.errors import EngineError
from localllm.runtime.engine import BatchItem


class BareLoop:
    """A context of its own over loaded weights. `close` frees it."""

    def __init__(self, model: LlamaModel, settings: ContextSettings) -> None:
        self._context = NativeContext(model, settings)
        self._packer = BatchPacker(model.native, self._context.n_batch)
        self._n_slots = self._context.n_slots

    def decode(self, prompts: Sequence[Sequence[int]], n_steps: int) -> float:
        """Prefill the prompts on an empty cache, then return the seconds that `n_steps` steps took.

        Each step runs one row a prompt and takes the best logit of each.
        Raises: EngineError where the prompts do not fit, or native code fails.
        """
        if not 0 < len(prompts) <= self._n_slots or min(map(len, prompts)) == 0:
            raise EngineError(f"The bare loop takes 1 to {self._n_slots} prompts that are not empty.")
        for slot in range(self._n_slots):
            self._context.remove(slot)
        best = [self._prefill(slot, prompt) for slot, prompt in enumerate(prompts)]
        items = tuple(BatchItem(slot, len(prompt), (best[slot],), 1) for slot, prompt in enumerate(prompts))
        batch, n_rows = self._packer.pack(items)
        return self._steps(batch, n_rows, n_steps)

    def close(self) -> None:
        """Free the context; idempotent."""
        self._context.close()

    def _prefill(self, slot: int, prompt: Sequence[int]) -> int:
        best = 0
        for start in range(0, len(prompt), self._context.n_batch):
            part = prompt[start : start + self._context.n_batch]
            batch, n_rows = self._packer.pack((BatchItem(slot, start, part, 1),))
            if self._context.decode(batch):
                raise EngineError("The bare loop's prefill failed.")
            best = int(self._context.logits(n_rows)[0].argmax())
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
