"""Text deltas never cut a character and join to the whole text (B01)."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from localllm.runtime.detokenizer import Detokenizer
from tests.runtime.sampling_helpers import Letters

TEXT = "Fox 🦊 family 👩‍💻 한국어 𝕏 é ñ ∑"


class Pieces(Letters):
    """A vocabulary whose token i is the i-th of the given pieces."""

    def __init__(self, pieces: list[bytes]) -> None:
        super().__init__(len(pieces))
        self._pieces = pieces

    def piece(self, token: int) -> bytes:
        return self._pieces[token]


def deltas(pieces: list[bytes]) -> list[str]:
    detokenizer = Detokenizer(Pieces(pieces))
    return [detokenizer.push(token) for token in range(len(pieces))]


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    ends = sorted({min(cut, len(data)) for cut in cuts} | {len(data)})
    return [data[a:b] for a, b in zip([0, *ends], ends, strict=False)]


def test_single_bytes_give_whole_characters_only() -> None:
    assert deltas([b"\xf0", b"\x9f", b"\xa6", b"\x8a"]) == ["", "", "", "🦊"]
    assert deltas([bytes([byte]) for byte in TEXT.encode()]).count("") > 10
    assert "".join(deltas([bytes([byte]) for byte in TEXT.encode()])) == TEXT


def test_a_character_cut_by_the_end_is_dropped() -> None:
    assert deltas([b"ok ", b"\xf0\x9f", b"\xa6"]) == ["ok ", "", ""]


def test_bytes_that_the_model_got_wrong_become_replacement_characters() -> None:
    assert "".join(deltas([b"a\xf0\x9f", b"b\xff", b"c"])) == "a�b�c"


def test_empty_pieces_give_no_text() -> None:
    assert deltas([b"", b"\xc3", b"", b"\xa9"]) == ["", "", "", "é"]


def test_the_first_space_of_an_answer_is_kept() -> None:
    assert deltas([b" Hello", b" world"]) == [" Hello", " world"]


@given(text=st.text(), cuts=st.lists(st.integers(0, 60), max_size=12))
@settings(max_examples=200, deadline=None)
def test_every_split_of_a_text_gives_the_text_and_no_replacement(text: str, cuts: list[int]) -> None:
    parts = deltas(split(text.encode(), cuts))
    assert "".join(parts) == text
    assert sum(part.count("�") for part in parts) == text.count("�")


@given(data=st.binary(max_size=40), cuts=st.lists(st.integers(0, 40), max_size=12))
@settings(max_examples=300, deadline=None)
def test_every_split_of_any_bytes_gives_what_one_piece_gives(data: bytes, cuts: list[int]) -> None:
    assert "".join(deltas(split(data, cuts))) == "".join(deltas([data]))
    assert data.decode(errors="replace").startswith("".join(deltas([data])))
