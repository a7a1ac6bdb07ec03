"""The examinations of `localllm doctor`. Each is a function that yields findings; none can stop the others."""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

from localllm.cli.settings import told_value
from localllm.cli.tables import size
from localllm.cli.units import gpu_layers, number_or_auto
from localllm.errors import LocalLLMError

if TYPE_CHECKING:
    from localllm.backends.cpu.probe import CpuFacts
    from localllm.backends.llamacpp.report import NativeReport

State: TypeAlias = Literal["ok", "note", "wrong"]
REBUILD = "pip install --force-reinstall --no-cache-dir --no-deps --no-binary llama-cpp-python llama-cpp-python=={}"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report; `advice` is what to do about it, "" where nothing has to be done."""

    section: str
    name: str
    value: str
    state: State = "ok"
    advice: str = ""


class Machine:
    """What several examinations ask for, asked once."""

    @cached_property
    def native(self) -> NativeReport:
        """The native library, asked in a process of its own."""
        from localllm.backends import registry

        return registry.native_report()

    @cached_property
    def cpu(self) -> CpuFacts:
        """The CPU and this process's share of it."""
        from localllm.backends.cpu.probe import probe

        return probe()


Row: TypeAlias = tuple[str, str, State, str]
Examination: TypeAlias = Callable[[Machine], Iterator[Row]]


def examine() -> list[Finding]:
    """Run every examination. Never raises: one that fails becomes a finding that says so."""
    machine = Machine()
    return [finding for section, check in EXAMINATIONS for finding in carefully(section, check(machine))]


def carefully(section: str, rows: Iterator[Row]) -> Iterator[Finding]:
    """Yield what an examination finds, and where it breaks off, why."""
    try:
        for name, value, state, advice in rows:
            yield Finding(section, name, value, state, advice)
    except Exception as error:
        why = error.message if isinstance(error, LocalLLMError) else f"{type(error).__name__}: {error}"
        yield Finding(section, "not known", why, "note")


def installation(_: Machine) -> Iterator[Row]:
    """localllm, Python and the system."""
    from localllm import __version__

    yield "localllm", __version__, "ok", ""
    yield "Python", f"{platform.python_version()}, {sys.executable}", "ok", ""
    if sys.platform == "win32":
        limits = "Windows is not supported yet: no locks between processes, no signals, no tested native build"
        yield "system", f"{platform.platform()}: {limits}", "note", "use WSL 2"
    else:
        yield "system", platform.platform(), "ok", ""


def versions(_: Machine) -> Iterator[Row]:
    """The packages that localllm asks for, and what is known against their versions."""
    for requirement in metadata.requires("localllm") or []:
        if "extra ==" not in requirement:
            yield _package(requirement.partition(";")[0].strip())


def _package(requirement: str) -> Row:
    """Examine what is installed for a requirement such as `jinja2>=3.1.6`."""
    from localllm.cli.known_bad import faults_of, is_within

    name, bounds = re.fullmatch(r"([\w.-]+)(.*)", requirement).groups()  # type: ignore[union-attr]
    install = f"pip install '{requirement}'"
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return name, "not installed", "wrong", install
    faults = faults_of(name, version)
    if faults:
        told = "; ".join(f"{bad.id}: {bad.matters}" for bad in faults)
        return name, f"{version}: {told}", "wrong", f"{install}  ({faults[-1].source})"
    if not is_within(version, bounds):
        return name, f"{version}, but localllm was tested with {bounds}", "note", install
    return name, version, "ok", ""


def native_library(machine: Machine) -> Iterator[Row]:
    """The compiled llama.cpp, asked in a process of its own, and whether it fits this CPU."""
    from localllm.backends.cpu.probe import missing_features

    report, rebuild = machine.native, REBUILD.format(metadata.version("llama-cpp-python"))
    if report.failure:
        yield "loads", report.failure, "wrong", rebuild
        return
    yield "llama.cpp", report.version, "ok", ""
    yield "compiled for", report.system_info, "ok", ""
    missing = missing_features(report.features, machine.cpu)
    if missing:
        yield "fits this CPU", f"no: it uses {', '.join(missing)}, which this CPU lacks", "wrong", rebuild
    else:
        yield "fits this CPU", "yes", "ok", ""
    if not report.repacking_is_safe:
        yield "repacked weights", "off: this build can die of SIGILL in its AMX code", "note", ""


def processor(machine: Machine) -> Iterator[Row]:
    """The CPU, and how much of it this process may use."""
    cpu = machine.cpu
    told = sorted(cpu.features & _TOLD_FEATURES) or ["none that matter"]
    yield "CPU", f"{cpu.name or 'unknown'}, {cpu.architecture}", "ok", ""
    yield "features", " ".join(told), "ok", ""
    yield "cores", f"{cpu.n_cores} logical, {cpu.n_usable} usable here, {cpu.n_physical} physical of these", "ok", ""
    if cpu.quota_cores is not None:
        yield "quota", f"{cpu.quota_cores:g} cores by control group", "note" if cpu.quota_cores < 1 else "ok", ""


_TOLD_FEATURES = frozenset(
    ("avx", "avx2", "avx_vnni", "fma", "f16c", "bmi2", "avx512f", "avx512vbmi", "avx512_vnni", "avx512_bf16")
) | {"amx_int8", "asimd", "asimdhp", "asimddp", "i8mm", "sve", "sme"}


def memory(_: Machine) -> Iterator[Row]:
    """What there is and what may still be taken."""
    from localllm.models.available import available_bytes, total_bytes
    from localllm.models.memory import USABLE_SHARE

    total, available = total_bytes(), available_bytes()
    yield "memory", f"{size(total)} in all (or by control group), {size(available)} available", "ok", ""
    yield "for a model", f"{size(int(available * USABLE_SHARE))} may be used", "ok", ""


def devices(machine: Machine) -> Iterator[Row]:
    """What the native library reports."""
    report = machine.native
    for device in report.devices:
        room = f", {size(device.free_bytes)} of {size(device.total_bytes)} free" if device.total_bytes else ""
        yield device.name, f"{device.kind}: {device.description}{room}", "ok", ""
    if report.failure or any(device.kind in ("gpu", "igpu") for device in report.devices):
        return
    seen = _unused_gpu()
    if seen and not report.supports_gpu:
        version = metadata.version("llama-cpp-python")
        yield (
            "GPU",
            f"{seen[0]} is here, but this build is for the CPU only",
            "note",
            (f"CMAKE_ARGS={seen[1]} {REBUILD.format(version)}"),
        )


def _unused_gpu() -> tuple[str, str] | None:
    """Return a GPU that the system shows and the build switch for it, without asking any driver."""
    if sys.platform == "darwin" and platform.machine() == "arm64":
        return "Apple's GPU", "-DGGML_METAL=on"
    if os.path.exists("/proc/driver/nvidia/version") or os.path.exists("/dev/nvidiactl"):
        return "an NVIDIA GPU", "-DGGML_CUDA=on"
    if os.path.exists("/dev/kfd"):
        return "an AMD GPU", "-DGGML_HIP=on"
    return None


def models(_: Machine) -> Iterator[Row]:
    """The store, and the caches of other tools."""
    from localllm.models.sources import caches
    from localllm.models.store import Store

    store = Store()
    stored = store.list()
    total = size(sum(model.size_bytes for model in stored))
    yield "store", f"{store.home}: {len(stored)} models, {total}", "ok", ""
    yield from _disk(store.home)
    for model in stored:
        if model.problem:
            yield model.name, model.problem, "note", f"localllm rm {model.name}"
    left = store.unfinished()
    if left:
        yield "unfinished pulls", f"{len(left)}, {size(sum(one.size_bytes for one in left))}", "note", ""
    found = caches.folders()
    for folder in found:
        yield folder.tool, f"{folder.path}: {sum(1 for _ in folder.read(folder.path))} models", "ok", ""
    if not found:
        yield "other tools", "no cache of Hugging Face, llama.cpp, LM Studio or Ollama", "ok", ""


def _disk(home: Path) -> Iterator[Row]:
    there = next(folder for folder in (home, *home.parents) if os.path.exists(folder))
    writable = os.access(there, os.W_OK)
    free = size(shutil.disk_usage(there).free)
    told, advice = (
        (f"{free} free", "") if writable else (f"{there} cannot be written", "export LOCALLLM_HOME=/a/folder")
    )
    yield "disk", told, "ok" if writable else "wrong", advice


def kept(_: Machine) -> Iterator[Row]:
    """What is kept of prompts on disk, and whether more can be."""
    from localllm.cli.keeping import default_folder, folder_trouble, kept_bytes

    folder = default_folder()
    trouble = folder_trouble(folder)
    n_blocks, n_bytes = kept_bytes(folder)
    if n_blocks:
        yield "on disk", f"{size(n_bytes)} in {n_blocks} blocks, in {folder}", "ok", ""
    elif not trouble:
        yield "on disk", f"nothing yet, in {folder}", "ok", ""
    if trouble:
        yield "folder", trouble.what, "wrong", trouble.advice


def settings(_: Machine) -> Iterator[Row]:
    """The settings file and the variables."""
    from localllm.cli.settings import config_path, read_settings
    from localllm.errors import UsageError

    path = config_path()
    try:
        values = read_settings(path)
    except UsageError as error:
        yield "file", error.message, "wrong", error.hint
    else:
        yield "file", f"{path}: {', '.join(values) if values else 'not there, which is well'}", "ok", ""
    names = sorted(name for name in os.environ if name.startswith("LOCALLLM_"))
    yield "variables", ", ".join(names) or "none", "ok", ""


def choice(machine: Machine) -> Iterator[Row]:
    """What would be used, and why."""
    from localllm.models import catalog
    from localllm.models.available import total_bytes
    from localllm.models.store import Store

    report, cpu = machine.native, machine.cpu
    gpus = [device.name for device in report.devices if device.kind in ("gpu", "igpu")]
    if report.failure:
        yield "engine", "none: the native library does not load", "wrong", ""
    elif gpus:
        yield _chosen("engine", "gpu", gpu_layers, f"llama.cpp on {'+'.join(gpus)}, as many layers as fit")
    else:
        yield "engine", "llama.cpp on the CPU: the native library reports no GPU", "ok", ""
    bounds = f"{cpu.n_usable} usable, {cpu.n_physical} physical"
    quota = "" if cpu.quota_cores is None else f", quota {cpu.quota_cores:g}"
    yield _chosen("threads", "threads", number_or_auto, f"{cpu.default_threads}: the least of {bounds}{quota}")
    pulled = any(model.name == catalog.DEFAULT_ALIAS and not model.problem for model in Store().list())
    where = "here" if pulled else f"not here yet: localllm pull {catalog.DEFAULT_ALIAS}"
    yield "default model", f"{catalog.DEFAULT_ALIAS}, {where}", "ok", ""
    best = ", ".join(f"{entry.alias} ({entry.params})" for entry in catalog.best_for(total_bytes()))
    yield "this machine could use", best or "nothing of the catalog", "ok", ""


def _chosen(name: str, setting: str, check: Callable[[str, str], object], by_itself: str) -> Row:
    try:
        given = told_value(setting, check)
    except LocalLLMError as error:
        return name, error.message, "wrong", error.hint
    return name, f"{given}; else {by_itself}" if given else by_itself, "ok", ""


EXAMINATIONS: tuple[tuple[str, Examination], ...] = (
    ("installation", installation),
    ("packages", versions),
    ("native library", native_library),
    ("processor", processor),
    ("memory", memory),
    ("devices", devices),
    ("models", models),
    ("kept of prompts", kept),
    ("settings", settings),
    ("what would be used", choice),
)
