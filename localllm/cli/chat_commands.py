"""The slash commands of a chat. They talk on stderr; stdout belongs to the answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localllm.errors import UsageError

if TYPE_CHECKING:
    from localllm.cli.chat_session import Session

HELP = """\
/system [TEXT]     show or set the system message ("" removes it)
/set [NAME VALUE]  show or set temperature, top_p, top_k, min_p, repeat_penalty,
                   max_tokens, seed, stop (VALUE default: the model's own)
/regen             answer the last question again
/undo              take the last turn back
/save FILE         write the conversation
/load FILE         go on with a saved one
/tokens            how much of the context is used
/stats             counts and speeds of the last answer
/clear             forget the conversation, keep the system message
/help              this list
Several lines: end a line with \\, or put them between \"\"\" and \"\"\".
A text that begins with / needs a space before it.
Ctrl-C stops an answer, a second one leaves; so does Ctrl-D."""


def is_command(text: str) -> bool:
    """Say whether a message is a command rather than a question."""
    return text.startswith("/")


def run_command(session: Session, text: str) -> None:
    """Do what a slash command says. Raises UsageError for an unknown one or a bad argument."""
    name, _, argument = text.partition(" ")
    argument = argument.strip()
    command = COMMANDS.get(name)
    if command is None and name in _LEAVING:
        raise UsageError(f"There is no command {name}.", "Ctrl-D leaves")
    if command is None:
        raise UsageError(f"There is no command {name}.", "/help lists them; begin a question with a space")
    if argument and name in _ALONE:
        raise UsageError(f"{name} takes nothing, not {argument[:40]!r}.", f"{name} alone")
    command(session, argument)


def _system(session: Session, text: str) -> None:
    if text:
        session.conversation.system = None if text in ('""', "''") else text
    session.notes.always(f"system: {session.conversation.system or '(none)'}")


def _set(session: Session, argument: str) -> None:
    if not argument:
        for field in fields(session.sampling):
            value = getattr(session.sampling, field.name)
            session.notes.always(f"{field.name} = {'default' if value is None else value}")
        return
    name, _, value = argument.partition(" ")
    name, value = name.replace("-", "_"), value.strip()
    if name not in _PARSERS:
        raise UsageError(
            f"{name!r} cannot be set in a chat.", f"/set takes {', '.join(_PARSERS)}; the rest: localllm chat --help"
        )
    if not value:
        raise UsageError(f"/set {name} needs a value.", f"/set {name} default goes back to the model's own")
    session.set(replace(session.sampling, **{name: _parse(name, value)}))


def _parse(name: str, text: str) -> Any:
    if text == "default":
        return None
    try:
        return _PARSERS[name](text)
    except ValueError:
        kind = "whole number" if _PARSERS[name] is int else "number"
        raise UsageError(f"{name} takes a {kind}, not {text!r}.", f"/set {name} default") from None


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError
    return number


def _one_text(text: str) -> list[str]:
    return [text]


def _regenerate(session: Session, argument: str) -> None:
    session.regenerate()


def _undo(session: Session, argument: str) -> None:
    session.conversation.undo()
    session.notes.say("the last turn is gone")


def _save(session: Session, argument: str) -> None:
    from localllm.cli import conversation

    path = _path(argument, "/save")
    conversation.save(session.conversation, path, session.service.model.name, session.service.model.sha256)
    session.notes.say(f"saved {len(session.conversation.turns)} turns to {path}")


def _load(session: Session, argument: str) -> None:
    from localllm.cli import conversation

    session.conversation = conversation.load(_path(argument, "/load"))
    session.notes.say(f"loaded {len(session.conversation.turns)} turns")


def _path(argument: str, command: str) -> Path:
    if not argument:
        raise UsageError(f"{command} needs the name of a file.", f"{command} talk.json")
    try:
        return Path(argument).expanduser()
    except RuntimeError:
        raise UsageError(f"{argument}: that home folder is not known.", f"{command} talk.json") from None


def _tokens(session: Session, argument: str) -> None:
    session.notes.always(f"{session.n_tokens()} of {session.service.model.n_ctx} tokens")


def _stats(session: Session, argument: str) -> None:
    session.notes.always(session.statistics())


def _clear(session: Session, argument: str) -> None:
    session.conversation.turns.clear()
    session.notes.say("the conversation is forgotten")


def _help(session: Session, argument: str) -> None:
    session.notes.always(HELP)


COMMANDS: Mapping[str, Callable[[Session, str], None]] = {
    "/system": _system,
    "/set": _set,
    "/regen": _regenerate,
    "/undo": _undo,
    "/save": _save,
    "/load": _load,
    "/tokens": _tokens,
    "/stats": _stats,
    "/clear": _clear,
    "/help": _help,
}

_LEAVING = frozenset(("/exit", "/quit", "/bye", "/q"))  # of other programs
_ALONE = frozenset(("/regen", "/undo", "/tokens", "/stats", "/clear", "/help"))

_PARSERS: Mapping[str, Callable[[str], Any]] = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "repeat_penalty": float,
    "max_tokens": _positive,
    "seed": int,
    "stop": _one_text,
}
