"""The tiny random models of ten architectures (in the folder of the fixture `tiny`), and what sets some apart."""

from __future__ import annotations

TINY = (
    "deepseek2-moe",
    "gemma3-dense",
    "gpt-oss-moe",
    "granitehybrid-dense",
    "lfm2-dense",
    "llama-dense",
    "mamba2-dense",
    "qwen2-dense",
    "qwen35-dense",
    "qwen3moe-moe",
)
WINDOWED = ("gemma3-dense", "gpt-oss-moe")
HYBRID = ("granitehybrid-dense", "lfm2-dense", "mamba2-dense", "qwen35-dense")
ROLLS_BACK = ("lfm2-dense", "qwen35-dense")
