"""One native context: llama.cpp's calls as typed verbs. What may be called when is the guard's business."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localllm.backends.llamacpp.model import LlamaModel
from localllm.backends.llamacpp.settings import ContextSettings
from localllm.backends.llamacpp.state import unwritten
from localllm.errors import EngineError

PARTIAL_ONLY = 1  # llama_state_seq_flags: only the state that cannot be cut


class NativeContext:
    """Owns a `llama_context`; one thread uses it. Sequence ids are the engine's slots."""

    def __init__(self, model: LlamaModel, settings: ContextSettings) -> None:
        native = model.native
        self._model = model
        self._handle: int | None = model.open_context(settings)
        self._memory: int | None = native.api.llama_get_memory(self._handle)
        if not self._memory:
            self.close()
            raise EngineError("This model keeps no KV cache: it can only embed.")
        self._bind(native, settings)
        self._abort = ctypes.create_string_buffer(2)
        self._interrupt_by_flag(native)
        api = native.api
        self.n_ctx: int = api.llama_n_ctx(self._handle)
        self.n_ctx_seq: int = api.llama_n_ctx_seq(self._handle)
        self.n_batch: int = api.llama_n_batch(self._handle)
        self.n_ubatch: int = api.llama_n_ubatch(self._handle)
        self.n_slots: int = api.llama_n_seq_max(self._handle)
        self.n_rs_seq: int = api.llama_n_rs_seq(self._handle)
        self._n_vocab = model.n_vocab
        self._n_embd = model.n_embd
        self._is_unified = settings.kv_unified
        self._queued = set[int]()  # slots of copies between streams that the next forward makes

    def decode(self, batch: Any) -> int:
        """Run a forward; return llama_decode's code (native.md, "what fails cleanly")."""
        code = int(self._decode(self._handle, batch))
        if code != -1:  # there it was refused before anything was done
            self._queued.clear()
        return code

    def logits(self, n_rows: int) -> NDArray[np.float32]:
        """Return the last forward's logits, a view [n_rows, n_vocab] that the next forward overwrites."""
        return self._view(self._get_logits(self._handle), n_rows, self._n_vocab)

    def embeddings(self, n_rows: int) -> NDArray[np.float32]:
        """Return the last forward's hidden rows, a view [n_rows, n_embd] that the next forward overwrites."""
        return self._view(self._get_embeddings(self._handle), n_rows, self._n_embd)

    def set_embeddings(self, on: bool) -> None:
        """Make forwards give hidden rows instead of logits, or logits again."""
        self._model.native.api.llama_set_embeddings(self._handle, on)

    def copy(self, src: int, dst: int, start: int, end: int) -> None:
        """Give `dst` the positions [start, end) of `src` (-1, -1 = all of them).

        Between streams the cells are counted at once and copied by the next forward: until then `awaits_copy`.
        """
        self._seq_cp(self._memory, src, dst, start, end)
        if not self._is_unified:
            self._queued |= {src, dst}

    def awaits_copy(self, slot: int) -> bool:
        """Say whether a queued copy has still to read or write a slot: its state can be neither taken nor put back."""
        return slot in self._queued

    def copy_now(self, src: int, dst: int) -> bool:
        """Give `dst`, which is empty, the whole state of `src` by way of host memory; False = it was not taken."""
        state = self.read_state(src, 0)
        return self.write_state(dst, memoryview(state)) == len(state)

    def remove(self, slot: int, start: int = -1) -> bool:
        """Drop positions from `start` on (-1 = all); False where the state cannot be cut."""
        return bool(self._seq_rm(self._memory, slot, start, -1))

    def first_held(self, slot: int) -> int:
        """Return the smallest position in the cache, -1 where there is none."""
        return int(self._pos_min(self._memory, slot))

    def n_held(self, slot: int) -> int:
        """Return how many tokens the slot's last position says it has."""
        return int(self._pos_max(self._memory, slot)) + 1

    def read_state(self, slot: int, header_bytes: int, flags: int = 0) -> bytes:
        """Return `header_bytes` of room, still to be written by `state.seal`, followed by the slot's state."""
        size = self._state_size(self._handle, slot, flags)
        room, address = unwritten(header_bytes + size)
        written = self._get_state(self._handle, address + header_bytes, size, slot, flags) if size else 0
        if written != size:
            raise EngineError(f"The state of slot {slot} has {written} bytes, not {size}.")
        return room

    def write_state(self, slot: int, payload: memoryview, flags: int = 0) -> int:
        """Put a state back; return how many bytes native code took (0 = no room)."""
        data = np.frombuffer(payload, np.uint8)
        return int(self._set_state(self._handle, data.ctypes.data, len(data), slot, flags))

    def interrupt(self) -> None:
        """Make the running forward, or the next one, stop early (code 2). Any thread may call it."""
        self._abort[0] = b"\1"

    def resume(self) -> None:
        """Take an `interrupt` back."""
        self._abort[0] = b"\0"

    def close(self) -> None:
        """Free the context, and the model with its last context; idempotent."""
        if self._handle is not None:
            handle, self._handle, self._memory = self._handle, None, None
            self._model.close_context(handle)

    def _bind(self, native: Any, settings: ContextSettings) -> None:
        c_int, pointer, size = ctypes.c_int32, ctypes.c_void_p, ctypes.c_size_t
        self._decode = native.api.llama_decode
        # On the CPU a forward is done when decode returns, so reading its output never waits.
        on_cpu = self._model.settings.n_gpu_layers == 0
        getter = native.quick_function if on_cpu else native.function
        self._get_logits = getter("llama_get_logits", pointer, pointer)
        self._get_embeddings = getter("llama_get_embeddings", pointer, pointer)
        self._seq_cp = native.quick_function("llama_memory_seq_cp", None, pointer, c_int, c_int, c_int, c_int)
        self._seq_rm = native.quick_function("llama_memory_seq_rm", ctypes.c_bool, pointer, c_int, c_int, c_int)
        self._pos_min = native.quick_function("llama_memory_seq_pos_min", c_int, pointer, c_int)
        self._pos_max = native.quick_function("llama_memory_seq_pos_max", c_int, pointer, c_int)
        flags = ctypes.c_uint32
        self._state_size = native.function("llama_state_seq_get_size_ext", size, pointer, c_int, flags)
        self._get_state = native.function("llama_state_seq_get_data_ext", size, pointer, pointer, size, c_int, flags)
        self._set_state = native.function("llama_state_seq_set_data_ext", size, pointer, pointer, size, c_int, flags)

    def _interrupt_by_flag(self, native: Any) -> None:
        # ggml asks between graph nodes, hundreds of times a step: a Python callback would cost a
        # millisecond there. C's strlen on our two bytes answers the same question in nanoseconds.
        set_callback = native.function("llama_set_abort_callback", None, *[ctypes.c_void_p] * 3)
        strlen = ctypes.cast(ctypes.CDLL(None).strlen, ctypes.c_void_p)
        set_callback(self._handle, strlen, ctypes.addressof(self._abort))

    def _view(self, address: int | None, n_rows: int, n_columns: int) -> NDArray[np.float32]:
        if not n_rows:
            return np.empty((0, n_columns), np.float32)
        if not address:
            raise EngineError("The forward gave no output rows.")
        floats = memoryview((ctypes.c_float * (n_rows * n_columns)).from_address(address))
        rows: NDArray[np.float32] = np.frombuffer(floats, np.float32)
        return rows.reshape(n_rows, n_columns)
