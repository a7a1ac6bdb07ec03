"""What becomes of fields that a route cannot follow: accepted, refused by name, or told in a header.

A field that would change the answer and cannot be honoured is refused by name; one that no answer
depends on is accepted; one that is unknown is told in a header, or refused under --strict.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final, TypeAlias

from localllm.errors import UsageError
from localllm.server.body import Body

Neutral: TypeAlias = Mapping[str, tuple[tuple[Any, ...], str]]
"""Fields that would change an answer: the values that change nothing (null always), and what to do instead."""

NOTHING_REFUSED: Final[Neutral] = {}

IGNORED: Final = "x-localllm-ignored-fields"
"""The response header that lists them."""

INERT: Final = frozenset(
    (
        *("user", "metadata", "store", "service_tier", "parallel_tool_calls", "reasoning_effort", "verbosity"),
        *("prediction", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"),
        *("moderation", "request_id", "id_slot", "slot_id", "keep_alive", "return_tokens_as_token_ids"),
    )
)
"""Fields that clients send and that no answer depends on."""

_HEADER_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_MAX_SHOWN: Final = 20


def ignored_fields(body: Body[Any], refused: Neutral, strict: bool, inside: Iterable[str] = ()) -> dict[str, str]:
    """Return the header that lists the fields of a body which mean nothing here; {} where there are none.

    `inside`: such fields below the top level, as paths. Raises: UsageError naming one of `refused` that
    cannot be honoured, or, where `strict`, an unknown one.
    """
    for name, value in body.values(refused).items():
        refuse_unless_neutral(name, value, refused)
    unknown = sorted(set(body.names) - set(body.value.__struct_fields__) - INERT - refused.keys())
    shown = [name if _HEADER_NAME.fullmatch(name) else "?" for name in (*unknown, *inside)]
    if shown and strict:
        raise UsageError(f"The field {shown[0]} means nothing here (--strict).", "leave it out", field=shown[0])
    return {IGNORED: ", ".join(shown[:_MAX_SHOWN])} if shown else {}


def refuse_unless_neutral(name: str, value: Any, refused: Neutral) -> None:
    """Raise UsageError for a field that would change the answer and cannot be honoured."""
    neutral, hint = refused[name]
    if value is not None and not any(value == other and type(value) is type(other) for other in neutral):
        raise UsageError(f"The field {name} cannot be honoured.", hint, field=name)
