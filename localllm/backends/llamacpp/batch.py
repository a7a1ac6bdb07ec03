"""Packs a `Batch` into the arrays of one `llama_batch`, allocated once."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localllm.backends.llamacpp import bindings
from localllm.runtime.engine import BatchItem


class BatchPacker:
    """Owns the arrays that a forward reads; each `pack` overwrites the one before."""

    def __init__(self, native: bindings.Native, n_rows: int) -> None:
        self._tokens = (ctypes.c_int32 * n_rows)()
        self._positions = (ctypes.c_int32 * n_rows)()
        self._slots = (ctypes.c_int32 * n_rows)()
        self._wanted = (ctypes.c_int8 * n_rows)()
        self._n_slots = (ctypes.c_int32 * n_rows)(*([1] * n_rows))
        first = ctypes.addressof(self._slots)
        self._slot_addresses = (ctypes.c_void_p * n_rows)(*range(first, first + 4 * n_rows, 4))
        self._token_view = np.frombuffer(memoryview(self._tokens), np.int32)
        self._position_view = np.frombuffer(memoryview(self._positions), np.int32)
        self._slot_view = np.frombuffer(memoryview(self._slots), np.int32)
        self._wanted_view = np.frombuffer(memoryview(self._wanted), np.int8)
        pointers = ctypes.cast(self._slot_addresses, ctypes.POINTER(ctypes.POINTER(ctypes.c_int32)))
        self._batch = native.api.llama_batch(
            0, self._tokens, None, self._positions, self._n_slots, pointers, self._wanted
        )

    def token_rows(self, n_rows: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Return views [n_rows] of the tokens and positions that the packed batch reads."""
        return self._token_view[:n_rows], self._position_view[:n_rows]

    def pack(self, items: tuple[BatchItem, ...]) -> tuple[Any, int]:
        """Return the native batch of `items` (already checked) and its number of logit rows."""
        row = n_logits = 0
        for item in items:
            n_rows = len(item.tokens)
            if n_rows == 1:  # a decode row: plain stores cost a tenth of numpy's
                self._tokens[row] = item.tokens[0]
                self._positions[row] = item.start
                self._slots[row] = item.slot
                self._wanted[row] = item.n_logits
            else:
                end = row + n_rows
                self._token_view[row:end] = item.tokens
                self._position_view[row:end] = np.arange(item.start, item.start + n_rows)
                self._slot_view[row:end] = item.slot
                self._wanted_view[row:end] = 0
                self._wanted_view[end - item.n_logits : end] = 1
            row += n_rows
            n_logits += item.n_logits
        self._batch.n_tokens = row
        return self._batch, n_logits
