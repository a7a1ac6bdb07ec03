"""One `bench serve`: reaches or starts the server, measures the runs, reports them whatever ends it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from localllm.bench.client.calibrate import Overhead, calibrate
from localllm.bench.client.calls import End
from localllm.bench.machine import fingerprint
from localllm.bench.serving.address import is_url
from localllm.bench.serving.endpoint import Endpoint
from localllm.bench.serving.failures import failure_of
from localllm.bench.serving.model_file import known_info
from localllm.bench.serving.preliminary import examine
from localllm.bench.serving.result import RunResult
from localllm.bench.serving.runner import Runner
from localllm.bench.serving.series import knees, run_series
from localllm.bench.serving.servers.given import GivenServer
from localllm.bench.serving.servers.running import Running
from localllm.bench.serving.servers.started import own_server
from localllm.bench.serving.spec import Api, RunSpec
from localllm.cli.api_key import read_api_key
from localllm.cli.bench.destination import Destination
from localllm.cli.bench.options import ReportForm
from localllm.cli.bench.progress import Shown
from localllm.cli.bench.remembering import keep_in_history
from localllm.cli.bench.wishes import Wish
from localllm.cli.failures import AfterOutput
from localllm.cli.options import TalkFlags
from localllm.cli.output import Answer, Notes
from localllm.cli.signals import Interrupts, Stopped, in_thread
from localllm.errors import LocalLLMError, ServerUnreachable

MOST_CPU_MS = 0.25
"""Of the client a token: above it, the client is part of what it measures."""


@dataclass(slots=True)
class Found:
    """What is known so far. `ended`: what ended the measuring early."""

    results: list[RunResult] = field(default_factory=list)
    fingerprint: dict[str, Any] = field(default_factory=dict)
    overhead: Overhead | None = None
    notes: list[str] = field(default_factory=list)
    ended: Exception | Stopped | None = None

    @property
    def is_partial(self) -> bool:
        """Whether something that was asked for is missing."""
        return self.ended is not None or any(result.partial for result in self.results)


def measure(target: str, api: Api, wish: Wish, talk: TalkFlags) -> Found:
    """Measure the server at `target`, or ours started for the model of that name, which is gone afterwards.

    Raises what keeps it from being measured at all; what ends it early stands in `Found.ended`.
    """
    notes, found = Notes(quiet=talk.quiet, verbose=talk.verbose), Found()
    key = read_api_key(None, notes)
    with Interrupts(outlives_answers=True) as interrupts, Shown(quiet=talk.quiet) as shown:
        with _running(target, shown) as running:
            model = None if is_url(target) else target
            runner = Runner(
                running,
                api,
                key=None if key is None else key.decode("ascii"),
                info_of=partial(known_info, named=model),
                on_progress=shown,
            )
            for cache in wish.caches:
                runner.check(cache)
            spec = _look(runner, model, found, wish.spec, shown)
            filled = "as long as they are asked for" if spec.fills_length else "as long as the model makes them"
            notes.explain(f"measuring {runner.endpoint.model} at {running.url}; answers are {filled}")
            with interrupts.cancelling() as cancel_by:
                cancel_by(runner.stop)
                try:
                    in_thread(lambda: run_series(runner.run, spec, wish.caches, wish.loads, found.results.append))
                except Exception as error:
                    if not found.results and interrupts.stopped is None:
                        raise
                    found.ended = error
            found.ended = interrupts.stopped or found.ended
            interrupts.rearm(None)  # what there is is kept: the next Ctrl-C is another matter
    fingerprint.end(found.fingerprint)
    found.results[:1] = [replace(first, notes=(*first.notes, *found.notes)) for first in found.results[:1]]
    return found


@contextmanager
def _running(target: str, shown: Shown) -> Iterator[Running]:
    if is_url(target):
        yield GivenServer(target)
        return
    shown(f"starting localllm serve {target}", 0, 0)
    with own_server(target) as running:
        yield running


def _look(runner: Runner, model: str | None, found: Found, spec: RunSpec, shown: Shown) -> RunSpec:
    """Find out what is measured, on what, and at what cost of our own; return the runs' common part."""
    shown("looking at the server", 0, 0)
    endpoint = runner.endpoint
    names = endpoint.facts["models"]
    if len(names) > 1 and model is None:
        found.notes.append(f"of {len(names)} models of the server this is {endpoint.model}")
    before = examine(endpoint)
    found.notes += before.notes
    shown("looking at the machine", 0, 0)
    found.fingerprint = _fingerprint(endpoint, model)
    shown("measuring the client itself", 0, 0)
    try:
        found.overhead = calibrate()
    except LocalLLMError as error:
        found.notes.append(f"the client's own overhead was not measured: {error.message}")
    if found.overhead is not None and found.overhead.cpu_ms_per_token > MOST_CPU_MS:
        cost_ms = found.overhead.cpu_ms_per_token
        found.notes.append(
            f"the client takes {cost_ms:.2f} ms of CPU a token here: it may be what limits these figures"
        )
    return replace(spec, fills_length=before.fills_length)


def _fingerprint(endpoint: Endpoint, model: str | None) -> dict[str, Any]:
    found = fingerprint.begin(known_info(endpoint, model))
    found["server"] = dict(endpoint.facts)
    found["model"] = found["model"] or {"name": endpoint.model}
    return found


def report(found: Found, form: ReportForm, destination: Destination | None, notes: Notes) -> None:
    """Write what was found to stdout and the file, and remember it. Raises what ended it early, after its output."""
    from localllm.bench.reports.document import serve_document
    from localllm.bench.reports.render import render
    from localllm.bench.reports.text import WIDTH

    document = serve_document(
        found.results,
        fingerprint=found.fingerprint,
        calibration=found.overhead,
        knee=next(iter(knees(found.results)), None),
        partial=found.is_partial,
    )
    unwritten: LocalLLMError | None = None
    if destination is not None:
        try:
            destination.write(render(document, destination.form))
        except LocalLLMError as error:  # what was measured is still told
            unwritten = error
    if found.is_partial:
        notes.say("ended early: this is what was measured until then")
    else:
        keep_in_history(document, None if unwritten or destination is None else destination.path, notes)
    for result in found.results:
        if result.unsupported:
            notes.say(f"note: {result.spec.workload.spec} is not supported: {result.unsupported}")
    answer = Answer()
    answer.write(render(document, form, answer.width(WIDTH)))
    failure = found.ended or unwritten or _failure(found.results)
    if failure is not None:
        raise AfterOutput(failure)


def _failure(results: Sequence[RunResult]) -> LocalLLMError | None:
    """Return what the exit code tells of results that nothing ended from outside: a dead server, no answer at all."""
    for result in results:
        if result.partial:
            return ServerUnreachable(f"{result.notes[-1].capitalize()}.", "look at the server's log")
    outcomes = [sample.outcome for result in results for sample in result.samples]
    if outcomes and all(outcome.end is not End.ANSWER for outcome in outcomes):
        return LocalLLMError(
            f"Every request failed; the first: {failure_of(outcomes[0])}.", "look at the server's log, or try --api"
        )
    return None
