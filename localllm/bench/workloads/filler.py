"""Replaces texts by filler of the same length and shape, so that a recording holds none of what was written.

What filler still shows, on purpose: lengths, where words, digits and lines end, upper and lower case,
punctuation, and which words of one recording are the same. The last keeps equal prefixes equal, which
is what a prefix cache lives on; it also means that filler is no encryption.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import unicodedata
from typing import Any, Final

from localllm.bench.workloads.filler_words import words_by_length

MAX_DEPTH: Final = 64
_MAX_KNOWN_RUNS: Final = 200_000
_NAME_TRIES: Final = 64
_PIECE: Final = 8
_SHOWN: Final = 4
"""So many letters in a row are never left as they were."""

# Written by chat templates, not by people: without them a rendered prompt would be another kind of text.
_MARKUP: Final = (
    r"<\|(?:im_start|im_end|im_sep|endoftext|begin_of_text|start_header_id|end_header_id|eot_id|eom_id|"
    r"fim_prefix|fim_middle|fim_suffix|fim_pad|file_sep|repo_name|system|user|assistant|end|start|message|"
    r"channel|return)\|>|</?(?:think|tool_call|tool_response|start_of_turn|end_of_turn|bos|eos|s)>|"
    r"<fim_(?:prefix|middle|suffix|pad)>|\[/?INST\]"
)
# Letters of scripts that put spaces between words are filled a run at a time; the others one by one,
# so that a text without spaces keeps its prefixes too.
_RUNS: Final = re.compile(
    _MARKUP + "|(?P<word>[A-Za-z\u00aa-\u0dff]+)|(?P<digits>[0-9]+)|(?P<wide>[\u0e00-\U0010ffff])"
)
_JSON_TOKENS: Final = re.compile(
    r'(?P<string>"(?:[^"\\]|\\.)*")(?P<colon>\s*:)?|(?P<number>-?[0-9][0-9.eE+-]*)', re.DOTALL
)

_LATIN: Final = "abcdefghijklmnopqrstuvwxyz"
_CLASSES: Final = (  # last code point -> what stands for the letters up to there; all of one length in UTF-8
    (0x7F, _LATIN),
    (0x24F, "àáâäçèéêëíîïñóôöúûü"),
    (0x3FF, "αβγδεζηθικλμνξοπρστυφχψω"),
    (0x58F, "абвгдежзиклмнопрстуфхцчшщыэюя"),
    (0x5FF, "אבגדהוזחטיכלמנסעפצקרשת"),
    (0x7FF, "ابتثجحخدذرزسشصضطظعغفقكلمنهوي"),
    (0xDFF, "कखगघचछजझटठडढतथदधनपफबभमयरलवसह"),
    (0x0E7F, "กขคงจฉชซฐณดตถทธนบปผพฟภมยรลวสห"),
    (0x303F, "☐☑☒★☆♠♣♥♦"),
    (0x309F, "あいうえおかきくけこさしすせそたちつてとなにぬねのはひふへほ"),
    (0x30FF, "アイウエオカキクケコサシスセソタチツテトナニヌネノハヒフヘホ"),
    (0x33FF, "☐☑☒★☆♠♣♥♦"),
    (0x9FFF, "山川日月木水火土金人口大小中上下左右天地花鳥風雨雪石田林車門馬魚"),
    (0xABFF, "☐☑☒★☆♠♣♥♦"),
    (0xD7FF, "가나다라마바사아자차카타파하고노도로모보소오조초코토포호"),
    (0xFFFF, "☐☑☒★☆♠♣♥♦"),
    (0x10FFFF, "🌱🌲🌳🌴🌵🌷🌸🌹🌻🍀"),
)
_JOINERS: Final = "\u200d\ufe0f"
_LAST_SIGN: Final = 0x25FF


class Filler:
    """The filler of one recording, from a key of its own. Mutates: what it remembers; one thread at a time.

    `key`: random where it is left out, and kept nowhere.
    """

    def __init__(self, key: bytes | None = None) -> None:
        self._key = key or secrets.token_bytes(32)
        self._runs: dict[str, str] = {}
        self._names: dict[str, str] = {}
        self._taken: set[str] = set()

    def text(self, text: str) -> str:
        """Return filler for a text: as many characters, the same words where the words are the same."""
        return _RUNS.sub(self._known, text)

    def name(self, name: str) -> str:
        """Return filler for what others refer to: never the same for two names."""
        known = self._names.get(name)
        if known is not None:
            return known
        filled = name
        for attempt in range(_NAME_TRIES):
            filled = _RUNS.sub(lambda run: self._run(run, attempt), name)  # noqa: B023
            if filled not in self._taken:
                break
        else:
            filled = f"{filled}{len(self._names)}"
        self._names[name] = filled
        self._taken.add(filled)
        return filled

    def number(self, number: int | float) -> int | float:
        """Return a number written with other digits, as many; the sign and the exponent stay."""
        mantissa, e, exponent = repr(number).partition("e")
        if not mantissa.lstrip("-")[:1].isdigit():  # inf and nan
            return 0
        whole, point, fraction = mantissa.partition(".")
        filled = whole if whole.lstrip("-") == "0" else self._digits(whole)
        text = filled + point + self._digits(fraction) + e + exponent
        return float(text) if isinstance(number, float) else int(text)

    def value(self, value: Any, depth: int = 0) -> Any:
        """Return JSON in which every text, name and number is filler. What is nested too deeply becomes null."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, bool) or value is None or depth > MAX_DEPTH:
            return value if isinstance(value, bool) else None
        if isinstance(value, (int, float)):
            return self.number(value)
        if isinstance(value, list):
            return [self.value(one, depth + 1) for one in value]
        if isinstance(value, dict):
            return {self.name(str(key)): self.value(one, depth + 1) for key, one in value.items()}
        return None

    def text_or_json(self, text: str) -> str:
        """Return filler for a text; one that is a JSON object or list stays one, written with the same spaces."""
        if text.lstrip()[:1] in ("{", "[") and _is_json(text):
            return _JSON_TOKENS.sub(self._json_token, text)
        return self.text(text)

    def _json_token(self, token: re.Match[str]) -> str:
        if token["number"] is not None:
            return json.dumps(self.number(json.loads(token["number"])))
        was = token["string"]
        text = json.loads(was, strict=False)
        filled = self.text(text) if token["colon"] is None else self.name(text)
        return json.dumps(filled, ensure_ascii=was.isascii()) + (token["colon"] or "")

    def _known(self, run: re.Match[str]) -> str:
        """Return filler for a run, remembered, since texts repeat their words."""
        found = self._runs.get(run[0])
        if found is None:
            if len(self._runs) >= _MAX_KNOWN_RUNS:
                self._runs.clear()
            found = self._runs[run[0]] = self._run(run, 0)
        return found

    def _run(self, run: re.Match[str], attempt: int) -> str:
        if run["word"] is not None:
            return self._word(run[0], attempt)
        if run["digits"] is not None:
            return "".join(chr(48 + byte % 10) for byte in self._stream(run[0], attempt, len(run[0])))
        return self._wide(run[0], attempt) if run["wide"] is not None else run[0]

    def _word(self, word: str, attempt: int) -> str:
        """Return other letters for a run of them; drawn again until no four in a row are what they were."""
        lower = word.lower()
        while True:
            stream = self._stream(lower, attempt, len(word) + 2)
            letters = _words(len(word), stream) if word.isascii() else ""
            filled = "".join(_stand_in(was, letters[i] if letters else None, stream[i]) for i, was in enumerate(word))
            if not _shows(word, filled):
                return filled
            attempt += _NAME_TRIES

    def _wide(self, was: str, attempt: int) -> str:
        while True:
            filled = _stand_in(was, None, self._stream(was, attempt, 1)[0])
            if filled != was or _is_kept(was):
                return filled
            attempt += _NAME_TRIES

    def _digits(self, digits: str) -> str:
        """Return other digits, the first of them no zero; a sign in front stays."""
        sign, digits = ("-", digits[1:]) if digits.startswith("-") else ("", digits)
        stream = self._stream(digits, 0, len(digits))
        return sign + "".join(str(byte % 10 if i else 1 + byte % 9) for i, byte in enumerate(stream))

    def _stream(self, text: str, attempt: int, n_bytes: int) -> bytes:
        source = self._key + attempt.to_bytes(8, "big") + text.encode("utf-8", "surrogatepass")
        return hashlib.shake_256(source).digest(n_bytes)


def _words(length: int, stream: bytes) -> str:
    """Return lower case words put together to `length` letters."""
    words, parts, at = words_by_length(), [], 0
    longest = max(words)
    while length:
        size = length if length <= longest else _PIECE
        draw = int.from_bytes(stream[at : at + 3], "big")
        parts.append(_LATIN[draw % 26] if size == 1 else words[size][draw % len(words[size])])
        length, at = length - size, at + size
    return "".join(parts)


def _stand_in(was: str, letter: str | None, byte: int) -> str:
    """Return what stands for one character: `letter`, else one of the same class; in the same case."""
    if letter is None:
        if _is_kept(was):
            return was
        letters = next(letters for last, letters in _CLASSES if ord(was) <= last)
        letter = letters[byte % len(letters)]
    return letter.upper() if was.isupper() else letter


def _is_kept(was: str) -> bool:
    """Whether a character that is not ASCII says nothing: punctuation, spaces, arrows and signs, what joins emoji."""
    kind = unicodedata.category(was)[0]
    return was in _JOINERS or (kind in "PZ" and ord(was) <= 0xFFFF) or (kind == "S" and ord(was) <= _LAST_SIGN)


def _shows(word: str, filled: str) -> bool:
    """Whether filler repeats letters of the word it stands for, or is a short word itself."""
    was, now = word.lower(), filled.lower()
    if len(word) < _SHOWN:
        return was == now and not all(map(_is_kept, word))
    parts = (now[i : i + _SHOWN] for i in range(len(now) - _SHOWN + 1))
    return any(part in was and not all(map(_is_kept, part)) for part in parts)


def _is_json(text: str) -> bool:
    try:
        json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return False
    return True
