"""From a request to sequences: template, tokens, limits. Whatever can be refused is refused here.

Runs on the caller's thread, before the first token; the engine's thread only ever sees work that
it can do.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, get_args

from localllm.errors import ContextOverflow, UsageError
from localllm.models.chat_template import ChatTemplate, Encoded
from localllm.models.tokenizer import Tokenizer
from localllm.runtime.answers import AnswerMemory, Recollection
from localllm.runtime.detokenizer import Detokenizer
from localllm.runtime.engine import EngineSpec, PrefixRule
from localllm.runtime.kv.blocks import Root
from localllm.runtime.kv.tiers import Lookup, Tiers, no_tiers
from localllm.runtime.prompts import encode_prompt, encode_texts
from localllm.runtime.sampler import Sampler
from localllm.runtime.sampling_params import Sampling, resolve
from localllm.runtime.sequence import Embedding, RequestRun, Sequence, Timeline
from localllm.runtime.stop import StopMatcher, check_stops
from localllm.runtime.stream import EventSink
from localllm.runtime.types import (
    MAX_CHOICES,
    MAX_PRIORITY,
    MAX_SEED,
    MAX_TOP_LOGPROBS,
    CacheUse,
    EmbeddingRequest,
    GenerationOptions,
    Request,
)

_BOUNDARY_CUTS = 3  # of the newest messages; older ones are rarely where conversations part


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What preparing needs of a loaded model.

    `largest_ctx`: returns the longest context in tokens that model and memory allow; for the hint.
    """

    name: str
    tokenizer: Tokenizer
    template: ChatTemplate | None
    sampling: Sampling
    largest_ctx: Callable[[], int]


def prepare(
    request: Request,
    model: ModelFacts,
    spec: EngineSpec,
    stream: EventSink,
    tiers: Tiers | None = None,
    answers: AnswerMemory | None = None,
) -> RequestRun:
    """Return the request as sequences, one a choice, or as texts to embed, ready for the scheduler.

    What the `tiers` know of its prompt is looked up here, and reading it begins. `answers`: what was generated
    before, and will be remembered of this.

    Raises: UsageError, TemplateError, ContextOverflow; nothing was queued then.
    """
    if isinstance(request, EmbeddingRequest):
        return _prepare_texts(request, model, spec, stream)
    options = request.options
    sampling = _checked_options(options, model)
    timeline = Timeline()
    recollection = recollection_of(request, answers)
    encoded = encode_prompt(request, model, timeline, recollection)
    n_prompt = len(encoded.tokens)
    run = RequestRun(
        request_id=request.request_id,
        client=options.client,
        priority=options.priority,
        seed=secrets.randbits(32) if options.seed is None else options.seed,
        max_tokens=_answer_limit(n_prompt, options.max_tokens, model, spec),
        stream=stream,
        timeline=timeline,
        reuse_prefix=options.reuse_prefix and options.cache != "off",
        cache=options.cache,
        is_private=options.is_private,
        root=_root(options),
        recollection=recollection,
    )
    vocabulary = model.tokenizer.vocabulary
    lookups = _lookups(run, encoded.tokens, options.n, tiers or no_tiers(spec))
    run.sequences = [
        Sequence(
            run=run,
            choice=choice,
            tokens=list(encoded.tokens),
            n_prompt=n_prompt,
            sampler=Sampler(
                sampling,
                seed=run.seed,
                choice=choice,
                vocabulary=vocabulary,
                piece=model.tokenizer.piece,
                min_tokens=options.min_tokens,
                ignore_eos=options.ignore_eos,
            ),
            detokenizer=Detokenizer(model.tokenizer),
            stop=StopMatcher(options.stop),
            eog_ids=vocabulary.eog_ids,
            lookup=lookups[choice],
            n_logprobs=options.logprobs,
            cuts=_cuts(encoded, spec),
        )
        for choice in range(options.n)
    ]
    return run


def recollection_of(request: Request, answers: AnswerMemory | None) -> Recollection | None:
    """Return what a request may know of earlier answers; nothing where it wants nothing that is held."""
    return None if answers is None or request.options.cache == "off" else answers.recall(_root(request.options))


def _root(options: GenerationOptions) -> Root:
    return "", options.salt


def _lookups(run: RequestRun, tokens: list[int], n_choices: int, tiers: Tiers) -> list[Lookup]:
    """Return what the tiers know for each choice; the disk is asked for the first, which the others copy."""
    started_s = time.perf_counter()
    first = tiers.look_up(run.root, tokens) if run.reuse_prefix else tiers.blank(run.root)
    run.timeline.add("match", time.perf_counter() - started_s)
    return [first, *(tiers.blank(run.root) for _ in range(n_choices - 1))]


def _prepare_texts(request: EmbeddingRequest, model: ModelFacts, spec: EngineSpec, stream: EventSink) -> RequestRun:
    options = request.options
    _check_sender(options)
    limit = min(spec.max_embed_tokens, spec.pool_tokens)
    timeline = Timeline()
    texts = encode_texts(request, model, limit, timeline)
    run = RequestRun(request.request_id, options.client, options.priority, 0, 0, stream, timeline)
    run.embedding = Embedding(run, texts)
    return run


def _cuts(encoded: Encoded, spec: EngineSpec) -> set[int]:
    """Return where chunks end for a checkpoint: the last messages' ends, and all but the last token."""
    if spec.prefix_rule is not PrefixRule.CHECKPOINT:
        return set()
    n_prompt = len(encoded.tokens)
    ends = [b for b in encoded.boundaries if 0 < b < n_prompt - 1]
    cuts = {*ends[-_BOUNDARY_CUTS:], n_prompt - 1}
    if spec.cut_tokens:
        cuts = {cut - cut % spec.cut_tokens for cut in cuts}
    return cuts - {0}


def _answer_limit(n_prompt: int, max_tokens: int | None, model: ModelFacts, spec: EngineSpec) -> int:
    """Return the most tokens an answer may have; at least one must fit."""
    limit = min(spec.max_sequence_tokens, spec.pool_tokens)
    n_left = limit - n_prompt
    if n_left < 1:
        needed, largest = n_prompt + 1, model.largest_ctx()
        hint = (
            f"use --ctx {needed} or more (this model and machine allow {largest})"
            if needed <= largest
            else f"shorten the prompt: this model and machine allow a context of {largest} tokens"
        )
        raise ContextOverflow(
            f"The prompt has {n_prompt} tokens and its answer needs at least 1; the context holds {limit}.",
            hint,
            n_prompt_tokens=n_prompt,
            n_ctx=limit,
            n_reserve_tokens=1,
            largest_ctx=largest,
        )
    return n_left if max_tokens is None else min(max_tokens, n_left)


def _checked_options(options: GenerationOptions, model: ModelFacts) -> Sampling:
    """Check every option that is not sampling; return the sampling settings in force."""
    check_stops(options.stop)
    _check_range("n", options.n, 1, MAX_CHOICES)
    _check_range("max_tokens", options.max_tokens, 1, None)
    _check_range("min_tokens", options.min_tokens, 0, None)
    _check_range("logprobs", options.logprobs, 0, MAX_TOP_LOGPROBS)
    _check_range("seed", options.seed, 0, MAX_SEED)
    _check_sender(options)
    if options.max_tokens is not None and options.min_tokens > options.max_tokens:
        raise UsageError("min_tokens is above max_tokens.", "lower min_tokens", field="min_tokens")
    for name in ("ignore_eos", "reuse_prefix", "is_private"):
        value = getattr(options, name)
        if not isinstance(value, bool):
            raise UsageError(f"{name} must be true or false; got {value!r}.", f"change {name}", field=name)
    if options.cache not in get_args(CacheUse):
        raise UsageError(f"cache must be on, off or pin; got {options.cache!r}.", "leave cache out", field="cache")
    return resolve(model.sampling, options.sampling)


def _check_sender(options: GenerationOptions) -> None:
    _check_range("priority", options.priority, -MAX_PRIORITY, MAX_PRIORITY)
    if not isinstance(options.client, str):
        raise UsageError(f"client must be a text; got {options.client!r}.", "change client", field="client")


def _check_range(name: str, value: int | None, low: int, high: int | None) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        wanted = f"{low} to {high}" if high is not None else f"{low} or more"
        raise UsageError(f"{name} must be a whole number, {wanted}; got {value!r}.", f"change {name}", field=name)


_OPTION_NAMES = frozenset(f.name for f in fields(GenerationOptions)) - {"sampling"}


def options_from(settings: dict[str, Any]) -> GenerationOptions:
    """Sort keyword settings (max_tokens=..., temperature=...) into options and sampling wishes.

    Sampling names are checked when the request is prepared. Raises: UsageError for an unknown one.
    """
    known = {name: value for name, value in settings.items() if name in _OPTION_NAMES}
    sampling = {name: value for name, value in settings.items() if name not in _OPTION_NAMES}
    unknown = sampling.keys() - {f.name for f in fields(Sampling)}
    if unknown:
        raise UsageError(f"unknown setting: {', '.join(sorted(unknown))}", "see GenerationOptions and Sampling")
    stop = known.get("stop", ())
    known["stop"] = check_stops([stop] if isinstance(stop, str) else stop)
    return GenerationOptions(**known, sampling=sampling)
