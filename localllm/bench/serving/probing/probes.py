"""What probe requests found out about an endpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from localllm.bench.serving.probing.greedy import Greedy

Honour: TypeAlias = Literal["honoured", "ignored", "refused", "unclear"]


@dataclass(frozen=True, slots=True)
class Probes:
    """What one endpoint does. None and "": it gave no proper answer, and `failures` says which.

    `prompt_tokens`: by `usage`, for each chat of probe_asks. `exact`: what each short question was
    answered with, read from `short` answers; `n_right` of them are right. `sampling`: what it does
    without any sampling field; `stated_sampling`: its defaults as it tells them.
    `stream_equals_whole`: the same text streamed and not. `json_schema`, `offered_tools`,
    `forced_tools`: `response_format`, tools, `tool_choice: required`.
    """

    prompt_tokens: tuple[int | None, ...] = ()
    greedy: tuple[Greedy | None, ...] = ()
    short: tuple[Greedy | None, ...] = ()
    exact: tuple[str, ...] = ()
    n_right: int = 0
    sampling: Literal["greedy", "sampled", ""] = ""
    stated_sampling: Mapping[str, Any] = field(default_factory=dict)
    max_tokens: Honour = "unclear"
    stop: Honour = "unclear"
    ignore_eos: Honour = "unclear"
    json_schema: Honour = "unclear"
    offered_tools: Honour = "unclear"
    forced_tools: Honour = "unclear"
    stream_equals_whole: bool | None = None
    has_usage: bool = False
    has_stream_usage: bool = False
    has_cached_tokens: bool = False
    failures: tuple[str, ...] = ()
