"""`localllm chat`: a conversation, turn by turn, on one loaded model."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

from localllm.cli.opening import Opener
from localllm.cli.options import (
    CacheFlags,
    LoadFlags,
    ModelOrDefault,
    NoServer,
    OutputFlags,
    PromptFlags,
    SamplingFlags,
    TalkFlags,
)
from localllm.cli.output import Answer, Notes, OutputClosed
from localllm.cli.run import check_output, checked_timeout, name_model
from localllm.errors import LocalLLMError, UsageError

if TYPE_CHECKING:
    from localllm.cli.chat_input import Lines
    from localllm.cli.chat_session import Session


def chat(
    model: ModelOrDefault = None,
    *,
    asking: PromptFlags,
    sampling: SamplingFlags,
    load: LoadFlags,
    cache: CacheFlags,
    output: OutputFlags,
    talk: TalkFlags,
    no_server: NoServer = False,
) -> None:
    """Talk with a model; /help lists the commands.

    Piped text is a script: each line, or block between two times three quotes, is a turn or a
    command, and the first failure ends it. --timeout holds for the load and for each answer.
    """
    from localllm.cli.chat_input import open_lines
    from localllm.cli.chat_session import Session
    from localllm.cli.conversation import Conversation
    from localllm.cli.keeping import has_blocks, own_options, tell_once, tier_config
    from localllm.cli.prompt_input import Question, argument_text
    from localllm.cli.signals import Interrupts
    from localllm.cli.wishes import generation_options, load_config
    from localllm.models.chat_template import missing

    out, notes = Answer(), Notes(quiet=talk.quiet, verbose=talk.verbose)
    _check_flags(asking, output)
    own = own_options(cache)
    generation_options(sampling, own)
    with Interrupts(checked_timeout(output.timeout), outlives_answers=True) as interrupts:
        attached = _attached(asking)
        config, lines = load_config(load, asking.template, deterministic=cache.deterministic), open_lines()
        tiers = tier_config(cache)
        tell = notes.always if output.stats else notes.explain
        opener = Opener(notes, tell=tell, in_process=no_server, tiers=tiers)
        with opener.open(name_model(Question(model, ""), notes), config, None) as service:
            if not service.can_chat:
                raise missing(service.model.name)
            interrupts.rearm(None)
            conversation = Conversation(asking.system and argument_text(asking.system, "The system message"))
            session = Session(
                service,
                output,
                sampling,
                conversation,
                out=out,
                notes=notes,
                interrupts=interrupts,
                own=own,
            )
            if lines.is_script:
                _follow_script(session, lines, attached)
            else:
                notes.say(f"{service.model.name}, context of {service.model.n_ctx} tokens; /help, Ctrl-D leaves")
                _talk(session, lines, attached)
        if not talk.quiet and has_blocks(tiers):
            tell_once(tiers, notes.say)


def _follow_script(session: Session, lines: Lines, attached: str) -> None:
    """Take every message of a pipe; the first failure ends it."""
    from localllm.cli.chat_input import read_message

    while True:
        try:
            text = read_message(lines)
        except EOFError:
            return
        attached = _take(session, text, attached)


def _talk(session: Session, lines: Lines, attached: str) -> None:
    """Take messages until Ctrl-D, or Ctrl-C twice; failures are told and the talk goes on."""
    from localllm.cli.chat_input import read_message
    from localllm.cli.failures import AfterOutput, Manner, tell
    from localllm.cli.signals import Stopped

    was_stopped = False
    while session.service.is_alive:
        try:
            attached = _take(session, read_message(lines), attached)
            was_stopped = False
        except EOFError:
            return
        except KeyboardInterrupt as interrupt:
            stop = interrupt if isinstance(interrupt, Stopped) else Stopped(signal.SIGINT)
            if was_stopped or stop.number != signal.SIGINT:
                raise stop from None
            was_stopped = True
            session.rearm()
            session.notes.say("\nCtrl-C again, or Ctrl-D, leaves")
        except AfterOutput as after:
            if not _may_go_on(after.cause):
                raise
            was_stopped = isinstance(after.cause, Stopped) and after.cause.number == signal.SIGINT
            tell(after.cause, Manner(verb="chat"))
        except OutputClosed:
            raise
        except Exception as error:  # whatever it is: the conversation is not lost for it
            tell(error, Manner(verb="chat"))
    raise LocalLLMError("The model's engine has stopped.", "start the chat again; /save keeps a conversation")


def _may_go_on(cause: BaseException) -> bool:
    """Say whether a talk goes on after an answer that ended so."""
    from localllm.cli.signals import Stopped
    from localllm.errors import StoppedByLength

    if isinstance(cause, Stopped):
        return cause.number not in (signal.SIGTERM, signal.SIGHUP)
    return not isinstance(cause, StoppedByLength)


def _take(session: Session, text: str, attached: str) -> str:
    """Do a command or answer a question; return what is still to be attached to the first question."""
    from localllm.cli.chat_commands import is_command, run_command

    if not text.strip():
        return attached
    if is_command(text):
        run_command(session, text)
        return attached
    session.ask("\n\n".join(part for part in (text.strip(), attached) if part))
    return ""


def _attached(asking: PromptFlags) -> str:
    """Return the text of the -f files, for the first question."""
    from localllm.cli.prompt_input import read_files

    return "\n\n".join(text.strip("\r\n") for text in read_files(asking.file or ()))


def _check_flags(asking: PromptFlags, output: OutputFlags) -> None:
    from localllm.cli.prompt_input import STDIN

    check_output(output)
    if asking.raw:
        raise UsageError(
            "A chat needs the chat template; --raw has no place in it.", "localllm run --raw 'Once upon a time'"
        )
    if output.json:
        raise UsageError("A chat is not one document; --json has no place in it.", "localllm chat --jsonl")
    if STDIN in (asking.file or ()):
        raise UsageError("In a chat stdin holds the turns; -f - has no place in it.", "name a file after -f")
