"""Weights and vocabulary of one GGUF file, shared by the contexts opened on them."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localllm.backends.llamacpp import bindings
from localllm.backends.llamacpp.settings import FLASH_ATTENTION, ContextSettings, ModelSettings
from localllm.backends.llamacpp.tokenizer import LlamaTokenizer
from localllm.errors import EngineError, ModelRefused, NotEnoughMemory, pasteable
from localllm.models.disk import files
from localllm.models.kv_types import number_of

if TYPE_CHECKING:
    from localllm.models.info import ModelInfo

_META_BYTES = 256


class LlamaModel:
    """A loaded model. It lives until `close`, or until the last context opened on it is closed.

    `identity` says which bytes these are: the file's hash, else its path, size, time and inode.
    """

    def __init__(
        self, native: bindings.Native, handle: int, info: ModelInfo, settings: ModelSettings, identity: str
    ) -> None:
        self.native = native
        self.info = info
        self.settings = settings
        self.identity = identity
        self._handle: int | None = handle
        self._n_contexts = 0
        api = native.api
        self.n_layers: int = api.llama_model_n_layer(handle)
        self.n_embd: int = api.llama_model_n_embd(handle)
        self.n_ctx_train: int = api.llama_model_n_ctx_train(handle)
        self.window_tokens: int = api.llama_model_n_swa(handle)
        self.is_recurrent: bool = api.llama_model_is_recurrent(handle)
        self.is_hybrid: bool = api.llama_model_is_hybrid(handle)
        self.tokenizer = LlamaTokenizer(native, api.llama_model_get_vocab(handle), info)
        self.n_vocab = self.tokenizer.vocabulary.n_vocab

    @classmethod
    def load(cls, info: ModelInfo, settings: ModelSettings, identity: str = "") -> LlamaModel:
        """Load the weights of `info.files`.

        Raises: ModelRefused with the library's own reason; NotEnoughMemory; NativeUnavailable.
        """
        native = bindings.load()
        api = native.api
        if settings.repack and not bindings.repacking_is_safe():
            settings = replace(settings, repack=False)
        params = api.llama_model_default_params()
        params.n_gpu_layers = settings.n_gpu_layers
        params.load_mode = api.LLAMA_LOAD_MODE_MMAP if settings.use_mmap else api.LLAMA_LOAD_MODE_NONE
        params.use_extra_bufts = settings.repack
        params.vocab_only = settings.vocab_only
        native.log.clear()
        names = [bytes(file) for file in info.files]
        if len(names) > 1:
            handle = api.llama_model_load_from_splits((ctypes.c_char_p * len(names))(*names), len(names), params)
        else:
            handle = api.llama_model_load_from_file(names[0], params)
        if not handle:
            reason = native.log.reason() or "no reason given"
            hint = pasteable("localllm", "show", str(info.path))
            if _is_for_memory(reason):
                raise NotEnoughMemory(f"{info.path} cannot be loaded: {reason}.", f"{hint} --memory")
            raise ModelRefused(f"llama.cpp cannot load {info.path}: {reason}", hint)
        return cls(native, handle, info, settings, identity or _identity(info.files))

    def metadata(self, key: str) -> str | None:
        """Return one value of the file's metadata as text, None where it is absent."""
        buffer = ctypes.create_string_buffer(_META_BYTES)
        n_bytes = self.native.api.llama_model_meta_val_str(self.handle, key.encode(), buffer, _META_BYTES)
        return buffer.value.decode("utf-8", "replace") if n_bytes >= 0 else None

    @property
    def handle(self) -> int:
        """The native model. Raises EngineError once it is freed."""
        if self._handle is None:
            raise EngineError("The model is closed.")
        return self._handle

    def open_context(self, settings: ContextSettings) -> int:
        """Open a native context and count it; `close_context` gives it back.

        Raises: EngineError with the library's own reason, NotEnoughMemory where that is the reason.
        """
        if min(settings.n_ctx, settings.n_batch) < settings.n_slots:  # llama.cpp would end the process
            raise EngineError(
                f"A context of {settings.n_ctx} tokens in batches of {settings.n_batch} has no row "
                f"for each of {settings.n_slots} sequences.",
                "use a larger --ctx",
            )
        params = self._context_params(settings)
        self.native.log.clear()
        context = self.native.api.llama_init_from_model(self.handle, params)
        if not context:
            reason = self.native.log.reason() or "no reason given"
            if _is_for_memory(reason):
                raise NotEnoughMemory(
                    f"There is no memory for a context of {settings.n_ctx} tokens: {reason}.", "use a smaller --ctx"
                )
            raise EngineError(
                f"llama.cpp cannot open a context of {settings.n_ctx} tokens: {reason}",
                "use a smaller --ctx, --kv f16, or --flash-attn auto",
            )
        self._n_contexts += 1
        return int(context)

    def close_context(self, context: int) -> None:
        """Free a context, and with the last one the model."""
        self.native.api.llama_free(context)
        self._n_contexts -= 1
        self.close()

    def close(self) -> None:
        """Free the weights, unless a context still uses them (then its closing does); idempotent."""
        if self._handle is None or self._n_contexts > 0:
            return
        self.tokenizer.close()  # waits for calls in other threads
        handle, self._handle = self._handle, None
        self.native.api.llama_model_free(handle)

    def _context_params(self, settings: ContextSettings) -> Any:
        api = self.native.api
        params = api.llama_context_default_params()
        params.n_ctx = settings.n_ctx
        params.n_batch = settings.n_batch
        params.n_ubatch = settings.n_ubatch
        params.n_seq_max = settings.n_slots
        params.n_rs_seq = settings.n_rs_seq
        params.n_outputs_max_per_seq = 0  # any row of a slot may ask for logits
        params.n_threads = settings.n_threads
        params.n_threads_batch = settings.n_threads_batch
        params.flash_attn_type = FLASH_ATTENTION[settings.flash_attn]
        params.type_k = number_of(settings.kv_k)
        params.type_v = number_of(settings.kv_v)
        params.pooling_type = api.LLAMA_POOLING_TYPE_NONE  # rows come out as they are; pooling is ours
        params.offload_kqv = settings.offload_kqv
        params.swa_full = settings.swa_full
        params.kv_unified = settings.kv_unified
        return params


def _is_for_memory(reason: str) -> bool:
    """Say whether llama.cpp's words mean that an allocation failed, whatever the estimate had said."""
    return "insufficient memory" in reason or "allocate" in reason


def _identity(paths: tuple[Path, ...]) -> str:
    return ";".join(":".join(map(str, (path, *files.Identity.of(path)))) for path in paths)
