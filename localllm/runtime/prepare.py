"""From a request to sequences: template, tokens, limits. Whatever can be refused is refused here.

Runs on the caller's thread, before the first token; the engine's thread only ever sees work that
it can do.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from localllm.errors import ContextOverflow, TemplateError, UsageError
from localllm.models import chat_template
from localllm.models.chat_template import ChatTemplate, Encoded, Rendered
from localllm.models.template.messages import count_chars
from localllm.models.tokenizer import Tokenizer
from localllm.runtime.detokenizer import Detokenizer
from localllm.runtime.engine import EngineSpec, PrefixRule
from localllm.runtime.sampler import Sampler
from localllm.runtime.sampling_params import Sampling, resolve
from localllm.runtime.sequence import RequestRun, Sequence, Timeline
from localllm.runtime.stop import StopMatcher, check_stops
from localllm.runtime.stream import EventSink
from localllm.runtime.types import MAX_SEED, ChatRequest, CompletionRequest, GenerationOptions, Request

MAX_CHOICES = 16
MAX_TOP_LOGPROBS = 20
_MAX_PRIORITY = 2**31
_MAX_UNCOUNTED_CHARS = 2_000_000
_MAX_CHARS_PER_TOKEN = 64  # on average over a whole prompt; the longest tokens of some vocabularies are longer
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


def encode_prompt(request: Request, model: ModelFacts, timeline: Timeline | None = None) -> Encoded:
    """Return the prompt's token ids, and where messages end in them.

    Raises: TemplateError (no template, or it refuses this conversation); UsageError;
    ContextOverflow for a text so long that counting its tokens would take minutes.
    """
    timeline = timeline or Timeline()
    started_s = time.perf_counter()
    _refuse_endless(request, model)
    if isinstance(request, ChatRequest):
        rendered = render_prompt(request, model)
        timeline.add("template", time.perf_counter() - started_s)
        started_s = time.perf_counter()
        encoded = chat_template.encode(model.tokenizer, rendered)
    elif isinstance(request.prompt, str):
        encoded = Encoded(model.tokenizer.encode(request.prompt, parse_special=True, add_bos=True), ())
    else:
        encoded = Encoded(_checked_ids(request, model.tokenizer.vocabulary.n_vocab), ())
    timeline.add("tokenise", time.perf_counter() - started_s)
    if not encoded.tokens:
        raise UsageError("The prompt is empty, and this model has no token to begin a text with.", "give a prompt")
    return encoded


def render_prompt(request: ChatRequest, model: ModelFacts) -> Rendered:
    """Return the conversation as the chat template writes it. Raises: TemplateError, UsageError."""
    if model.template is None:
        raise chat_template.missing(model.name)
    taken = {"tools", "max_chars"} & request.template_kwargs.keys()
    if taken:
        raise UsageError(f"The template argument {min(taken)!r} is a part of the request itself.", "rename it")
    rendered = model.template.render(
        request.messages,
        tools=request.tools,
        max_chars=4 * count_chars([list(request.messages), list(request.tools)]) + 262_144,
        **request.template_kwargs,
    )
    _refuse_left_out(request, rendered)
    return rendered


def _refuse_left_out(request: ChatRequest, rendered: Rendered) -> None:
    """Refuse a conversation of which the template drops a turn; reasoning alone may be left out of answers."""
    left_out = [i for i in rendered.unseen if request.messages[i].get("role") != "assistant"]
    if left_out:
        raise TemplateError(
            f"The chat template leaves out message {left_out[0]} (role {request.messages[left_out[0]]['role']}): "
            "the model would not see it.",
            "change the conversation, or give another template with --template FILE",
            field=f"messages[{left_out[0]}]",
        )


def _refuse_endless(request: Request, model: ModelFacts) -> None:
    """Refuse what no context holds before it is rendered and its tokens are counted."""
    text = list(request.messages) if isinstance(request, ChatRequest) else request.prompt
    n_chars = 0 if isinstance(text, tuple) else count_chars(text)
    if n_chars <= _MAX_UNCOUNTED_CHARS or n_chars <= _MAX_CHARS_PER_TOKEN * (largest := model.largest_ctx()):
        return
    raise ContextOverflow(
        f"The prompt has {n_chars} characters; this model and machine allow a context of {largest} tokens.",
        "shorten the prompt",
        n_prompt_chars=n_chars,
        largest_ctx=largest,
    )


def prepare(request: Request, model: ModelFacts, spec: EngineSpec, stream: EventSink) -> RequestRun:
    """Return the request as sequences, one a choice, ready for the scheduler.

    Raises: UsageError, TemplateError, ContextOverflow; nothing was queued then.
    """
    options = request.options
    sampling = _checked_options(options, model)
    timeline = Timeline()
    encoded = encode_prompt(request, model, timeline)
    n_prompt = len(encoded.tokens)
    run = RequestRun(
        request_id=request.request_id,
        client=options.client,
        priority=options.priority,
        seed=secrets.randbits(32) if options.seed is None else options.seed,
        max_tokens=_answer_limit(n_prompt, options.max_tokens, model, spec),
        stream=stream,
        timeline=timeline,
    )
    vocabulary = model.tokenizer.vocabulary
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
            n_logprobs=options.logprobs,
            cuts=_cuts(encoded, spec),
        )
        for choice in range(options.n)
    ]
    return run


def _cuts(encoded: Encoded, spec: EngineSpec) -> set[int]:
    """Return where chunks end for a checkpoint: the last messages' ends, and all but the last token."""
    if spec.prefix_rule is not PrefixRule.CHECKPOINT:
        return set()
    n_prompt = len(encoded.tokens)
    ends = [b for b in encoded.boundaries if 0 < b < n_prompt - 1]
    return {*ends[-_BOUNDARY_CUTS:], n_prompt - 1} - {0}


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
    _check_range("priority", options.priority, -_MAX_PRIORITY, _MAX_PRIORITY)
    if options.max_tokens is not None and options.min_tokens > options.max_tokens:
        raise UsageError("min_tokens is above max_tokens.", "lower min_tokens", field="min_tokens")
    if not isinstance(options.ignore_eos, bool):
        raise UsageError(
            f"ignore_eos must be true or false; got {options.ignore_eos!r}.", "change ignore_eos", field="ignore_eos"
        )
    if not isinstance(options.client, str):
        raise UsageError(f"client must be a text; got {options.client!r}.", "change client", field="client")
    return resolve(model.sampling, options.sampling)


def _check_range(name: str, value: int | None, low: int, high: int | None) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        wanted = f"{low} to {high}" if high is not None else f"{low} or more"
        raise UsageError(f"{name} must be a whole number, {wanted}; got {value!r}.", f"change {name}", field=name)


def _checked_ids(request: CompletionRequest, n_vocab: int) -> list[int]:
    if not isinstance(request.prompt, (tuple, list)):  # bytes would pass for ids
        raise UsageError("prompt must be a text or a list of token ids.", "decode bytes first", field="prompt")
    for position, token in enumerate(request.prompt):
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < n_vocab:
            raise UsageError(
                f"prompt token {position} is not an id of this vocabulary (0 to {n_vocab - 1}).",
                "localllm tokens MODEL --encode shows the ids of a text",
                field="prompt",
            )
    return [int(token) for token in request.prompt]


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
