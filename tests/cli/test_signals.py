"""The state machine of signals, and the moments between two of its states."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest

from localllm.cli import signals
from localllm.runtime.service import Service
from tests.cli.conftest import Opened, Result

Cli = Callable[..., Result]


def test_a_signal_before_there_is_something_to_cancel_cancels_it_then() -> None:
    cancelled: list[str] = []
    with signals.Interrupts() as interrupts, interrupts.cancelling() as cancel_by:
        os.kill(os.getpid(), signal.SIGINT)
        assert cancelled == []
        cancel_by(lambda: cancelled.append("now"))
        assert cancelled == ["now"]
        assert interrupts.stopped is not None


def test_a_signal_while_a_prompt_is_prepared_leaves_no_request_at_work(
    cli: Cli, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened.answer = lambda prompt: "word " * 400
    submit = Service.submit

    def interrupted(self: Service, *arguments: object) -> object:
        os.kill(os.getpid(), signal.SIGINT)
        return submit(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Service, "submit", interrupted)
    result = cli("run", "m", "hi", "--json")
    assert result.code == 130
    assert result.json()["finish_reason"] == "cancelled"
    assert result.json()["usage"]["completion_tokens"] < 400


def test_the_grace_after_sigterm_ends_with_its_own_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[int] = []
    monkeypatch.setattr(signals, "leave", left.append)
    with signals.Interrupts() as interrupts, interrupts.cancelling():
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGALRM)  # what the timer of the grace sends
    assert left == [143]
