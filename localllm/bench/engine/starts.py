"""Measures `localllm run` from process start to first token against a bare script, and `--help`."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from localllm.bench.engine.bare_script import BareStart
from localllm.bench.engine.measuring import now_text
from localllm.bench.engine.recorder import Recorder
from localllm.bench.engine.rows import Case, EngineFacts, Row, ratio_fields
from localllm.bench.engine.startup import Start, interleaved, start, start_detached
from localllm.bench.stats.summaries import estimate, mean, median, paired_ratio
from localllm.runtime.config import ANSWER_TOKENS, LoadConfig
from localllm.runtime.types import ChatRequest, CompletionRequest, GenerationOptions, GenerationRequest

PROMPT = "Name three colours."
"""What is asked: about 35 tokens with the template of the default model."""

HELP_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class RunCommand:
    """`localllm run` as it is timed. `raw`: the model has no chat template."""

    model: str
    config: LoadConfig
    raw: bool = False

    def request(self) -> GenerationRequest:
        """Return the request that the command makes of its arguments."""
        options = GenerationOptions(max_tokens=ANSWER_TOKENS, sampling={"temperature": 0.0})
        if self.raw:
            return CompletionRequest(PROMPT, options)
        return ChatRequest(({"role": "user", "content": PROMPT},), options)

    def command(self) -> Sequence[str]:
        """Return the command line."""
        config = self.config
        flags = ["--temperature", "0", "--max-tokens", str(ANSWER_TOKENS)]
        flags += ["--kv", str(config.kv), "--flash-attn", config.flash_attn, "--gpu", str(config.gpu)]
        flags += ["--ctx", str(config.ctx)] if config.ctx else []
        flags += ["--threads", str(config.threads)] if config.threads else []
        flags += ["--raw"] if self.raw else []
        return [sys.executable, "-m", "localllm", "run", self.model, PROMPT, *flags]


def measure_starts(run: RunCommand, bare: BareStart, facts: EngineFacts, n_pairs: int, recorder: Recorder) -> None:
    """Record the seconds from a process's start to its first byte, and its peak memory, for both sides in turn."""
    case = Case(n_prompt=len(bare.tokens), kind="start")
    pairs = interleaved(partial(start_detached, run.command()), partial(start, bare.command()))
    recorder.repeat("process start to first token", n_pairs, lambda: next(pairs), _row_maker(case, facts))


def _row_maker(case: Case, facts: EngineFacts) -> Callable[[list[Any], bool], Row]:
    when = now_text()

    def row(pairs: list[tuple[Start, Start]], partial: bool) -> Row:
        ours, bare = [ours.first_byte_s for ours, _ in pairs], [bare.first_byte_s for _, bare in pairs]
        extras = {
            "bare_avg_ns": round(1e9 * mean(bare)),
            **ratio_fields("start_ratio", paired_ratio(ours, bare)),  # of times: above 1 = we are slower
            "peak_rss_bytes": round(median([ours.peak_rss_bytes for ours, _ in pairs])),
            "bare_peak_rss_bytes": round(median([bare.peak_rss_bytes for _, bare in pairs])),
        }
        samples_ns = tuple(round(1e9 * s) for s in ours)
        return Row(case, facts, when, samples_ns, partial, is_rate=False, extras=extras)

    return row


def measure_help(n_reps: int, recorder: Recorder) -> None:
    """Record the seconds that `localllm --help` takes, from its start to its end."""
    command = [sys.executable, "-m", "localllm", "--help"]
    samples = []
    for rep in range(n_reps + 1):
        recorder.on_progress("localllm --help", rep, n_reps + 1)
        begun = time.perf_counter()
        subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=HELP_TIMEOUT_S, check=True)
        if rep:  # the first one warms the page cache
            samples.append(time.perf_counter() - begun)
    recorder.help_s = estimate(samples)
