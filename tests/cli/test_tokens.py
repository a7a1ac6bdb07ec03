"""`localllm tokens`: count, encode, decode; text as it is, stdin as bytes."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import localllm
from tests.cli.conftest import Result
from tests.fake_engine import BOS, EOS, N_VOCAB, SPECIALS, fake_tokenizer

Cli = Callable[..., Result]


class Opened:
    """Stands for a model whose vocabulary is loaded."""

    tokenizer = fake_tokenizer()
    closed = 0

    def close(self) -> None:
        Opened.closed += 1


@pytest.fixture
def vocabulary(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let `compose.open_tokenizer` give the tests' tokenizer; return the names it is asked for."""
    asked: list[str] = []

    def open_tokenizer(model: str) -> Opened:
        asked.append(model)
        return Opened()

    stand_in = types.SimpleNamespace(open_tokenizer=open_tokenizer)
    monkeypatch.setitem(sys.modules, "localllm.compose", stand_in)
    monkeypatch.setattr(localllm, "compose", stand_in, raising=False)
    return asked


def test_count_is_the_default(cli: Cli, vocabulary: list[str]) -> None:
    closed = Opened.closed
    assert cli("tokens", "m", "hello") == Result(0, "6\n", "")
    assert vocabulary == ["m"]
    assert Opened.closed == closed + 1


def test_text_comes_from_stdin_where_none_is_given(cli: Cli, vocabulary: list[str]) -> None:
    assert cli("tokens", "m", stdin="hello").out == "6\n"
    assert cli("tokens", "m", stdin="").out == "1\n"


def test_encode_prints_ids_on_one_line(cli: Cli, vocabulary: list[str]) -> None:
    assert cli("tokens", "m", "hi", "--encode").out == f"{BOS} 104 105\n"


def test_bos_is_added_once_and_specials_are_parsed(cli: Cli, vocabulary: list[str]) -> None:
    with_bos = cli("tokens", "m", SPECIALS[BOS] + "hi" + SPECIALS[EOS], "--encode").out
    assert with_bos == f"{BOS} 104 105 {EOS}\n"
    assert cli("tokens", "m", SPECIALS[BOS] + "hi").out == cli("tokens", "m", "hi").out


def test_decode_takes_ids_in_any_spelling(cli: Cli, vocabulary: list[str]) -> None:
    for spelling in ("104 105", "104,105", "[104, 105]\n"):
        assert cli("tokens", "m", spelling, "--decode").out == "hi"
    assert cli("tokens", "m", "--decode", stdin="104 105").out == "hi"


def test_decode_undoes_encode_byte_for_byte(cli: Cli, vocabulary: list[str]) -> None:
    text = "Größe 🦊\n\n  한\t"
    ids = cli("tokens", "m", "--encode", stdin=text).out
    assert cli("tokens", "m", "--decode", stdin=ids).out == SPECIALS[BOS] + text


def test_json_has_ids_and_pieces(cli: Cli, vocabulary: list[str]) -> None:
    facts = cli("tokens", "m", "hé", "--encode", "--json").json()
    assert facts == {
        "n_tokens": 4,
        "ids": [BOS, 104, 0xC3, 0xA9],
        "pieces": [SPECIALS[BOS], "h", "\\xc3", "\\xa9"],
    }
    assert cli("tokens", "m", "104", "--decode", "--json").json() == {"n_tokens": 1, "ids": [104], "text": "h"}


@pytest.mark.parametrize(
    ("argv", "stdin", "said"),
    [
        (["--decode", "104 x"], None, "'x' is not a token id"),
        (["--decode", str(N_VOCAB)], None, f"{N_VOCAB} is not a token id of this model"),
        (["--decode", "9" * 30], None, "is not a token id"),
        (["--encode", "--decode", "1"], None, "exclude each other"),
        ([], b"caf\xe9", "not UTF-8"),
        ([], b"a\0b", "binary"),
        ([], None, "There is no text"),
        (["caf\udce9"], None, "not UTF-8"),
    ],
)
def test_refusals(cli: Cli, vocabulary: list[str], argv: list[str], stdin: bytes | None, said: str) -> None:
    result = cli("tokens", "m", *argv, stdin=stdin)
    assert (result.code, result.out) == (2, "")
    assert said in result.err


def test_interrupt_within_native_code_ends_it(cli: Cli, vocabulary: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def load(model: str) -> Any:
        done = threading.Event()

        def called_back() -> None:  # as llama.cpp calls back to log; an exception raised there would be lost
            os.kill(os.getpid(), signal.SIGINT)
            done.wait(0.2)

        ctypes.CFUNCTYPE(None)(called_back)()
        return opened_before(model)

    stand_in: Any = sys.modules["localllm.compose"]
    opened_before = stand_in.open_tokenizer
    monkeypatch.setattr(stand_in, "open_tokenizer", load)
    result = cli("tokens", "m", "hello")
    assert (result.code, result.out, result.err) == (130, "", "")


def test_vocabulary_without_weights_is_enough(cli: Cli, shared: Path) -> None:
    path = str(shared / "models" / "vocab" / "ggml-vocab-llama-spm.gguf")
    ids = cli("tokens", path, "Hello world", "--encode")
    assert ids == Result(0, "1 15043 3186\n", "")
    assert cli("tokens", path, "<s>Hello world", "--encode").out == ids.out
    assert cli("tokens", path, "--decode", stdin="15043 3186").out == " Hello world"


def test_file_that_is_no_model_ends_with_3(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"no")
    result = cli("tokens", str(tmp_path / "x.gguf"), "hi")
    assert result.code == 3


@pytest.mark.real
def test_default_model_has_no_bos_of_its_own(cli: Cli, smollm2: Path) -> None:
    assert cli("tokens", str(smollm2), "<|im_start|>user", "--encode").out.split()[0] == "1"
    assert cli("tokens", str(smollm2), "Hello").out == "1\n"
