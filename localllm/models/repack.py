"""Which weights llama.cpp's CPU backend copies into a faster layout at load, and how large the copy is.

The copy is anonymous memory beside the mapped file. What is copied depends on the tensor's type
and on the CPU: measured with llama.cpp's own report for every type on AMX, AVX-512 and AVX2 rules.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from localllm.models.gguf import TensorInfo

# AMX tiles: bytes of a block there, and the row length they need. Two-dimensional weights only.
_AMX: dict[str, tuple[int, int]] = {
    "F16": (2, 16),
    "Q4_0": (18, 32),
    "Q4_1": (20, 32),
    "Q8_0": (38, 32),
    "Q4_K": (148, 256),
    "Q5_K": (180, 256),
    "Q6_K": (210, 256),
    "IQ4_XS": (138, 256),
}
_AVX2 = frozenset(("Q4_0", "Q4_K", "IQ4_NL", "MXFP4"))
_AVX512 = _AVX2 | {"Q2_K"}
_NEON = frozenset(("Q4_0", "Q4_K", "IQ4_NL"))
_NEON_I8MM = _NEON | {"Q5_K", "Q6_K", "Q8_0", "MXFP4"}

# Looked up or convolved, never multiplied as a matrix, so never copied.
_LOOKED_UP = ("token_embd.", "position_embd.", "token_types.", "per_layer_token_embd.")


@dataclass(frozen=True, slots=True)
class CpuLayout:
    """What this CPU repacks: plain block layouts by type name, and whether it has AMX tiles."""

    types: frozenset[str] = frozenset()
    has_amx: bool = False


def cpu_layout(flags: frozenset[str] | None = None, *, amx_build: bool = False) -> CpuLayout:
    """Return what a CPU with these feature flags repacks; None = this machine's own.

    `amx_build`: llama.cpp was compiled for AMX; our own build leaves it out.
    """
    flags = cpu_flags() if flags is None else flags
    has_amx = amx_build and {"amx_tile", "amx_int8", "avx512f"} <= flags
    if "avx512f" in flags:
        return CpuLayout(_AVX512, has_amx)
    if "avx2" in flags:
        return CpuLayout(_AVX2)
    if "i8mm" in flags:
        return CpuLayout(_NEON_I8MM)
    return CpuLayout(_NEON if "asimddp" in flags else frozenset())


def cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Return the CPU's feature flags by their Linux names (Apple silicon: what all of it has)."""
    try:
        for line in cpuinfo.read_text(encoding="ascii", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip().lower() in ("flags", "features"):
                return frozenset(value.split())
    except OSError:
        pass
    return frozenset(("asimddp",)) if platform.machine() in ("arm64", "aarch64") else frozenset()


def repacked_bytes(tensor: TensorInfo, layout: CpuLayout) -> int:
    """Return the bytes of this tensor's copy, 0 if it stays where it is."""
    if len(tensor.shape) < 2 or tensor.name.startswith(_LOOKED_UP) or "conv" in tensor.name:
        return 0
    row, n_rows = tensor.shape[0], tensor.shape[1]
    amx = _AMX.get(tensor.type.name) if layout.has_amx and len(tensor.shape) == 2 else None
    if amx is not None and row % amx[1] == 0 and n_rows % 32 == 0:
        return tensor.n_values // tensor.type.block_values * amx[0]
    if tensor.type.name in layout.types and n_rows % 8 == 0:
        return tensor.n_bytes
    return 0


def output_of(tensors: Iterable[TensorInfo]) -> TensorInfo | None:
    """Return the tensor that is multiplied to give logits: its own, or the embedding it is tied to."""
    found = {tensor.name: tensor for tensor in tensors if tensor.name in ("output.weight", "token_embd.weight")}
    return found.get("output.weight") or found.get("token_embd.weight")


def tied_copy_bytes(tensors: tuple[TensorInfo, ...], layout: CpuLayout) -> int:
    """Return the bytes of the copy that a tied output makes of the token embedding."""
    output = output_of(tensors)
    if output is None or output.name == "output.weight":
        return 0
    return repacked_bytes(TensorInfo("output.weight", output.shape, output.type, 0, output.n_bytes), layout)
