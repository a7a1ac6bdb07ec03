"""From events to text, and the first fenced block of it."""

from __future__ import annotations

import io
import json
import os
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localllm.cli.failures import Manner, tell
from localllm.cli.fences import FenceExtractor
from localllm.cli.output import Answer, Notes
from localllm.cli.render import Outcome, TextEncoder, stats_line
from localllm.errors import UsageError
from localllm.runtime import events


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        """Say yes."""
        return True


def _extract(text: str, cuts: list[int] | None = None) -> tuple[str, bool, bool]:
    extractor, out, begin = FenceExtractor(), "", 0
    for cut in sorted(cuts or []):
        out += extractor.push(text[begin:cut])
        begin = max(begin, cut)
    out += extractor.push(text[begin:]) + extractor.flush()
    return out, extractor.found, extractor.closed


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        ("a\n```\nx\n```\nb", "x\n"),
        ("```py\nx\n\ny\n```", "x\n\ny\n"),
        ("~~~\n```\n~~~\n", "```\n"),
        ("````\n```\n````\n", "```\n"),
        ("```\nx\n`````\n", "x\n"),
        ("  ```\n  x\n   y\n  ```\n", "x\n y\n"),
        ("```\nx ``` y\n```", "x ``` y\n"),
        ("```\nopen to the end", "open to the end"),
        ("```\r\nx\r\n```\r\n", "x\r\n"),
        ("``` `no` fence\n```\nx\n```\n", "x\n"),
        ("```\nfirst\n```\n```\nsecond\n```\n", "first\n"),
        ("```\n```\n", ""),
    ],
)
def test_first_block_is_taken_out(text: str, inside: str) -> None:
    found = _extract(text)
    assert found[:2] == (inside, True)


@pytest.mark.parametrize("text", ["", "no block", "    ```\nx\n", "``\nx\n``\n", "inline ```x``` here"])
def test_text_without_a_block_gives_nothing(text: str) -> None:
    assert _extract(text) == ("", False, False)


@given(text=st.text(alphabet="`~ x\n", max_size=40), cuts=st.lists(st.integers(0, 40), max_size=8))
def test_pieces_make_no_difference(text: str, cuts: list[int]) -> None:
    assert _extract(text, cuts) == _extract(text)


def test_code_is_given_out_before_its_line_ends() -> None:
    extractor = FenceExtractor()
    extractor.push("```\n")
    assert extractor.push("pri") == "pri"
    assert extractor.push("nt") == "nt"
    assert extractor.push("\n``") == "\n"


def test_terminal_gets_no_control_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", Terminal())
    Answer().write("a\x1b[31mred\x07\n\tb\x9b")
    assert sys.stdout.getvalue() == "a\ufffd[31mred\ufffd\n\tb\ufffd"  # type: ignore[attr-defined]


def test_pipe_gets_the_exact_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    Answer().write("a\x1b[31m\r\n")
    assert sys.stdout.getvalue() == "a\x1b[31m\r\n"  # type: ignore[attr-defined]


def test_characters_that_stdout_cannot_encode_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="latin-1"))
    Answer().write("é€")
    assert raw.getvalue() == b"\xe9?"


def test_document_is_valid_json_whatever_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    for stream in (io.StringIO(), Terminal()):
        monkeypatch.setattr(sys, "stdout", stream)
        Answer().document({"text": "\x1b \ud800 é"})
        assert json.loads(stream.getvalue()) == {"text": "\x1b \ud800 é"}


def test_progress_is_for_terminals_only(monkeypatch: pytest.MonkeyPatch) -> None:
    for stream, shown in ((io.StringIO(), ""), (Terminal(), "\r\x1b[Khalf\r\x1b[K")):
        monkeypatch.setattr(sys, "stderr", stream)
        notes = Notes()
        notes.progress("half")
        notes.clear()
        assert stream.getvalue() == shown


def test_quiet_keeps_only_what_was_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    notes = Notes(quiet=True, verbose=True)
    notes.say("a")
    notes.explain("b")
    notes.always("c")
    assert capsys.readouterr().err == "c\n"


def test_sentences_cannot_steer_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    Notes().say("a \x1b[31mred\u202e name\nand a second line")
    tell(UsageError("no \x1b]0;title\x07", "localllm run 'x\x9b'"), Manner())
    err = capsys.readouterr().err
    assert all(c.isprintable() or c == "\n" for c in err)
    assert err.count("\n") == 4
    assert "red" in err


def test_lost_stderr_is_no_failure(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    Notes().say("nobody hears this")
    assert capsys.readouterr().out == ""


def test_stats_do_not_divide_by_what_did_not_happen() -> None:
    outcome = Outcome("id")
    assert "no statistics" in stats_line(outcome)
    outcome.event(events.Usage(5, 1, {"device": 5}, timings_ms={"prefill": 0.0, "decode": 0.0}), "")
    assert "5 cached" in stats_line(outcome)
    assert "tok/s" not in stats_line(outcome)


def test_text_encoder_ends_the_line_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    encoder = TextEncoder(Answer(), may_be_nothing=False)
    encoder.event(events.Token(0, "a\n", (1,)), "a\n")
    encoder.end("")
    assert sys.stdout.getvalue() == "a\n"  # type: ignore[attr-defined]


def test_progress_is_cut_to_the_line_that_can_be_taken_away(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(os, "get_terminal_size", lambda descriptor: os.terminal_size((30, 24)))
    monkeypatch.setattr(stream, "fileno", lambda: 2)
    Notes().progress("loading /a/folder/with/a/long/name/model.gguf")
    assert stream.getvalue() == "\r\x1b[Kloading /a/folder/with/a/long"
