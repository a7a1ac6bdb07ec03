"""Conversations to prompts: the model's chat template, rendered in a sandbox, the caller's words kept inert.

`render` gives text with cut marks inside every control spelling that the caller wrote; `encode`
turns it into tokens, cutting there. Jinja is imported and the template compiled at first render.
"""

from __future__ import annotations

import bisect
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from localllm.errors import TemplateError, UsageError
from localllm.models.template.messages import count_chars, prepare_messages, prepare_value
from localllm.models.template.meter import Limits, OverBudget
from localllm.models.template.neutralise import Spellings, mark, unused_mark
from localllm.models.template.text import Text, message_of
from localllm.models.tokenizer import Tokenizer

if TYPE_CHECKING:
    from jinja2.environment import Template

    from localllm.models.template.sandbox import Sandbox

MAX_SOURCE_BYTES = 256 * 1024
_MAX_WORDS = 500  # of a template's own words in an error
_RESERVED = frozenset({"messages", "tools", "add_generation_prompt", "bos_token", "eos_token"})
# Templates that test whether arguments are text write JSON text as it stands; the others want an object.
_TAKES_TEXT = re.compile(r"arguments['\"]?\]?\s+is\s+(not\s+)?string")
_WANTS_OBJECT = re.compile(r"arguments['\"]?\]?\s+is\s+(not\s+)?mapping")


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt as text.

    `mark` stands in `text` inside every control spelling that the caller wrote (`n_neutralised` of
    them) and nowhere else. `boundaries`: offsets into `text`, ascending, where a message (or the
    tool list) ends. `unseen`: messages with content of which the template wrote nothing.
    """

    text: str
    boundaries: tuple[int, ...]
    mark: str
    n_neutralised: int = 0
    unseen: tuple[int, ...] = ()

    @property
    def plain(self) -> str:
        """The prompt as the template wrote it, without marks."""
        return self.text.replace(self.mark, "")


@dataclass(frozen=True, slots=True)
class Encoded:
    """A prompt as tokens; `boundaries` are token positions, none inside a token."""

    tokens: list[int]
    boundaries: tuple[int, ...]


class ChatTemplate:
    """One model's chat template. Safe to call from any thread; renderings take turns."""

    def __init__(
        self, source: str, *, specials: Sequence[str], bos: str = "", eos: str = "", limits: Limits | None = None
    ) -> None:
        self._source, self._bos, self._eos, self._limits = source, bos, eos, limits or Limits()
        self._specials = specials
        self._lock = threading.Lock()
        self._compiled: tuple[Sandbox, Template, Spellings] | None = None
        self._days_back = 0
        self._arguments_as_text = bool(_TAKES_TEXT.search(source)) and not _WANTS_OBJECT.search(source)

    @property
    def takes_tools(self) -> bool:
        """Say whether tools that are given reach the prompt at all."""
        return "tools" in self._source

    @property
    def tells_date(self) -> bool:
        """Say whether what it writes may depend on the day."""
        return "strftime_now" in self._source

    def as_of(self, days_back: int) -> ChatTemplate:
        """Return this template as it was `days_back` days ago."""
        then = ChatTemplate(self._source, specials=self._specials, bos=self._bos, eos=self._eos, limits=self._limits)
        then._days_back = days_back
        return then

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = True,
        max_chars: int,
        **kwargs: Any,
    ) -> Rendered:
        """Render a conversation; `kwargs` reach the template as variables (`enable_thinking`, ...).

        Raises: TemplateError in the template's own words where it refuses the conversation; with line
        and message where it fails or spends more than a rendering may; naming the message where one
        is malformed. UsageError for a `kwargs` name that the model itself sets.
        """
        taken = _RESERVED & kwargs.keys()
        if taken:
            raise UsageError(
                f"The template argument {min(taken)!r} is set by the model itself.", field="chat_template_kwargs"
            )
        chat = prepare_messages(messages, arguments_as_text=self._arguments_as_text)
        if "developer" not in self._source:
            _call_developers_system(chat)
        variables = {
            **{name: prepare_value(value) for name, value in kwargs.items()},
            "messages": chat,
            "add_generation_prompt": add_generation_prompt,
            "bos_token": self._bos,
            "eos_token": self._eos,
        }
        if tools:
            variables["tools"] = prepare_value(list(tools))
        with self._lock:
            text, spellings = self._render(chat, variables, max_chars)
        return _rendered(text, spellings, chat)

    def _render(self, chat: list[dict[str, Any]], variables: dict[str, Any], max_chars: int) -> tuple[str, Spellings]:
        """Return the text and the spellings to look for in it. Called under the lock."""
        if self._compiled is None:
            self._compiled = self._compile()
        sandbox, template, spellings = self._compiled
        sandbox.begin({id(message): index for index, message in enumerate(chat)}, count_chars([*variables.values()]))
        try:
            return sandbox.render(template, variables, max_chars), spellings
        except Exception as error:
            raise _explained(error, template, sandbox.message) from error

    def _compile(self) -> tuple[Sandbox, Template, Spellings]:
        from jinja2.environment import Template
        from jinja2.exceptions import TemplateSyntaxError

        from localllm.models.template.sandbox import Sandbox

        n_bytes = len(self._source.encode("utf-8", "surrogatepass"))
        if n_bytes > MAX_SOURCE_BYTES:
            raise _unusable(f"it has {n_bytes} bytes; at most {MAX_SOURCE_BYTES} are read")
        sandbox = Sandbox(self._limits, self._days_back)
        try:
            code = sandbox.compile(self._source)
            template = Template.from_code(sandbox, code, sandbox.make_globals(None))
        except TemplateSyntaxError as error:
            raise _unusable(f"line {error.lineno}: {error.message}") from error
        except RecursionError:
            raise _unusable("it is nested too deeply") from None
        except Exception as error:
            raise _unusable(str(error) or type(error).__name__) from error
        return sandbox, template, Spellings(self._specials)


def encode(tokenizer: Tokenizer, rendered: Rendered) -> Encoded:
    """Tokenise a rendered prompt: specials that the template wrote are parsed, the caller's never formed.

    BOS is added only where the vocabulary asks for it and the template did not write it.
    """
    vocabulary = tokenizer.vocabulary
    tokens: list[int] = []
    positions: list[int] = []
    waiting = list(rendered.boundaries)
    at = 0
    for index, piece in enumerate(rendered.text.split(rendered.mark)):
        ids = tokenizer.encode(piece, parse_special=True, continues=index > 0)
        bos = vocabulary.bos_id
        if index == 0 and vocabulary.add_bos and bos is not None and ids[:1] != [bos]:
            tokens.append(bos)
        end = at + len(piece)
        inside = [boundary - at for boundary in waiting if boundary <= end]
        positions += [len(tokens) + n for n in _token_positions(tokenizer, piece, ids, inside)]
        waiting = waiting[len(inside) :]
        tokens += ids
        at = end + len(rendered.mark)
    return Encoded(tokens, tuple(sorted({position for position in positions if position})))


def missing(name: str) -> TemplateError:
    """Return the refusal of a chat with a model that has no chat template."""
    return TemplateError(
        f"{name} has no chat template, so it cannot chat.",
        "give a template with --template FILE, or plain text with localllm run --raw",
    )


def _token_positions(tokenizer: Tokenizer, text: str, ids: list[int], offsets: list[int]) -> list[int]:
    """Return how many of `ids` lie wholly before each offset (ascending) of `text`, as far as that can be told."""
    positions: list[int] = []
    data, at, n_done = text.encode("utf-8", "surrogatepass"), 0, 0
    for offset in offsets:
        target = len(text[:offset].encode("utf-8", "surrogatepass"))
        while n_done < len(ids):
            after = _after_piece(data, at, tokenizer.piece(ids[n_done]))
            if after is None:
                return positions
            if after > target:
                break
            at, n_done = after, n_done + 1
        positions.append(n_done)
    return positions


def _after_piece(data: bytes, at: int, piece: bytes) -> int | None:
    """Return where `piece` ends in `data`; a vocabulary may add a space before it or swallow spaces."""
    if data.startswith(piece, at):
        return at + len(piece)
    if piece[:1] == b" " and data.startswith(piece[1:], at):
        return at + len(piece) - 1
    skipped = at + len(data[at:]) - len(data[at:].lstrip())
    return skipped + len(piece) if skipped > at and data.startswith(piece, skipped) else None


def _call_developers_system(chat: list[dict[str, Any]]) -> None:
    """Give a developer's messages the role that they have to a template which does not tell the two apart."""
    for message in chat:
        if message["role"] == "developer":
            message["role"] = "system"


def _rendered(text: str, spellings: Spellings, chat: list[dict[str, Any]]) -> Rendered:
    cuts = spellings.cuts(text)
    character = unused_mark(text)
    spans = text.spans if isinstance(text, Text) else ()
    seen = {message_of(origin) for _, _, origin in spans if origin >= 0}
    return Rendered(
        text=mark(text, cuts, character),
        boundaries=tuple(end + bisect.bisect_left(cuts, end) for end in _boundaries(text, spellings)),
        mark=character,
        n_neutralised=len(cuts),
        unseen=tuple(i for i, message in enumerate(chat) if message["content"].strip() and i not in seen),
    )


def _boundaries(text: str, spellings: Spellings) -> list[int]:
    """Return where each message's part ends: after the end of turn and the white space that follow its words.

    There is none between messages whose words do not stand in their order (hoisted, reversed, repeated).
    """
    spans = text.spans if isinstance(text, Text) else ()
    plain = str.__str__(text)
    owners = [message_of(origin) for _, _, origin in spans]
    before = list(accumulate((-1 if owner is None else owner for owner in owners), max))
    behind = list(accumulate((len(plain) if owner is None else owner for owner in reversed(owners)), min))[::-1]
    gaps = [
        (spans[at - 1][1], spans[at][0])
        for at in range(1, len(spans))
        if before[at - 1] < behind[at] and owners[at] is not None
    ]
    if spans:
        gaps.append((spans[-1][1], len(plain)))
    ends: set[int] = set()
    for start, stop in gaps:
        end = spellings.first_end(plain, start, stop)
        end = start if end is None or end > stop else end
        ends.add(end + len(plain[end:stop]) - len(plain[end:stop].lstrip()))
    return sorted(ends)


def _explained(error: Exception, template: Template, message: int | None) -> TemplateError:
    """Turn whatever a rendering raised into a refusal that says what, where and about which message."""
    from localllm.models.template.names import RaisedByTemplate

    line = _line(error, template)
    place = f" (line {line}" + (f", message {message})" if message is not None else ")") if line else ""
    details = {"line": line, "message_index": message}
    words = (str(error) or type(error).__name__)[:_MAX_WORDS]
    if isinstance(error, RaisedByTemplate):
        return TemplateError(
            f"The chat template refuses this conversation: {words}{place}",
            "change the conversation, or give another template with --template FILE",
            **details,
        )
    if isinstance(error, OverBudget):
        return TemplateError(f"The chat template was stopped: {words}{place}", _HINT, **details)
    return TemplateError(f"The chat template failed: {words}{place}", _HINT, **details)


def _line(error: Exception, template: Template) -> int | None:
    line, trace = None, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<template>":
            line = template.get_corresponding_lineno(trace.tb_lineno)
        trace = trace.tb_next
    return line


_HINT = "give another template with --template FILE, or plain text with --raw"


def _unusable(why: str) -> TemplateError:
    return TemplateError(f"The chat template is unusable: {why[:_MAX_WORDS]}", _HINT)
