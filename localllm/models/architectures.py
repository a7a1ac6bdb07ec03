"""What is known of architectures by their names, where a header does not say it. A new one may need a line here."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

ENCODERS = frozenset(
    (
        "bert",
        "modern-bert",
        "nomic-bert",
        "nomic-bert-moe",
        "neo-bert",
        "jina-bert-v2",
        "jina-bert-v3",
        "eurobert",
        "gemma-embedding",
        "t5encoder",
    )
)
"""They see the whole text at once and only make embeddings."""

ENCODER_DECODERS = frozenset(("t5",))

DIFFUSION = frozenset(("dream", "llada", "llada-moe", "rnd1", "diffusion-gemma"))
"""They do not generate token by token."""

LEARNED_POSITIONS = frozenset(("gpt2", "mpt", "starcoder"))
"""They have no position beyond the trained context."""

ROLLS_BACK = frozenset(
    (
        "qwen35",
        "qwen35moe",
        "qwen4exp",
        "lfm2",
        "lfm2moe",
        "nemotron_h",
        "nemotron_h_moe",
        "bailingmoe3",
        "deepseek4",
        "glm5-next",
        "kimi-k3",
    )
)
"""llama.cpp keeps snapshots of their recurrent state, so that some tokens can be taken back."""

WINDOW_PERIODS: Mapping[str, tuple[int, bool]] = MappingProxyType(
    {
        "gemma2": (2, False),
        "gemma3": (6, False),
        "gemma3n": (5, False),
        "gemma-embedding": (6, False),
        "cohere2": (4, False),
        "gpt-oss": (2, False),
        "llama4": (4, False),
        "exaone4": (4, False),
        "exaone-moe": (4, False),
        "olmo2": (4, False),
        "plamo3": (8, False),
        "afmoe": (4, False),
        "modern-bert": (3, True),
        "smallthinker": (4, True),
    }
)
"""Layers take turns between window and full attention: (period, whether a period begins with the full one)."""

WINDOW_DEFAULTS: Mapping[str, int] = MappingProxyType({"gemma2": 4096, "llama4": 8192})
"""The window in tokens where the file does not give it."""

NO_ROTATION = frozenset(
    ("bloom", "gpt2", "granitehybrid", "jamba", "mamba", "mamba2", "mpt", "nemotron_h", "nemotron_h_moe", "starcoder")
)
"""No rotary positions, whatever the header says of them."""

ROTATES_WHOLE_HEADS = frozenset(("qwen2", "qwen2moe", "qwen3", "qwen3moe"))
