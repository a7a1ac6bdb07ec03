"""`localllm run`: one prompt, one answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from localllm.cli.opening import Opener
from localllm.cli.options import (
    CacheFlags,
    LoadFlags,
    ModelOrPrompt,
    NoServer,
    OutputFlags,
    PromptFlags,
    SamplingFlags,
    TalkFlags,
)
from localllm.cli.output import Answer, Notes
from localllm.errors import LocalLLMError, StoppedByLength, UsageError

if TYPE_CHECKING:
    from localllm.cli.prompt_input import Question
    from localllm.cli.render import Outcome
    from localllm.cli.signals import Interrupts
    from localllm.runtime.types import GenerationOptions, Request

MaybePrompt: TypeAlias = Annotated[
    str | None,
    typer.Argument(metavar="[PROMPT]", help="What to ask; then come the files of -f, then what is piped in."),
]


def run(
    model: ModelOrPrompt = None,
    prompt: MaybePrompt = None,
    *,
    asking: PromptFlags,
    sampling: SamplingFlags,
    load: LoadFlags,
    cache: CacheFlags,
    output: OutputFlags,
    talk: TalkFlags,
    no_server: NoServer = False,
) -> None:
    """Answer one prompt on stdout.

    The prompt is the argument, then the files of -f, then piped text, joined by blank lines.
    """
    from localllm.cli.keeping import has_blocks, own_options, tell_once, tier_config
    from localllm.cli.prompt_input import read_question
    from localllm.cli.signals import Interrupts
    from localllm.cli.wishes import generation_options, load_config

    out, notes = Answer(), Notes(quiet=talk.quiet, verbose=talk.verbose)
    check_output(output)
    _check_raw(asking)
    with Interrupts(checked_timeout(output.timeout)) as interrupts:
        config = load_config(load, asking.template, deterministic=cache.deterministic)
        options = generation_options(sampling, own_options(cache))
        arguments = [argument for argument in (model, prompt) if argument is not None]
        question = read_question(arguments, asking.file or (), raw=asking.raw, quiet=talk.quiet)
        request = build_request(question.prompt, asking, options)
        tiers = tier_config(cache)
        tell = notes.always if output.stats else notes.explain
        opener = Opener(notes, tell=tell, in_process=no_server, tiers=tiers)
        with opener.open(name_model(question, notes), config, request) as service:
            from localllm.cli.answering import Answering
            from localllm.cli.render import document

            answering = Answering(service, output, out, notes=notes, interrupts=interrupts)
            outcome = answering.stream(request, sampling.max_tokens)
            if output.json and outcome.error is None:
                out.document(document(outcome, service.model))
            finish(outcome, output, notes, interrupts)
        if not talk.quiet and has_blocks(tiers):
            tell_once(tiers, notes.say)


def build_request(prompt: str, asking: PromptFlags, options: GenerationOptions) -> Request:
    """Return the request: one user turn after the system message, or the text as it is under --raw."""
    from localllm.runtime.types import ChatRequest, CompletionRequest

    if asking.raw:
        return CompletionRequest(prompt, options)
    from localllm.cli.prompt_input import argument_text

    system = (
        [{"role": "system", "content": argument_text(asking.system, "The system message")}] if asking.system else []
    )
    return ChatRequest((*system, {"role": "user", "content": prompt}), options)


def name_model(question: Question, notes: Notes) -> str:
    """Return the model to load; tell which one where none was named, and what else would fit here."""
    if question.model is not None:
        return question.model
    from localllm.models import catalog
    from localllm.models.available import total_bytes

    notes.say(f"no model named: this is {catalog.DEFAULT_ALIAS}")
    better = [entry.alias for entry in catalog.best_for(total_bytes()) if entry.alias != catalog.DEFAULT_ALIAS]
    if better:
        notes.say(f"this machine could also use {', '.join(better)} (localllm pull {better[0]})")
    return catalog.DEFAULT_ALIAS


def check_output(output: OutputFlags) -> None:
    """Refuse two forms of output at once."""
    if output.json and output.jsonl:
        raise UsageError("--json and --jsonl exclude each other.", "--json for one document, --jsonl for the events")
    if output.jsonl and output.extract:
        raise UsageError("--jsonl gives every event; --extract has nothing to select there.", "use --json -x")


def checked_timeout(timeout_s: float | None) -> float | None:
    """Return the time limit. Raises UsageError unless it is a number of seconds above 0."""
    if timeout_s is not None and not 0 < timeout_s < 1e8:
        raise UsageError(f"--timeout takes a number of seconds above 0, not {timeout_s:g}.", "--timeout 60")
    return timeout_s


def finish(outcome: Outcome, output: OutputFlags, notes: Notes, interrupts: Interrupts) -> None:
    """Tell what remains to be told of an answer that was written; raise where that is a failure.

    Raises: AfterOutput; the error that ended the answer, where nothing on stdout told it yet.
    """
    from localllm.cli.failures import AfterOutput
    from localllm.cli.render import stats_line
    from localllm.runtime.stream import rebuild

    if output.stats:
        notes.always(stats_line(outcome))
    if outcome.error is not None:
        error = rebuild(outcome.error)
        raise AfterOutput(error) if output.jsonl else error
    if interrupts.stopped is not None:
        raise AfterOutput(interrupts.stopped)
    if not outcome.found:
        raise AfterOutput(LocalLLMError("The answer holds no fenced code block.", "leave -x out to see the answer"))
    if outcome.finish_reason == "length":
        limit = f"the answer was ended by its limit of {outcome.max_tokens} tokens"
        if output.strict_length:
            raise AfterOutput(StoppedByLength(f"{limit.capitalize()}.", "-n sets a higher one"))
        notes.say(f"note: {limit} (-n)")


def _check_raw(asking: PromptFlags) -> None:
    if asking.raw and asking.system:
        raise UsageError("--raw sends the prompt as it is; --system has no place in it.", "write it into the prompt")
    if asking.raw and asking.template:
        raise UsageError("--raw uses no template; --template would be ignored.", "leave one of them out")
