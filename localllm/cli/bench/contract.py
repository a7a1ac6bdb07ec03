"""One `bench run`: reads the contract, measures it, and writes its report whatever ends it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from localllm.bench.contract.file import parse_contract
from localllm.bench.contract.models import find_models
from localllm.bench.contract.real_tools import RealTools
from localllm.bench.contract.run import ContractRun
from localllm.bench.contract.shipped import contract_bytes
from localllm.bench.measures import measure, text_of
from localllm.bench.reports.render import render
from localllm.cli.api_key import read_api_key
from localllm.cli.bench.destination import Destination
from localllm.cli.bench.progress import Shown
from localllm.cli.bench.remembering import keep_in_history
from localllm.cli.failures import AfterOutput
from localllm.cli.options import TalkFlags
from localllm.cli.output import Answer, Notes
from localllm.cli.signals import Interrupts, Stopped
from localllm.errors import LocalLLMError, RuleFailed

_ENDINGS = (".json", ".md", ".html")


class Files:
    """The three files of a result. Raises UsageError where they cannot be written."""

    def __init__(self, stem: Path) -> None:
        self._json, self._md, self._html = (Destination(stem.with_name(stem.name + ending)) for ending in _ENDINGS)

    @classmethod
    def beside(cls, output: Path | None, source: str) -> Files:
        """Return the files that -o names, with or without one of the endings; else named after the contract."""
        if output is None:
            return cls(Path(f"{Path(source).stem}-result"))
        return cls(output.with_suffix("") if output.suffix.lower() in _ENDINGS else output)

    def keep(self, document: Mapping[str, Any]) -> None:
        """Write the document as it is so far."""
        self._json.write(render(document, "json"))

    def write(self, document: Mapping[str, Any]) -> None:
        """Write the document and its reports."""
        self.keep(document)
        self._md.write(render(document, "md"))
        self._html.write(render(document, "html"))

    @property
    def json_path(self) -> Path:
        """Where the document stands."""
        return self._json.path

    def __str__(self) -> str:
        return f"{self._json.path}, {self._md.path.name}, {self._html.path.name}"


class _Told:
    """Tells a run's progress at the terminal and keeps its document."""

    def __init__(self, shown: Shown, notes: Notes, files: Files) -> None:
        self._shown = shown
        self._notes = notes
        self._files = files
        self._is_told = False

    def say(self, text: str) -> None:
        """Tell a sentence on stderr."""
        self._notes.say(f"note: {text}")

    def progress(self, what: str, done: int, total: int) -> None:
        """Show how far it is."""
        self._shown(what, done, total)

    def saved(self, document: dict[str, Any]) -> None:
        """Keep the document: what was measured outlives this process. A full disk ends nothing."""
        try:
            self._files.keep(document)
        except LocalLLMError as error:
            if not self._is_told:
                self.say(error.message)
            self._is_told = True


def measure_contract(name: str, output: Path | None, form: Literal["json", "md"], talk: TalkFlags) -> None:
    """Measure a contract and report it. Raises after the output: what ended it, a failure of all, or RuleFailed."""
    notes = Notes(quiet=talk.quiet, verbose=talk.verbose)
    data, source, folder = contract_bytes(name)
    contract = parse_contract(data, source=source, folder=folder)
    files = Files.beside(output, source)
    key = read_api_key(None, notes)
    tools = RealTools(contract, find_models(contract), None if key is None else key.decode("ascii"))
    stopped: Stopped | None = None
    with Interrupts(outlives_answers=True) as interrupts:
        with Shown(quiet=talk.quiet) as shown:
            run = ContractRun(contract, tools, _Told(shown, notes, files), interrupts.cancelling)
            try:
                run.run()
            except Stopped as stop:
                stopped = stop
            except KeyboardInterrupt:
                stopped = interrupts.stopped
        interrupts.rearm(None)  # what there is is kept: the next Ctrl-C is another matter
        document = run.document()
        unwritten = _written(files, document, notes)
    if stopped is None:
        keep_in_history(document, files.json_path, notes)
    else:
        notes.say("interrupted: this is what was measured until then")
    Answer().write(render(document, form))
    failure = stopped or unwritten or run.failure() or _broken(document)
    if failure is not None:
        raise AfterOutput(failure)


def _written(files: Files, document: Mapping[str, Any], notes: Notes) -> LocalLLMError | None:
    """Write the files; return why not: the result goes to stdout all the same."""
    try:
        files.write(document)
    except LocalLLMError as error:
        return error
    notes.say(f"written: {files}")
    return None


def _broken(document: Mapping[str, Any]) -> LocalLLMError | None:
    """Return the rules that do not hold as a failure."""
    failed = [rule for rule in document["rules"] if not rule["passed"]]
    if not failed:
        return None
    first = failed[0]
    found = first["why"] if first["value"] is None else f"it is {_value(first)}"
    of = f"{len(failed)} of {len(document['rules'])} rules do not hold"
    return RuleFailed(f"{of}; the first: {first['text']}: {found}.", "the report says what was measured")


def _value(rule: Mapping[str, Any]) -> str:
    return f"{rule['value']:.3g}" if rule["is_ratio"] else text_of(measure(rule["measure"]), rule["value"])
