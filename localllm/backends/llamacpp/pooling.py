"""How the hidden rows of a text become its one embedding."""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from localllm.backends.llamacpp.model import LlamaModel
from localllm.errors import ModelRefused


class Pooling(IntEnum):
    """`<architecture>.pooling_type` in a GGUF header."""

    NONE = 0
    MEAN = 1
    CLS = 2
    LAST = 3
    RANK = 4


def pooling_of(model: LlamaModel) -> Pooling:
    """Return the pooling that the file asks for, else the mean. Raises ModelRefused for a reranker."""
    text = model.metadata(f"{model.info.architecture}.pooling_type") or ""
    pooling = next((one for one in Pooling if str(one.value) == text), Pooling.MEAN)
    if pooling is Pooling.RANK:
        raise ModelRefused("This model ranks pairs of texts; it gives no embeddings.")
    return Pooling.MEAN if pooling is Pooling.NONE else pooling


class RunningPool:
    """Pools the hidden rows of one text as they come."""

    def __init__(self, pooling: Pooling) -> None:
        self._pooling = pooling
        self._n_rows = 0
        self._kept: NDArray[np.float64] | None = None  # the sum, the first or the last row

    def add(self, rows: NDArray[np.float32]) -> None:
        """Take the next rows [n_rows, n_embd]; nothing of them is kept by reference."""
        if self._pooling is Pooling.MEAN:
            total: NDArray[np.float64] = rows.sum(axis=0, dtype=np.float64)
            self._kept = total if self._kept is None else self._kept + total
        elif self._kept is None or self._pooling is Pooling.LAST:
            self._kept = rows[0 if self._pooling is Pooling.CLS else -1].astype(np.float64)
        self._n_rows += len(rows)

    def result(self) -> NDArray[np.float32]:
        """Return the embedding [n_embd] of the rows so far, of which there is at least one."""
        assert self._kept is not None
        n_summed = self._n_rows if self._pooling is Pooling.MEAN else 1
        return (self._kept / n_summed).astype(np.float32)
