"""Says in llama-bench's terms what a model was loaded with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from localllm.bench.engine.markdown import params_text
from localllm.bench.engine.rows import EngineFacts
from localllm.models.info import ModelInfo


def engine_facts(info: ModelInfo, settings: Mapping[str, Any]) -> EngineFacts:
    """Return what rows say of a model that was loaded with `settings` (by llama-bench's names). Loads the library."""
    from localllm.backends.cpu.probe import probe
    from localllm.backends.llamacpp.bindings import library_commit
    from localllm.backends.llamacpp.settings import FLASH_ATTENTION
    from localllm.backends.registry import devices

    helpers = [device for device in devices() if device.kind != "cpu"]
    gpus = [device.description for device in helpers if device.kind in ("gpu", "igpu")]
    return EngineFacts(
        build_commit=library_commit(),
        cpu_info=probe().name,
        gpu_info=", ".join(gpus),
        backends=",".join(dict.fromkeys(device.name.rstrip("0123456789") for device in helpers)) or "CPU",
        model_filename=str(info.path),
        model_type=f"{info.architecture} {params_text(info.n_params)} {info.quant}",
        model_size=sum(tensor.n_bytes for tensor in info.tensors),
        model_n_params=info.n_params,
        n_batch=settings["n_batch"],
        n_ubatch=settings["n_ubatch"],
        n_threads=settings["n_threads"],
        type_k=settings["type_k"],
        type_v=settings["type_v"],
        n_gpu_layers=settings["n_gpu_layers"],
        flash_attn=FLASH_ATTENTION[settings["flash_attn"]],
        repack=settings["repack"],
        load_mode="mmap" if settings["use_mmap"] else "none",
    )
