"""The tokenizer on real vocabularies: BOS, specials, mid-text pieces, odd input, many threads."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from localllm.backends.llamacpp.model import LlamaModel
from localllm.backends.llamacpp.settings import ModelSettings
from localllm.backends.llamacpp.tokenizer import LlamaTokenizer
from localllm.errors import EngineError, UsageError
from localllm.models.info import read_info

ODD_TEXTS = (
    "",
    " ",
    "a\0b",
    "\r\n\t",
    "wörld 🦊 日本",
    "\ufdd0x",
    "é" * 5000,
    "<|im_end|>",
    "</s><s>",
    " two  spaces ",
)


@pytest.fixture(scope="module", params=["ggml-vocab-llama-spm", "ggml-vocab-phi-3"])
def spm(shared: Path, request: pytest.FixtureRequest) -> Iterator[LlamaTokenizer]:
    """The vocabularies that put a space before a text."""
    yield from _opened(shared / "models" / "vocab" / f"{request.param}.gguf")


@pytest.fixture(scope="module")
def real(smollm2: Path) -> Iterator[LlamaTokenizer]:
    """SmolLM2's byte-level BPE."""
    yield from _opened(smollm2)


def _opened(path: Path) -> Iterator[LlamaTokenizer]:
    model = LlamaModel.load(read_info(path), ModelSettings(vocab_only=True))
    yield model.tokenizer
    model.close()


def test_bos_is_added_once_and_only_where_asked(spm: LlamaTokenizer) -> None:
    bos = spm.vocabulary.bos_id
    assert (bos, spm.vocabulary.add_bos) == (1, True)
    plain = spm.encode("Hello", parse_special=True)
    assert bos not in plain
    assert spm.encode("Hello", parse_special=True, add_bos=True) == [bos, *plain]
    assert spm.encode("<s>Hello", parse_special=True, add_bos=True).count(bos) == 1
    assert spm.encode("", parse_special=True, add_bos=True) == [bos]


@pytest.mark.parametrize("text", ["Hello", "  x", "é!", "▁a", "日本", "<s>y", "\ufdd0z"])
def test_text_in_mid_text_gets_no_space_before_it(spm: LlamaTokenizer, text: str) -> None:
    started = spm.encode(text, parse_special=False)
    continued = spm.encode(text, parse_special=False, continues=True)
    assert spm.decode(started) == " " + text.replace("▁", " ")
    assert spm.decode(continued) == text.replace("▁", " ")


def test_specials_become_one_id_only_when_parsed(spm: LlamaTokenizer) -> None:
    for spelling in ("<s>", "</s>"):
        assert spelling in spm.vocabulary.specials
        assert len(spm.encode(spelling, parse_special=True)) == 1
        assert len(spm.encode(spelling, parse_special=False)) > 1


@pytest.mark.parametrize("text", ODD_TEXTS)
def test_every_text_comes_back(spm: LlamaTokenizer, text: str) -> None:
    assert spm.decode(spm.encode(text, parse_special=False, continues=True)) == text


def test_pieces_outside_the_vocabulary_and_broken_text_are_refused(spm: LlamaTokenizer) -> None:
    for token in (-1, spm.vocabulary.n_vocab, 10**7):
        with pytest.raises(EngineError):
            spm.piece(token)
    with pytest.raises(UsageError, match="surrogate"):
        spm.encode("\ud800", parse_special=False)


def test_every_piece_is_read(spm: LlamaTokenizer) -> None:
    pieces = [spm.piece(token) for token in range(spm.vocabulary.n_vocab)]
    assert all(pieces)
    assert len(set(pieces)) > 0.9 * len(pieces)


def test_threads_agree(spm: LlamaTokenizer) -> None:
    texts = [f"text number {n} " * (n % 40 + 1) for n in range(200)]
    expected = [spm.encode(text, parse_special=True) for text in texts]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda text: spm.encode(text, parse_special=True), texts)) == expected


@pytest.mark.real
@pytest.mark.parametrize("text", ODD_TEXTS)
def test_byte_level_text_comes_back(real: LlamaTokenizer, text: str) -> None:
    assert real.decode(real.encode(text, parse_special=False)) == text


@pytest.mark.real
def test_no_bos_is_invented(real: LlamaTokenizer) -> None:
    assert len(real.encode("hi", parse_special=True, add_bos=True)) == 1


@pytest.mark.real
def test_ends_and_specials_match_the_whole_vocabulary(real: LlamaTokenizer) -> None:
    vocabulary = real.vocabulary
    assert {real.piece(token) for token in vocabulary.eog_ids} == {b"<|endoftext|>", b"<|im_end|>", b"<reponame>"}
    assert {"<|im_start|>", "<|im_end|>", "<|endoftext|>"} <= set(vocabulary.specials)
    assert len(vocabulary.specials) == 17
