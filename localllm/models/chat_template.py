"""Conversations to prompts: the model's chat template, rendered in a sandbox, the caller's words kept inert.

`render` gives text with cut marks inside every control spelling that the caller wrote; `encode`
turns it into tokens, cutting there. Jinja is imported and the template compiled at first render.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from localllm.errors import TemplateError, UsageError
from localllm.models.template.encoding import Encoded, encode
from localllm.models.template.messages import count_chars, prepare_messages, prepare_value
from localllm.models.template.meter import Limits, OverBudget
from localllm.models.template.neutralise import Spellings
from localllm.models.template.rendered import Rendered, rendered

if TYPE_CHECKING:
    from jinja2.environment import Template

    from localllm.models.template.sandbox import Sandbox

__all__ = ["MAX_SOURCE_BYTES", "ChatTemplate", "Encoded", "Rendered", "encode", "missing"]

MAX_SOURCE_BYTES = 256 * 1024
_MAX_WORDS = 500  # of a template's own words in an error
_RESERVED = frozenset({"messages", "tools", "add_generation_prompt", "bos_token", "eos_token"})
# Templates that test whether arguments are text write JSON text as it stands; the others want an object.
_TAKES_TEXT = re.compile(r"arguments['\"]?\]?\s+is\s+(not\s+)?string")
_WANTS_OBJECT = re.compile(r"arguments['\"]?\]?\s+is\s+(not\s+)?mapping")


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


def missing(name: str) -> TemplateError:
    """Return the refusal of a chat with a model that has no chat template."""
    return TemplateError(
        f"{name} has no chat template, so it cannot chat.",
        "give it one with --template FILE, or send plain text (run --raw, or JSON with a prompt)",
    )


def _call_developers_system(chat: list[dict[str, Any]]) -> None:
    """Give a developer's messages the role that they have to a template which does not tell the two apart."""
    for message in chat:
        if message["role"] == "developer":
            message["role"] = "system"


def _rendered(text: str, spellings: Spellings, chat: list[dict[str, Any]]) -> Rendered:
    return rendered(
        text,
        spellings,
        with_content=[i for i, message in enumerate(chat) if message["content"].strip()],
        assistants={i for i, message in enumerate(chat) if message["role"] == "assistant"},
    )


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
