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


def pool_rows(rows: NDArray[np.float32], pooling: Pooling) -> NDArray[np.float32]:
    """Return one row [n_embd] of hidden rows [n_tokens, n_embd]."""
    if pooling is Pooling.MEAN:
        mean: NDArray[np.float32] = np.mean(rows, axis=0, dtype=np.float32)
        return mean
    return np.array(rows[0 if pooling is Pooling.CLS else -1], np.float32)
