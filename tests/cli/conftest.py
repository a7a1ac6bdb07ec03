"""The command line run in this process over an engine without a model."""

from __future__ import annotations

import io
import json
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

import localllm
from localllm.cli import main
from localllm.cli.app import run_command
from localllm.runtime.engine import Batch, EngineSpec
from localllm.runtime.service import Service
from tests.fake_engine import ASSISTANT, EOS, SPEC, TEMPLATE, FakeEngine, fake_service, fake_tokenizer


@dataclass(frozen=True)
class Result:
    """How a command line ended."""

    code: int
    out: str
    err: str

    def json(self) -> Any:
        """Read stdout as one JSON document."""
        return json.loads(self.out)

    def jsonl(self) -> list[Any]:
        """Read stdout as JSON lines."""
        return [json.loads(line) for line in self.out.splitlines()]


@dataclass
class Opened:
    """What the command asked `compose.open` for, and what it is given."""

    answer: Callable[[str], str] = lambda prompt: "Hello there."
    on_forward: Callable[[Batch], None] | None = None
    on_open: Callable[[], None] = lambda: None
    fail_forwards: Sequence[int] = ()
    template: str | None = TEMPLATE
    spec: EngineSpec = SPEC
    calls: list[tuple[str, Any, Any]] = field(default_factory=list)
    services: list[Service] = field(default_factory=list)
    prompts: list[str] = field(default_factory=list)

    def open(self, model: str, config: Any = None, *, runtime: Any = None, sized_for: Any = None) -> Service:
        """Stand for `compose.open`."""
        self.calls.append((model, config, sized_for))
        self.on_open()
        engine = FakeEngine(self.spec, script=self._next, on_forward=self.on_forward, fail_forwards=self.fail_forwards)
        service = fake_service(engine, template=self.template)
        service.model = replace(service.model, info=types.SimpleNamespace(architecture="fake", quant="F32"))  # type: ignore[arg-type]
        self.services.append(service)
        return service

    def _next(self, tokens: Sequence[int]) -> int:
        if ASSISTANT not in tokens:
            return ord("x")
        start = len(tokens) - list(reversed(tokens)).index(ASSISTANT)
        prompt = fake_tokenizer().decode(list(tokens[:start]))
        if prompt not in self.prompts:
            self.prompts.append(prompt)
        said = self.answer(prompt).encode()
        place = len(tokens) - start
        return said[place] if place < len(said) else EOS


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Opened:
    """Let `compose.open` give a scripted model."""
    record = Opened()
    stand_in = types.SimpleNamespace(open=record.open)
    monkeypatch.setitem(sys.modules, "localllm.compose", stand_in)
    monkeypatch.setattr(localllm, "compose", stand_in, raising=False)
    return record


class Terminal(io.TextIOWrapper):
    """Stdin at a terminal where nobody types."""

    def isatty(self) -> bool:
        """Say yes."""
        return True


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Run a command line in this process; `stdin` None = a terminal."""

    def run(*argv: str, stdin: bytes | str | None = None) -> Result:
        data = stdin.encode() if isinstance(stdin, str) else stdin
        kind = Terminal if data is None else io.TextIOWrapper
        monkeypatch.setattr(sys, "stdin", kind(io.BytesIO(data or b""), encoding="utf-8"))
        capsys.readouterr()
        code = run_command(argv, main.VERBS, main.GROUPS)
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    return run
