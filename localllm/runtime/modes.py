"""How a server shares the machine: what `--mode` and `--parallel auto` mean. Pure, so tables can test it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal, TypeAlias

from localllm.errors import UsageError
from localllm.runtime.config import LoadConfig, RuntimeConfig

ModeName: TypeAlias = Literal["interactive", "batch", "quiet"]

AUTO_PARALLEL = 8
"""Sequences at work at once where nobody says how many: on a CPU, more decode hardly faster together."""

SERVED_RETAINED = 4
"""Finished sequences whose KV a server keeps on the device: conversations that go on."""

EXACT_PARALLEL, EXACT_RETAINED = 4, 1
"""The same where answers are to be equal to the last bit: there each has memory of its own for a whole context."""


@dataclass(frozen=True, slots=True)
class Mode:
    """`runtime`: how the loop spends time. `thread_share`: of the threads that a model gets by default.

    `nice`: what a worker adds to its niceness.
    """

    runtime: RuntimeConfig
    thread_share: float = 1.0
    nice: int = 0

    def threads(self, n_default: int) -> int | None:
        """Return the threads of a model that would get `n_default`; None = just those."""
        return None if self.thread_share == 1 else max(1, int(n_default * self.thread_share))


MODES: Mapping[ModeName, Mode] = MappingProxyType(
    {
        # Streams go on at reading speed while others' prompts are computed.
        "interactive": Mode(RuntimeConfig()),
        # Whole prompts at a time: most tokens in all, but a stream may stand still for a second.
        "batch": Mode(RuntimeConfig(itl_target_s=1.0, min_chunk_tokens=128), nice=5),
        # Half of the cores, and those only while nobody else wants them: it heats and drains less.
        "quiet": Mode(RuntimeConfig(itl_target_s=0.4, prefill_target_s=1.0), thread_share=0.5, nice=15),
    }
)


def mode_of(name: str) -> Mode:
    """Return a mode by its name. Raises UsageError for another one."""
    for known, mode in MODES.items():
        if known == name:
            return mode
    raise UsageError(f"There is no mode {name!r}.", f"one of {', '.join(MODES)}", field="mode")


def served(config: LoadConfig, parallel: int | None = None) -> LoadConfig:
    """Return load settings as a server uses them; `parallel` None = auto."""
    n_auto, n_retained = (EXACT_PARALLEL, EXACT_RETAINED) if config.deterministic else (AUTO_PARALLEL, SERVED_RETAINED)
    return replace(config, parallel=n_auto if parallel is None else parallel, retained=n_retained)
