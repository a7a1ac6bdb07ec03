"""Which weights llama.cpp's CPU backend copies into a faster layout at load, and how large the copy is.

The copy is anonymous memory beside the mapped file, of the same size. What is copied depends on the
tensor's type and on the CPU: measured with llama.cpp's own report for every type. AMX layouts are
left out: a library that has them is not let repack (docs/decisions/003-no-amx.md).
"""

from __future__ import annotations

from collections.abc import Iterable

from localllm.models.gguf import TensorInfo

_AVX2 = frozenset(("Q4_0", "Q4_K", "IQ4_NL", "MXFP4"))
_AVX512 = _AVX2 | {"Q2_K"}
_NEON = frozenset(("Q4_0", "Q4_K", "IQ4_NL"))
_NEON_I8MM = _NEON | {"Q5_K", "Q6_K", "Q8_0", "MXFP4"}

# Looked up or convolved, never multiplied as a matrix, so never copied.
_LOOKED_UP = ("token_embd.", "position_embd.", "token_types.", "per_layer_token_embd.")


def repacked_types(features: frozenset[str]) -> frozenset[str]:
    """Return the tensor types that a CPU with these features (the kernel's flags) has a faster layout for."""
    if "avx512f" in features:
        return _AVX512
    if "avx2" in features:
        return _AVX2
    if "i8mm" in features:
        return _NEON_I8MM
    return _NEON if "asimddp" in features else frozenset()


def repacked_bytes(tensor: TensorInfo, types: frozenset[str]) -> int:
    """Return the bytes of this tensor's copy where `types` are copied, 0 if it stays where it is."""
    if len(tensor.shape) < 2 or tensor.name.startswith(_LOOKED_UP) or "conv" in tensor.name:
        return 0
    return tensor.n_bytes if tensor.type.name in types and tensor.shape[1] % 8 == 0 else 0


def output_of(tensors: Iterable[TensorInfo]) -> TensorInfo | None:
    """Return the tensor that is multiplied to give logits: its own, or the embedding it is tied to."""
    found = {tensor.name: tensor for tensor in tensors if tensor.name in ("output.weight", "token_embd.weight")}
    return found.get("output.weight") or found.get("token_embd.weight")


def tied_copy_bytes(tensors: tuple[TensorInfo, ...], types: frozenset[str]) -> int:
    """Return the bytes of the copy that a tied output makes of the token embedding."""
    output = output_of(tensors)
    if output is None or output.name == "output.weight":
        return 0
    return repacked_bytes(TensorInfo("output.weight", output.shape, output.type, 0, output.n_bytes), types)
