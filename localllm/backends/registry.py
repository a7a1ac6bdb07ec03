"""Which engine runs which file, and the door to it: nothing heavy is imported before it is used."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

from localllm.errors import ModelNotFound, ModelRefused

if TYPE_CHECKING:
    from localllm.backends.llamacpp.devices import Device
    from localllm.backends.llamacpp.engine import LlamaEngine
    from localllm.backends.llamacpp.model import LlamaModel
    from localllm.backends.llamacpp.report import NativeReport
    from localllm.backends.llamacpp.settings import ContextSettings
    from localllm.backends.placement import Machine, Placement
    from localllm.models.info import ModelInfo


class EngineKind(Enum):
    """The engines there are."""

    LLAMACPP = "llamacpp"


def engine_kind(path: Path) -> EngineKind:
    """Return the engine for a model file. Raises ModelNotFound; ModelRefused for what none can run."""
    if path.is_dir():
        if _is_mlx(path):
            raise ModelRefused(
                f"{path} is an MLX model; this version runs GGUF files only.", "localllm pull hf:ORG/REPO-GGUF"
            )
        raise ModelRefused(f"{path} is a directory, not a GGUF file.", "name the .gguf file in it")
    if not path.is_file():
        raise ModelNotFound(f"There is no file {path}.", "localllm ls")
    return EngineKind.LLAMACPP  # whether it is a good GGUF file is the header reader's to say


def machine() -> Machine:
    """Return the facts of this machine that placement needs. Loads the native library.

    Raises: NativeUnavailable.
    """
    from localllm.backends.cpu.probe import probe
    from localllm.backends.llamacpp import bindings
    from localllm.backends.placement import Machine
    from localllm.models.available import available_bytes

    return Machine(probe(), devices(), available_bytes(), bindings.repacking_is_safe())


def devices() -> tuple[Device, ...]:
    """Return the devices that the native library reports. Raises NativeUnavailable."""
    from localllm.backends.llamacpp.devices import list_devices

    return list_devices()


def native_report() -> NativeReport:
    """Return what the native library is and was compiled for; safe where it would crash this process."""
    from localllm.backends.llamacpp import report

    return report.native_report()


def load_model(info: ModelInfo, placement: Placement, identity: str = "") -> LlamaModel:
    """Load the weights as placed. `identity`: the file's hash where it is known.

    Raises: ModelRefused; NativeUnavailable.
    """
    from localllm.backends.llamacpp.model import LlamaModel
    from localllm.backends.llamacpp.settings import ModelSettings

    settings = ModelSettings(n_gpu_layers=placement.n_gpu_layers, use_mmap=placement.use_mmap, repack=placement.repack)
    return LlamaModel.load(info, settings, identity)


def load_vocabulary(info: ModelInfo) -> LlamaModel:
    """Load a file's vocabulary without its weights, for its tokenizer. Raises as `load_model`."""
    from localllm.backends.llamacpp.model import LlamaModel
    from localllm.backends.llamacpp.settings import ModelSettings

    return LlamaModel.load(info, ModelSettings(vocab_only=True))


def open_engine(model: LlamaModel, placement: Placement) -> LlamaEngine:
    """Open an engine over loaded weights. Raises EngineError with the library's own reason."""
    from localllm.backends.llamacpp.engine import LlamaEngine

    return LlamaEngine(model, context_settings(placement))


def context_settings(placement: Placement) -> ContextSettings:
    """Return a placement in llama.cpp's terms."""
    from localllm.backends.llamacpp.settings import ContextSettings

    return ContextSettings(
        n_ctx=placement.n_ctx,
        n_slots=placement.n_slots,
        n_batch=placement.n_batch,
        n_ubatch=placement.n_ubatch,
        n_threads=placement.n_threads,
        n_threads_batch=placement.n_threads,
        flash_attn=placement.flash_attn,
        kv_k=placement.kv.k,
        kv_v=placement.kv.v,
        kv_unified=placement.kv_unified,
        swa_full=placement.swa_full,
        max_sequence_tokens=placement.max_sequence_tokens,
        pool_is_host_memory=placement.pool_is_host_memory,
        cut_tokens=placement.cut_tokens,
        exact_rows=placement.exact_rows,
    )


def _is_mlx(path: Path) -> bool:
    return (path / "config.json").is_file() and any(path.glob("*.safetensors"))
