"""Versions of dependencies that are known to be unsafe: data for `doctor`, each with its source."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KnownBad:
    """One fault of one distribution: versions in [since, fixed) have it.

    `matters`: what it means for someone who runs models here. `source`: where it is told.
    """

    distribution: str
    since: str
    fixed: str
    id: str
    matters: str
    source: str


KNOWN_BAD: tuple[KnownBad, ...] = (
    KnownBad(
        "jinja2",
        "0",
        "3.1.5",
        "CVE-2024-56326",
        "a chat template can leave the sandbox through a stored reference to str.format",
        "https://github.com/pallets/jinja/security/advisories/GHSA-q2x7-8rv6-6q7h",
    ),
    KnownBad(
        "jinja2",
        "0",
        "3.1.6",
        "CVE-2025-27516",
        "a chat template can leave the sandbox through the attr filter",
        "https://github.com/pallets/jinja/security/advisories/GHSA-cpwx-vrp4-4pq7",
    ),
    KnownBad(
        "llama-cpp-python",
        "0.2.30",
        "0.2.72",
        "CVE-2024-34359",
        "its own chat code runs a model's template outside any sandbox (localllm does not call that code)",
        "https://osv.dev/vulnerability/GHSA-56xg-wfcc-g829",
    ),
    # The bindings' versions follow from the llama.cpp commit that each release vendors:
    # 0.3.9 May 2025, 0.3.16 August 2025, 0.3.17 22 March 2026.
    KnownBad(
        "llama-cpp-python",
        "0",
        "0.3.10",
        "CVE-2025-49847",
        "a model's vocabulary can overflow a buffer (llama.cpp before b5662)",
        "https://nvd.nist.gov/vuln/detail/CVE-2025-49847",
    ),
    KnownBad(
        "llama-cpp-python",
        "0",
        "0.3.17",
        "CVE-2026-33298",
        "a tensor's size can wrap round and overflow the heap (llama.cpp before b7824)",
        "https://github.com/ggml-org/llama.cpp/security/advisories/GHSA-96jg-mvhq-q7q7",
    ),
    KnownBad(
        "llama-cpp-python",
        "0",
        "0.3.17",
        "CVE-2026-27940",
        "a GGUF header can make the loader write past its buffer (llama.cpp before b8146)",
        "https://github.com/ggml-org/llama.cpp/security/advisories/GHSA-3p4r-fq3f-q74v",
    ),
)


def faults_of(distribution: str, version: str) -> tuple[KnownBad, ...]:
    """Return the known faults of this version of `distribution` (name as on the package index)."""
    name = re.sub(r"[-_.]+", "-", distribution).lower()
    have = _key(version)
    return tuple(bad for bad in KNOWN_BAD if bad.distribution == name and _key(bad.since) <= have < _key(bad.fixed))


def is_within(version: str, bounds: str) -> bool:
    """Say whether `version` satisfies bounds such as ">=0.3.36,<0.3.37" (only >= and < are understood)."""
    have = _key(version)
    for bound in filter(None, bounds.split(",")):
        if bound.startswith(">=") and have < _key(bound[2:]):
            return False
        if bound.startswith("<") and have >= _key(bound[1:]):
            return False
    return True


def _key(version: str) -> tuple[int, ...]:
    """Order by the leading numbers; a pre-release counts as its release."""
    numbers = tuple(int(part) for part in re.match(r"[0-9.]*", version)[0].split(".") if part)  # type: ignore[index]
    return (*numbers, 0, 0, 0)[:4]
