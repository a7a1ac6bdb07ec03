"""What became of requests and servers that did not answer as they should, in words."""

from __future__ import annotations

from localllm.bench.client.calls import End, Outcome
from localllm.errors import ServerUnreachable

MAX_CHARACTERS = 200
UNSUPPORTED = (400, 404, 405, 415, 422, 501)
"""Statuses by which a server tells that it does not do what was asked."""
KEY_REFUSED = (401, 403)


def key_refused(who: str, *, has_key: bool, status: int, hint: str = "") -> ServerUnreachable:
    """Return that a server does not take the key that it was sent, or was sent none and asks for one."""
    said = "does not take the key" if has_key else "asks for a key"
    return ServerUnreachable(f"{who} {said}.", hint or "LOCALLLM_API_KEY=... localllm bench serve URL", http=status)


def failure_of(outcome: Outcome) -> str:
    """Return what became of a request that got no proper answer, as a few words."""
    is_refusal = outcome.status is not None and outcome.status >= 400  # some have no error as OpenAI's are
    match outcome.end:
        case End.REFUSED | End.MALFORMED if is_refusal:
            told = outcome.error_message or outcome.error_code or "no reason given"
            return f"HTTP {outcome.status}: {told}"[:MAX_CHARACTERS]
        case End.ERROR_EVENT:
            return f"an error in the answer: {outcome.error_message or outcome.error_code or 'no reason given'}"[
                :MAX_CHARACTERS
            ]
        case End.UNREACHABLE:
            return f"no connection: {outcome.fault}"[:MAX_CHARACTERS]
    return (outcome.fault or outcome.end.value)[:MAX_CHARACTERS]
