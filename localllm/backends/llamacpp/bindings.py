"""The one door to llama.cpp: loads the library quietly and hands out its C functions.

Only this module imports `llama_cpp`, and only its low-level submodule: running the package's
`__init__` would import the high-level `Llama`, Jinja and more (0.12 s that no command needs).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import importlib.util
import os
import sys
import threading
import types
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localllm.errors import LocalLLMError

LEVEL_ERROR = 4  # ggml_log_level: 1 debug, 2 info, 3 warning, 4 error, 5 continues the last line
LEVEL_CONT = 5
_RING_LINES = 400
_LOAD_LOCK = threading.Lock()
_LIBRARY_SUFFIXES = (".so", ".dylib", ".dll")
_CHECKED_BYTES = 4 << 20


class NativeUnavailable(LocalLLMError):
    """llama-cpp-python is missing, or its library cannot be loaded here."""

    code = "engine_unavailable"


class NativeLog:
    """The last lines that the native library said; none of them reaches stderr by itself."""

    def __init__(self) -> None:
        self._lines: deque[tuple[int, str]] = deque(maxlen=_RING_LINES)
        self._last_level = 0

    def add(self, level: int, text: bytes) -> None:
        """Keep one piece of output; a continuation takes the level of what it continues."""
        if level != LEVEL_CONT:
            self._last_level = level
        line = text.decode("utf-8", "replace").strip()
        if line and line != ".":
            self._lines.append((self._last_level, line))

    def lines(self) -> list[str]:
        """Return what is kept, oldest first (for `-v`)."""
        return [line for _, line in tuple(self._lines)]

    def clear(self) -> None:
        """Forget what was said, so that `reason` speaks of the call that follows."""
        self._lines.clear()

    def reason(self) -> str:
        """Return the first error since `clear`, without its function's name; "" where there is none."""
        errors = [line for level, line in tuple(self._lines) if level == LEVEL_ERROR]
        return errors[0].split(": ", 1)[-1] if errors else ""


@dataclass(frozen=True, slots=True)
class Native:
    """The loaded library: `api` is the module of C functions, `log` what it said."""

    api: Any
    log: NativeLog
    _keep: object  # the C callback must outlive the library's use of it

    def function(self, name: str, restype: Any, *argtypes: Any) -> Callable[..., Any]:
        """Return C function `name` with a prototype of our own (plain addresses instead of pointers)."""
        found: Callable[..., Any] = self.api._lib[name]  # by index: a fresh object, not the module's own
        found.restype, found.argtypes = restype, list(argtypes)  # type: ignore[attr-defined]
        return found

    def quick_function(self, name: str, restype: Any, *argtypes: Any) -> Callable[..., Any]:
        """Return C function `name`, called without releasing the GIL: for look-ups of nanoseconds."""
        found: Callable[..., Any] = ctypes.PyDLL(self.api._lib._name)[name]
        found.restype, found.argtypes = restype, list(argtypes)  # type: ignore[attr-defined]
        return found


def load() -> Native:
    """Return the library, loaded once per process.

    Raises: NativeUnavailable.
    """
    with _LOAD_LOCK:
        return _load_once()


# How long OpenMP's threads spin at a barrier before they sleep. The library's own 300 000 are right
# only while nobody else wants a core: docs/decisions/006-threads-that-sleep.md.
_SPINS = "3000"


@functools.cache
def _load_once() -> Native:
    os.environ.setdefault("GGML_NO_BACKTRACE", "1")  # else an abort forks gdb first (where there is one)
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)
    try:
        api = _import_low_level()
    except (ImportError, OSError, RuntimeError) as error:
        raise NativeUnavailable(f"llama.cpp cannot be loaded: {error}", "localllm doctor") from error
    log = NativeLog()

    @api.llama_log_callback  # type: ignore[untyped-decorator]
    def keep_line(level: int, text: bytes, _: object) -> None:
        log.add(level, text)

    api.llama_log_set(keep_line, None)
    api.llama_backend_init()
    return Native(api, log, keep_line)


def _import_low_level() -> types.ModuleType:
    name = "llama_cpp.llama_cpp"
    spec = None if "llama_cpp" in sys.modules else importlib.util.find_spec("llama_cpp")
    if spec is None or spec.submodule_search_locations is None:
        return importlib.import_module(name)
    with _bare_package(spec.submodule_search_locations):
        return importlib.import_module(name)


@contextlib.contextmanager
def _bare_package(locations: list[str]) -> Any:
    """Stand an empty package in for `llama_cpp`, so that its submodule loads without its `__init__`."""
    package = types.ModuleType("llama_cpp")
    package.__path__ = locations
    sys.modules["llama_cpp"] = package
    try:
        yield
    finally:
        del sys.modules["llama_cpp"]


def system_info() -> str:
    """Return llama.cpp's line on what it was compiled with ("CPU : AVX2 = 1 | ... | OPENMP = 1")."""
    return str(load().api.llama_print_system_info().decode())


def library_version() -> str:
    """Return llama.cpp's own version text."""
    return str(load().api.llama_version().decode())


def repacking_is_safe() -> bool:
    """Say whether weights may be repacked: not where that means AMX tiles.

    Source: llama.cpp pull request 26954. Compilers drop the stores that fill the tile configuration
    there, so a prompt of more than one row dies with SIGILL. The AMX layout is used through
    repacking only, and the first choice wherever the library was compiled for it.
    """
    return "AMX_INT8 = 1" not in system_info()


def library_commit() -> str:
    """Return the commit that the library says it was built from ("abc1234", "-dirty" where it was changed)."""
    return str(load().function("ggml_commit", ctypes.c_char_p)().decode())


@functools.cache
def kernels_checksum() -> str:
    """Return eight hex digits that tell one build of the kernels from another of the same version.

    The compiler's flags decide how sums are rounded, so KV of another build is not bit for bit ours
    (docs/decisions/020-no-avx512-fp16.md). Of a file (those for GPUs are huge), size and beginning are taken.
    """
    folder = Path(load().api._lib._name).parent
    checksum = 0
    for path in sorted(p for p in folder.glob("*ggml*") if p.suffix in _LIBRARY_SUFFIXES):
        with path.open("rb") as file:
            head = file.read(_CHECKED_BYTES)
            checksum = zlib.crc32(head, zlib.crc32(f"{path.name} {file.seek(0, os.SEEK_END)}".encode(), checksum))
    return f"{checksum:08x}"
