"""Asks the kernels of this machine, on the loaded model, whether a row's result depends on the rows beside it.

Which kernel takes how many rows is a matter of the CPU, of the weights' types and of the build, so it is
not looked up but tried: a dozen small forwards.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from localllm.backends.llamacpp.batch import BatchPacker
from localllm.backends.llamacpp.context import NativeContext
from localllm.errors import EngineError
from localllm.runtime.engine import BatchItem

_STRIDE = 7919  # tokens all over the vocabulary


def rows_agree(context: NativeContext, packer: BatchPacker, n_vocab: int, n_rows: int) -> bool:
    """Say whether rows give the same bits alone as up to `n_rows` together, of one sequence and of several.

    The slots, all but the last, must be empty, and are again. Raises: EngineError where a forward fails.
    """
    trial = _Trial(context, packer)
    tokens = [1 + _STRIDE * i % (n_vocab - 1) for i in range(n_rows)]
    alone = trial.run([[(0, i, tokens[i : i + 1])] for i in range(n_rows)])
    parts = [(0, 2), (2, min(6, n_rows)), (6, n_rows)]  # even numbers too: some kernels take rows by two
    in_parts = trial.run([[(0, start, tokens[start:end])] for start, end in parts if start < end])
    at_once = trial.run([[(0, 0, tokens)]])
    slots = range(min(n_rows, context.n_slots - 1))
    side_by_side = trial.run([[(slot, i, tokens[i : i + 1]) for slot in slots] for i in range(2)])
    beside = np.repeat(alone[:2], len(slots), axis=0)
    return _are_equal(alone, in_parts) and _are_equal(alone, at_once) and _are_equal(beside, side_by_side)


class _Trial:
    """Runs forwards on empty slots."""

    def __init__(self, context: NativeContext, packer: BatchPacker) -> None:
        self._context = context
        self._packer = packer

    def run(self, forwards: Sequence[Sequence[tuple[int, int, list[int]]]]) -> NDArray[np.float32]:
        """Run forwards of (slot, start, tokens); return the logits of all rows, [n_rows, n_vocab]."""
        logits = []
        for rows in forwards:
            items = tuple(BatchItem(slot, start, tokens, len(tokens)) for slot, start, tokens in rows)
            batch, n_logits = self._packer.pack(items)
            code = self._context.decode(batch)
            if code:
                raise EngineError(f"llama.cpp failed in a trial of its kernels (code {code}).")
            logits.append(self._context.logits(n_logits).copy())
        for slot in {slot for rows in forwards for slot, _, _ in rows}:
            self._context.remove(slot)
        return np.concatenate(logits)


def _are_equal(one: NDArray[np.float32], other: NDArray[np.float32]) -> bool:
    return np.array_equal(one.view(np.uint32), other.view(np.uint32))
