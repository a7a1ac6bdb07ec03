"""Text to ids and back through llama.cpp's vocabulary: bounded, and safe from any thread."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from localllm.backends.llamacpp import bindings
from localllm.errors import EngineError, ModelRefused, UsageError
from localllm.models.tokenizer import Vocabulary

if TYPE_CHECKING:
    from localllm.models.info import ModelInfo

MAX_TEXT_BYTES = 64 * 1024 * 1024
_PIECE_BYTES = 256
_SPECIAL = 1 | 8 | 16  # llama_token_attr: unknown, control, user-defined

# Spellings that llama.cpp takes for an end of generation even where the file calls them plain text.
_END_SPELLINGS = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>"),
    *("<turn|>", "<|endoftext|>", "<|end_of_text|>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<eos>"),
    *("</s>", "<end_of_utterance>", "<｜end▁of▁sentence｜>", "<|fim_pad|>", "<|file_sep|>"),
    *("<|repo_name|>", "<|endofprompt|>", "<|tool_response>", "<|observation|>"),
)
_BLANKS = " \t\r\n\u2581"  # runs of these are tokens of their own in some vocabularies, and control nothing
# A noncharacter: spelled by bytes that merge with nothing, so text after it is in mid-text.
_MARK = "\ufdd0"


class LlamaTokenizer:
    """The `Tokenizer` of a GGUF file. `close` waits for running calls, then refuses new ones."""

    vocabulary: Vocabulary

    def __init__(self, native: bindings.Native, vocab: int, info: ModelInfo) -> None:
        self._vocab = vocab
        self._gate = _Gate()
        self._pieces: dict[int, bytes] = {}
        c_int, c_char_p, c_void_p, c_bool = ctypes.c_int32, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_bool
        self._tokenize = native.function(
            "llama_tokenize", c_int, c_void_p, c_char_p, c_int, c_void_p, c_int, c_bool, c_bool
        )
        self._to_piece = native.quick_function(
            "llama_token_to_piece", c_int, c_void_p, c_int, c_char_p, c_int, c_int, c_bool
        )
        # A file without a vocabulary loads, but each of llama.cpp's text functions aborts on it.
        self._has_text = native.api.llama_vocab_type(vocab) != native.api.LLAMA_VOCAB_TYPE_NONE
        if not self._has_text:
            n_vocab = native.api.llama_vocab_n_tokens(vocab)
            self.vocabulary = Vocabulary(n_vocab, None, None, frozenset(), add_bos=False, specials=())
            return
        self.vocabulary = self._read_vocabulary(native, vocab, info.special_ids)
        self._mark_ids = self._encode(_MARK.encode(), False)
        self._adds_space = self.decode(self._mark_ids) == " " + _MARK

    def encode(self, text: str, *, parse_special: bool, add_bos: bool = False, continues: bool = False) -> list[int]:
        """Return the ids of `text`; special spellings become single ids only if `parse_special`.

        `add_bos` adds BOS only where the vocabulary asks for it and the text does not begin with it.
        `continues`: `text` goes on in mid-text, so an SPM vocabulary puts no space before it.
        Raises: UsageError for text that is no UTF-8 or beyond MAX_TEXT_BYTES; ModelRefused for a
        model without a vocabulary.
        """
        if not self._has_text:
            raise ModelRefused("This model has no vocabulary: it takes token ids only.")
        if not text:
            ids = []
        elif continues and self._adds_space:
            ids = self._encode_after_mark(text, parse_special)
        else:
            ids = self._encode(_to_bytes(text), parse_special)
        bos = self.vocabulary.bos_id
        if add_bos and self.vocabulary.add_bos and bos is not None and ids[:1] != [bos]:
            ids.insert(0, bos)
        return ids

    def piece(self, token: int) -> bytes:
        """Return the exact bytes of one token (control tokens included); b"" for an unused id.

        Raises: EngineError for an id outside the vocabulary.
        """
        known = self._pieces.get(token)
        if known is None:
            known = self._pieces[token] = self._read_piece(token)
        return known

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of `tokens`, specials spelled out; broken UTF-8 becomes U+FFFD."""
        return b"".join(map(self.piece, tokens)).decode("utf-8", "replace")

    def close(self) -> None:
        """Wait for calls in other threads and refuse later ones; idempotent."""
        self._gate.close()

    def _encode_after_mark(self, text: str, parse_special: bool) -> list[int]:
        ids = self._encode(_to_bytes(_MARK + text), parse_special)
        n_mark = len(self._mark_ids)
        if ids[:n_mark] != self._mark_ids:
            raise EngineError("This vocabulary merges a noncharacter with the text after it.")
        return ids[n_mark:]

    def _encode(self, data: bytes, parse_special: bool) -> list[int]:
        room = len(data) // 3 + 16
        with self._gate:
            for _ in range(2):
                ids = (ctypes.c_int32 * room)()
                n_ids = self._tokenize(self._vocab, data, len(data), ids, room, False, parse_special)
                if n_ids >= 0:
                    return ids[:n_ids]
                room = -n_ids  # a negative answer is the size it needs
        raise EngineError("The tokenizer gave no answer that fits its own size.")

    def _read_piece(self, token: int) -> bytes:
        if not 0 <= token < self.vocabulary.n_vocab:  # native.md N3: an abort
            raise EngineError(f"Token id {token} is outside the vocabulary of {self.vocabulary.n_vocab}.")
        if not self._has_text:
            return b""
        size = _PIECE_BYTES
        with self._gate:
            for _ in range(2):
                buffer = ctypes.create_string_buffer(size)
                n_bytes = self._to_piece(self._vocab, token, buffer, size, 0, True)
                if n_bytes >= 0:
                    return buffer.raw[:n_bytes]
                size = -n_bytes
        raise EngineError(f"Token {token} has no piece of a stable size.")

    def _read_vocabulary(self, native: bindings.Native, vocab: int, special_ids: Sequence[int]) -> Vocabulary:
        api = native.api
        n_vocab = api.llama_vocab_n_tokens(vocab)
        bos, eos = api.llama_vocab_bos(vocab), api.llama_vocab_eos(vocab)
        fim = (api.llama_vocab_fim_pre(vocab), api.llama_vocab_fim_suf(vocab), api.llama_vocab_fim_mid(vocab))
        # All ids only where the file types none: 150 000 calls take a tenth of a second.
        likely = {*(special_ids or range(n_vocab)), *fim, bos, eos, api.llama_vocab_eot(vocab)}
        for spelling in _END_SPELLINGS:
            ids = self._encode(spelling.encode(), parse_special=True)
            likely.update(ids if len(ids) == 1 else ())
        likely = {token for token in likely if 0 <= token < n_vocab}
        attribute = native.quick_function("llama_vocab_get_attr", ctypes.c_int, ctypes.c_void_p, ctypes.c_int32)
        special = sorted(token for token in likely if attribute(vocab, token) & _SPECIAL)
        texts = (api.llama_vocab_get_text(vocab, token).decode("utf-8", "replace") for token in special)
        return Vocabulary(
            n_vocab=n_vocab,
            bos_id=_or_none(bos),
            eos_id=_or_none(eos),
            eog_ids=frozenset(token for token in likely if api.llama_vocab_is_eog(vocab, token)),
            add_bos=bool(api.llama_vocab_get_add_bos(vocab)),
            specials=tuple(text for text in texts if text.strip(_BLANKS)),
            fim_ids=None if min(fim) < 0 else fim,
        )


class _Gate:
    """Counts the calls inside native code, so that nothing is freed under them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._n_inside = 0
        self._closed = False

    def __enter__(self) -> None:
        with self._changed:
            if self._closed:
                raise EngineError("The model is closed.")
            self._n_inside += 1

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with self._changed:
            self._n_inside -= 1
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: self._n_inside == 0)


def _to_bytes(text: str) -> bytes:
    try:
        data = text.encode()
    except UnicodeEncodeError:
        raise UsageError("The text holds a lone surrogate: it is not valid Unicode.") from None
    if len(data) > MAX_TEXT_BYTES:
        raise UsageError(f"The text has {len(data)} bytes; at most {MAX_TEXT_BYTES} are tokenised at once.")
    return data


def _or_none(token: int) -> int | None:
    return token if token >= 0 else None
