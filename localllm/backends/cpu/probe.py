"""What this machine's CPU is, how much of it this process may use, and whether a library fits it."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from localllm.backends.cpu.topology import linux_topology, mac_cores, sysctl_int, sysctl_text
from localllm.models.system import control_groups, read_text

# What llama.cpp's system line calls a feature, and the kernel's flag that says the CPU has it.
_FLAGS: Mapping[str, str] = MappingProxyType(
    {
        "SSE3": "pni",
        "SSSE3": "ssse3",
        "AVX": "avx",
        "AVX_VNNI": "avx_vnni",
        "AVX2": "avx2",
        "F16C": "f16c",
        "FMA": "fma",
        "BMI2": "bmi2",
        "AVX512": "avx512f",
        "AVX512_VBMI": "avx512vbmi",
        "AVX512_VNNI": "avx512_vnni",
        "AVX512_BF16": "avx512_bf16",
        "AMX_INT8": "amx_int8",
        "NEON": "asimd",
        "ARM_FMA": "asimd",
        "FP16_VA": "asimdhp",
        "DOTPROD": "asimddp",
        "MATMUL_INT8": "i8mm",
        "SVE": "sve",
        "SME": "sme",
    }
)
_MAC_FLAGS = (
    ("hw.optional.arm.FEAT_DotProd", "asimddp"),
    ("hw.optional.arm.FEAT_FP16", "asimdhp"),
    ("hw.optional.arm.FEAT_I8MM", "i8mm"),
    ("hw.optional.arm.FEAT_SME", "sme"),
)


@dataclass(frozen=True, slots=True)
class CpuFacts:
    """One CPU and this process's share of it.

    `features`: the kernel's flags. `n_cores`: logical cores of the machine; `n_usable` of them may
    run this process; `n_physical`: physical performance cores among the usable. `quota_cores`:
    what a control group allows, None = no limit.
    """

    name: str
    architecture: str
    features: frozenset[str]
    n_cores: int
    n_usable: int
    n_physical: int
    quota_cores: float | None = None

    @property
    def default_threads(self) -> int:
        """The threads to compute with: one a physical performance core, within affinity and quota."""
        quota = self.n_physical if self.quota_cores is None else int(self.quota_cores)
        return max(1, min(self.n_usable, self.n_physical, quota))


def probe(root: Path = Path("/")) -> CpuFacts:
    """Read the facts of this machine. `root`: where proc and sys are mounted."""
    n_cores = os.cpu_count() or 1
    if platform.system() == "Darwin":
        physical, fast = mac_cores()
        features = frozenset(("asimd", *(flag for name, flag in _MAC_FLAGS if sysctl_int(name))))
        name = sysctl_text("machdep.cpu.brand_string")
        return CpuFacts(name, platform.machine(), features, n_cores, n_cores, min(physical, fast))
    usable = frozenset(os.sched_getaffinity(0))
    name, features = _cpuinfo(root)
    return CpuFacts(
        name=name,
        architecture=platform.machine(),
        features=features,
        n_cores=n_cores,
        n_usable=len(usable),
        n_physical=linux_topology(root, usable).n_physical(usable),
        quota_cores=quota_cores(root),
    )


def missing_features(compiled_for: Iterable[str], cpu: CpuFacts) -> tuple[str, ...]:
    """Return what a library was compiled for (llama.cpp's names) that this CPU does not have."""
    return tuple(name for name in compiled_for if name in _FLAGS and _FLAGS[name] not in cpu.features)


def quota_cores(root: Path = Path("/")) -> float | None:
    """Return the least CPU quota of this process's control groups, in cores; None = no limit."""
    return min(_quotas(root), default=None)


def _quotas(root: Path) -> Iterator[float]:
    for folder, is_v2 in control_groups(root, "cpu"):
        if is_v2:
            words = read_text(folder / "cpu.max").split()
        else:
            words = [read_text(folder / f"cpu.cfs_{part}_us") for part in ("quota", "period")]
        if len(words) == 2 and words[0].isdigit() and words[1].isdigit() and int(words[1]):
            yield int(words[0]) / int(words[1])


def _cpuinfo(root: Path) -> tuple[str, frozenset[str]]:
    name, features = "", frozenset[str]()
    for line in read_text(root / "proc/cpuinfo").splitlines():
        key, _, value = line.partition(":")
        match key.strip().lower():
            case "model name" if not name:
                name = value.strip()
            case "flags" | "features" if not features:
                features = frozenset(value.split())
    return name or platform.processor(), features
