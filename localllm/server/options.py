"""What the fields of a generation body mean: the options of the request, and those that cannot be honoured."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, Final

from localllm.errors import UsageError
from localllm.runtime.sampling_params import Sampling
from localllm.runtime.types import MAX_CHOICES, GenerationOptions
from localllm.server.body import Body
from localllm.server.fields import Neutral, ignored_fields
from localllm.server.wire import GenerationBody

_UNTIL_LATER: Final = "leave it out: this version writes free text only"
REFUSED: Final[Neutral] = {
    "structured_outputs": (({},), _UNTIL_LATER),
    "grammar": (("",), _UNTIL_LATER),
    "json_schema": ((), _UNTIL_LATER),
    "guided_json": ((), _UNTIL_LATER),
    "guided_regex": ((), _UNTIL_LATER),
    "guided_choice": ((), _UNTIL_LATER),
    "guided_grammar": ((), _UNTIL_LATER),
    "regex": ((), _UNTIL_LATER),
    "ebnf": ((), _UNTIL_LATER),
    "functions": (([],), "send tools"),
    "function_call": (("none", "auto"), "send tools"),
    "modalities": ((["text"],), "this server answers in text"),
    "audio": ((), "this server answers in text"),
    "web_search_options": ((), "this server reads nothing from the network"),
    "documents": (([],), "put them into the messages"),
    "add_generation_prompt": ((True,), "leave it out"),
    "continue_final_message": ((False,), "leave it out"),
    "chat_template": ((), "the server's user gives a template: localllm serve --template FILE"),
    "repetition_penalty": ((1, 1.0), "use repeat_penalty with repeat_last_n"),
    "penalty_alpha": ((0, 0.0), "leave it out"),
    "mirostat": ((0,), "leave it out"),
    "mirostat_mode": ((0,), "leave it out"),
    "dynatemp_range": ((0, 0.0), "leave it out"),
    "smoothing_factor": ((0, 0.0), "leave it out"),
    "tfs_z": ((1, 1.0), "leave it out"),
    "top_a": ((0, 0.0), "leave it out"),
    "length_penalty": ((1, 1.0), "leave it out"),
    "use_beam_search": ((False,), "leave it out"),
    "samplers": ((), "the order of the samplers is fixed"),
    "stop_token_ids": (([],), "use stop"),
    "bad_words": (([],), "use logit_bias"),
    "allowed_token_ids": (([],), "use logit_bias"),
    "include_stop_str_in_output": ((False,), "leave it out"),
    "skip_special_tokens": ((True,), "leave it out"),
    "truncate_prompt_tokens": ((), "shorten the prompt"),
    "n_predict": ((-1,), "use max_tokens"),
    "max_new_tokens": ((), "use max_tokens"),
    "n_probs": ((0,), "use logprobs"),
    "prompt_logprobs": ((0,), "leave it out"),
    "lora": (([],), "leave it out"),
    "input_prefix": (("",), "use prompt and suffix"),
    "input_suffix": (("",), "use prompt and suffix"),
}
"""Fields that would change the answer: the values that change nothing (null always), and what to do instead."""

STREAM_OPTIONS: Final = frozenset(("include_usage", "include_obfuscation", "continuous_usage_stats"))
ANY: Final = -1
"""By this clients of llama.cpp say "no limit" and "any seed"."""
_SAMPLING: Final = tuple(field.name for field in fields(Sampling))


def check_fields(body: Body[Any], strict: bool) -> dict[str, str]:
    """Return the header that lists fields of a generation body which mean nothing here. Raises as `ignored_fields`."""
    streams = body.value.stream_options or {}
    inside = sorted(f"stream_options.{name}" for name in streams.keys() - STREAM_OPTIONS)
    return ignored_fields(body, REFUSED, strict, inside)


def check_format(body: GenerationBody) -> None:
    """Raise UsageError for an answer that is to be anything but text."""
    wanted = body.response_format
    if wanted is not None and wanted.get("type") != "text":
        raise UsageError("The field response_format can only be text.", _UNTIL_LATER, field="response_format")


def generation_options(
    body: GenerationBody, own: GenerationOptions, *, max_tokens: int | None, logprobs: int | None
) -> GenerationOptions:
    """Return the options that a body asks for, beside the sender's `own`.

    Values are checked where the request is prepared; only the number of choices also here, since an
    answer is laid out before. Raises: UsageError for it.
    """
    n = 1 if body.n is None else body.n
    check_whole("n", n, 1, MAX_CHOICES)
    sampling = {name: value for name in _SAMPLING if (value := getattr(body, name)) is not None}
    stop = body.stop if body.stop is not None else []
    return replace(
        own,
        max_tokens=_unless_any(max_tokens),
        min_tokens=body.min_tokens or 0,
        n=n,
        seed=_unless_any(body.seed),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        sampling=sampling,
        logprobs=logprobs,
        ignore_eos=bool(body.ignore_eos),
        reuse_prefix=body.cache_prompt is not False,
        cache=body.cache or "on",
        priority=body.priority or 0,
    )


def check_whole(name: str, value: int, low: int, high: int | None = None) -> None:
    """Raise UsageError, by its name on the wire, for a number beyond its range."""
    if value >= low and (high is None or value <= high):
        return
    wanted = f"{low} or more" if high is None else f"{low} to {high}"
    raise UsageError(f"{name} must be a whole number, {wanted}; got {value}.", f"change {name}", field=name)


def _unless_any(value: int | None) -> int | None:
    return None if value == ANY else value
