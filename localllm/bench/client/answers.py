"""Tells what an endpoint's answer was: tokens and when they came, usage, an error; and whether it kept the rules.

For OpenAI's chat and text completions, streamed or whole, as any server sends them: what is not
needed here is passed over whatever it holds, and nothing that a server sends makes this raise.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import msgspec

from localllm.bench.client.http1 import data_of, is_done
from localllm.bench.client.loose import as_count, as_dict, as_list, as_text

MAX_MESSAGE_CHARS = 1000
CUT = "the last event was cut"
_NO_END = "the stream ended without [DONE] or an error event"


@dataclass(slots=True)
class Answer:
    """What an answer amounted to. Mutated by this module alone.

    `token_s`: when each piece of text came (streams only), `answer_s`: the first that is not
    reasoning. `faults`: rules that it broke, in words. `terminals`: "done", "error", in order.
    """

    token_s: list[float] = field(default_factory=list)
    answer_s: float | None = None
    texts: list[str] = field(default_factory=list)
    tool_calls: bool = False
    finish_reasons: dict[int, str] = field(default_factory=dict)
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    accepted_draft_tokens: int | None = None
    rejected_draft_tokens: int | None = None
    timings: dict[str, Any] | None = None
    error_code: str | None = None
    error_message: str = ""
    terminals: list[str] = field(default_factory=list)
    n_comments: int = 0
    faults: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The text of all choices, in order of arrival."""
        return _whole("".join(self.texts))

    @property
    def is_cut(self) -> bool:
        """Whether a stream lacks its end and broke no other rule."""
        return self.faults == [_NO_END]


class StreamFold:
    """Folds a stream's events into an answer, one by one, so that who folds can do other work in between."""

    def __init__(self) -> None:
        self._answer = Answer()

    def take(self, arrived_s: float, event: bytes) -> None:
        """Take one event and when it came."""
        answer, data = self._answer, data_of(event)
        if data is None:
            answer.n_comments += 1
        elif is_done(event):
            _terminal(answer, "done")
        else:
            _fold_chunk(answer, arrived_s, data)

    def finished(self, rest: bytes = b"") -> Answer:
        """Return what the stream amounted to. `rest`: what came after its last whole event."""
        answer = self._answer
        if is_done(rest):  # the last line break is missing: nothing is lost
            _terminal(answer, "done")
        elif rest:
            answer.faults.append(CUT)
        if not answer.terminals:
            answer.faults.append(_NO_END)
        elif answer.terminals == ["done"] and not answer.finish_reasons:
            answer.faults.append("no choice has a finish_reason")
        return answer


def fold_body(status: int, body: bytes) -> Answer:
    """Return what an answer that was no stream amounted to."""
    answer = Answer()
    try:
        whole = _decoded(body)
    except ValueError as error:
        if status < 400:
            answer.faults.append(f"the body is not what it should be: {error}")
        else:
            answer.faults.append(f"status {status} without an error")
            answer.error_message = body[: 4 * MAX_MESSAGE_CHARS].decode(errors="replace").strip()[:MAX_MESSAGE_CHARS]
        return answer
    if _note_error(answer, whole):
        answer.terminals.append("error")
        if status < 400:
            answer.faults.append(f"an error with status {status}")
        return answer
    answer.terminals.append("done")
    if status >= 400:
        answer.faults.append(f"status {status} without an error")
        answer.error_message = _own_words(whole)[:MAX_MESSAGE_CHARS]
    for place, choice in enumerate(_choices(whole)):
        _fold_message(answer, place, choice)
    _note_counts(answer, whole)
    return answer


def _terminal(answer: Answer, kind: str) -> None:
    # Some servers close an error with [DONE] too: one end, told twice.
    if answer.terminals and answer.terminals != ["error"]:
        answer.faults.append(f"{kind} after {answer.terminals[-1]}")
    elif answer.terminals == ["error"] and kind == "error":
        answer.faults.append("two error events")
    answer.terminals.append(kind)


def _fold_chunk(answer: Answer, arrived_s: float, data: bytes) -> None:
    try:
        chunk = _decoded(data)
    except ValueError as error:
        answer.faults.append(f"a chunk is not what it should be: {error}")
        return
    if _note_error(answer, chunk):
        _terminal(answer, "error")
        return
    if answer.terminals:
        answer.faults.append(f"a chunk after {answer.terminals[-1]}")
    for place, choice in enumerate(_choices(chunk)):
        _fold_choice(answer, arrived_s, place, choice)
    _note_counts(answer, chunk)


def _fold_choice(answer: Answer, arrived_s: float, place: int, choice: dict[str, Any]) -> None:
    index = as_count(choice.get("index"))
    index = place if index is None else index
    delta = choice.get("delta")
    text, thought, calls = _said(choice if delta is None else as_dict(delta))
    if text or thought or calls:
        if index in answer.finish_reasons:
            answer.faults.append(f"text of choice {index} after its finish_reason")
        answer.token_s.append(arrived_s)
        if answer.answer_s is None and (text or calls):
            answer.answer_s = arrived_s
    if text:
        answer.texts.append(text)
    answer.tool_calls = answer.tool_calls or calls
    reason = choice.get("finish_reason")
    if reason:
        if index in answer.finish_reasons:
            answer.faults.append(f"two finish_reasons of choice {index}")
        answer.finish_reasons[index] = _whole(str(reason))


def _fold_message(answer: Answer, place: int, choice: dict[str, Any]) -> None:
    message = choice.get("message")
    text, _, calls = _said(choice if message is None else as_dict(message))
    answer.texts.append(text)
    answer.tool_calls = answer.tool_calls or calls
    reason = choice.get("finish_reason")
    if reason:
        answer.finish_reasons[place] = _whole(str(reason))
    else:
        answer.faults.append(f"choice {place} has no finish_reason")


def _said(of: dict[str, Any]) -> tuple[str, bool, bool]:
    """Return the text of a delta, a message or a text choice, whether it holds a thought, and whether a call."""
    content = of.get("content")
    text = as_text(content) or as_text(of.get("text")) or as_text(of.get("refusal"))
    thought = bool(of.get("reasoning") or of.get("reasoning_content"))
    if isinstance(content, list):  # in parts
        parts = [as_dict(part) for part in content]
        text = "".join(as_text(part.get("text")) for part in parts)
        thought = thought or any(part.get("thinking") for part in parts)
    return text, thought, bool(of.get("tool_calls") or of.get("function_call"))


def _note_counts(answer: Answer, body: dict[str, Any]) -> None:
    """Note what `usage` tells, and llama-server's `timings` where that tells more. The last word counts."""
    usage, timings = as_dict(body.get("usage")), as_dict(body.get("timings"))
    if not usage and not timings:
        return
    prompt, completion = as_dict(usage.get("prompt_tokens_details")), as_dict(usage.get("completion_tokens_details"))
    drafted, kept = as_count(timings.get("draft_n")), as_count(timings.get("draft_n_accepted"))
    rejected = None if drafted is None or kept is None else max(0, drafted - kept)
    for name, told in (
        ("prompt_tokens", as_count(usage.get("prompt_tokens"))),
        ("completion_tokens", as_count(usage.get("completion_tokens"))),
        ("cached_tokens", as_count(timings.get("cache_n"))),
        ("cached_tokens", as_count(prompt.get("cached_tokens"))),
        ("accepted_draft_tokens", as_count(completion.get("accepted_prediction_tokens"))),
        ("rejected_draft_tokens", as_count(completion.get("rejected_prediction_tokens"))),
        ("accepted_draft_tokens", kept),
        ("rejected_draft_tokens", rejected),
    ):
        if told is not None:
            setattr(answer, name, told)
    if timings:
        answer.timings = timings


def _note_error(answer: Answer, body: dict[str, Any]) -> bool:
    """Note the error that a body holds; return whether it holds one."""
    error = body if body.get("object") == "error" else body.get("error")
    if not error:
        return False
    if isinstance(error, dict):
        answer.error_code = _whole(str(error.get("code") or error.get("type") or ""))
        error = error.get("message") or ""
    answer.error_message = _whole(str(error))[:MAX_MESSAGE_CHARS]
    return True


def _own_words(body: dict[str, Any]) -> str:
    """Return why a server refused, told in a way of its own: FastAPI's `detail` is a text or a list of findings."""
    for told in (body.get("detail"), body.get("message")):
        if isinstance(told, str) and told:
            return _whole(told)
        if isinstance(told, list):
            found = [as_text(as_dict(one).get("msg")) for one in told]
            return _whole("; ".join(one for one in found if one))
    return ""


def _choices(body: dict[str, Any]) -> list[dict[str, Any]]:
    return [as_dict(choice) for choice in as_list(body.get("choices"))]


def _decoded(data: bytes) -> dict[str, Any]:
    """Return the JSON object in `data`. Raises ValueError with a reason that quotes nothing of it."""
    try:
        value = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        value = _decoded_loosely(data, error)
    if not isinstance(value, dict):
        raise ValueError("no JSON object")
    return value


def _decoded_loosely(data: bytes, error: Exception) -> Any:
    """Return what the standard library takes and msgspec does not: half a surrogate pair, NaN, huge numbers."""
    try:
        return json.loads(data)
    except UnicodeDecodeError:
        raise ValueError("not UTF-8") from None
    except RecursionError:
        raise ValueError("nested too deep") from None
    except ValueError:
        raise ValueError(str(error)) from None


def _whole(text: str) -> str:
    """Return `text` without halves of surrogate pairs: two that meet are joined, one alone is replaced."""
    if text.isascii():
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
