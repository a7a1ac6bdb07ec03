"""From flags to what the library takes: load settings and generation options, checked early."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localllm.cli.keeping import tier_config
from localllm.cli.options import CacheFlags, LoadFlags, SamplingFlags
from localllm.cli.prompt_input import argument_text
from localllm.cli.units import gpu_layers, number_or_auto
from localllm.errors import UsageError
from localllm.runtime.config import ANSWER_TOKENS

if TYPE_CHECKING:
    from localllm.cli.serve_options import WorkFlags
    from localllm.models.kv_types import KvTypes
    from localllm.runtime.config import LoadConfig, RuntimeConfig
    from localllm.runtime.types import GenerationOptions

SERVER_FLUSH_S = 10.0
"""How long a server's model that is closed writes what it has kept in memory."""

SAMPLING_NAMES = ("temperature", "top_p", "top_k", "min_p", "repeat_penalty")


def load_config(flags: LoadFlags, template: Path | None = None, *, deterministic: bool = False) -> LoadConfig:
    """Return the load settings. Raises UsageError naming the flag whose value makes no sense."""
    from localllm.runtime.config import LoadConfig

    kv = kv_types(flags.kv)
    if deterministic and flags.kv not in ("auto", "q8_0", "q8_0:q8_0"):
        raise UsageError(f"--deterministic needs a KV cache of type q8_0, not {flags.kv}.", "leave --kv out")
    kv.check(head_sizes_k=(), head_sizes_v=(), flash_attn=flags.flash_attn != "off")
    if template is not None and not template.is_file():
        raise UsageError(f"There is no template file {template}.", "--template takes a file with a Jinja template")
    return LoadConfig(
        ctx=number_or_auto("--ctx", flags.ctx),
        kv=kv,
        flash_attn=flags.flash_attn,
        gpu=gpu_layers("--gpu", flags.gpu),
        threads=number_or_auto("--threads", flags.threads),
        template=template,
        deterministic=deterministic,
    )


def kv_types(text: str) -> KvTypes:
    """Return the types of --kv. Raises UsageError for what are none."""
    from localllm.models.kv_types import KvTypes

    return KvTypes() if text == "auto" else KvTypes.parse(text)


def serving_config(
    load: LoadFlags, work: WorkFlags, cache: CacheFlags, template: Path | None, *, default_threads: int
) -> tuple[LoadConfig, RuntimeConfig, int]:
    """Return how a server loads a model, how its loop spends time, and the niceness of its workers.

    `default_threads`: what a model gets where nobody says. Raises: UsageError naming the flag at fault.
    """
    from localllm.runtime.modes import mode_of, served

    mode = mode_of(work.mode)
    absolute = None if template is None else template.absolute()
    config = load_config(load, absolute, deterministic=cache.deterministic)
    config = served(config, number_or_auto("--parallel", work.parallel))
    if config.threads is None:
        config = replace(config, threads=mode.threads(default_threads))
    tiers = tier_config(cache, flush_s=SERVER_FLUSH_S, keeps_all=True)
    return config, replace(mode.runtime, max_waiting=work.queue, tiers=tiers), mode.nice


def generation_options(
    flags: SamplingFlags, own: GenerationOptions, *, max_tokens: int | None = ANSWER_TOKENS
) -> GenerationOptions:
    """Return how to answer; `own`: the other flags' options. Raises UsageError naming a setting out of its range."""
    from localllm.runtime.sampling_params import Sampling, resolve
    from localllm.runtime.stop import check_stops
    from localllm.runtime.types import MAX_SEED

    wishes: dict[str, Any] = {name: getattr(flags, name) for name in SAMPLING_NAMES if getattr(flags, name) is not None}
    resolve(Sampling(), wishes)
    stop = tuple(argument_text(text, "The text of --stop") for text in flags.stop or ())
    if "" in stop:
        raise UsageError("--stop needs a text, not an empty one.", "leave --stop out to stop at nothing")
    check_stops(stop)
    if flags.seed is not None and not 0 <= flags.seed <= MAX_SEED:
        raise UsageError(
            f"--seed takes a whole number from 0 to {MAX_SEED}, not {flags.seed}.", "leave --seed out for a random one"
        )
    return replace(
        own,
        max_tokens=flags.max_tokens or max_tokens,
        seed=flags.seed,
        stop=stop,
        sampling=wishes,
    )
