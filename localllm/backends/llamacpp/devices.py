"""The devices that the native library reports, through ggml's device API."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Literal, TypeAlias

from localllm.backends.llamacpp import bindings

DeviceKind: TypeAlias = Literal["cpu", "gpu", "igpu", "accel"]
_KINDS: tuple[DeviceKind, ...] = ("cpu", "gpu", "igpu", "accel")


@dataclass(frozen=True, slots=True)
class Device:
    """One device. `name` as llama.cpp calls it ("CUDA0", "MTL0"); memory 0 where it does not say.

    `kind`: "igpu" shares the machine's memory, "accel" only helps the CPU (BLAS, AMX).
    """

    name: str
    description: str
    kind: DeviceKind
    free_bytes: int
    total_bytes: int


def list_devices() -> tuple[Device, ...]:
    """Return the devices of this build and machine, in ggml's order. Raises NativeUnavailable."""
    native = bindings.load()
    pointer, text, size = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t
    count = native.function("ggml_backend_dev_count", size)
    get = native.function("ggml_backend_dev_get", pointer, size)
    name = native.function("ggml_backend_dev_name", text, pointer)
    description = native.function("ggml_backend_dev_description", text, pointer)
    kind = native.function("ggml_backend_dev_type", ctypes.c_int, pointer)
    memory = native.function("ggml_backend_dev_memory", None, pointer, pointer, pointer)
    found = []
    for index in range(count()):
        handle = get(index)
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        memory(handle, ctypes.addressof(free), ctypes.addressof(total))
        found.append(
            Device(
                name=name(handle).decode("utf-8", "replace"),
                description=description(handle).decode("utf-8", "replace"),
                kind=_KINDS[min(kind(handle), len(_KINDS) - 1)],
                free_bytes=free.value,
                total_bytes=total.value,
            )
        )
    return tuple(found)
