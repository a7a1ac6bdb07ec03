"""What a GGUF's file name says: its quantisation, its place in a split set, whether it is a side file."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass

_SPLIT = re.compile(r"^(?P<stem>.+)-(?P<part>\d{5})-of-(?P<total>\d{5})$")
_QUANT = re.compile(
    r"(?:^|[-._])((?:UD-)?(?:I?Q\d(?:_[0-9A-Z]+)*|TQ\d_\d|MXFP4(?:_MOE)?|NVFP4|BF16|F16|F32|FP16|FP32))(?=$|[-._])",
    re.IGNORECASE,
)
_SIDE_FILE = re.compile(r"(?:^|[-._/])(?:mmproj|imatrix)(?:$|[-._])", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class NamedSet:
    """The files of one model, in order, and those of its split set that are missing."""

    stem: str
    files: tuple[str, ...]
    missing: tuple[str, ...] = ()


def composed(text: str) -> str:
    """Return `text` in NFC, the spelling that all spellings of a name share."""
    return unicodedata.normalize("NFC", text)


def folded(text: str) -> str:
    """Return `text` composed and case folded, so that names compare as people read them."""
    return composed(text).casefold()


def is_model(name: str) -> bool:
    """Tell whether `name` (a file name or a path in a repository) is a GGUF with a language model's name."""
    return name.lower().endswith(".gguf") and not _SIDE_FILE.search(name[:-5])


def stem_of(name: str) -> str:
    """Return the path without `.gguf` and without the mark of its part."""
    stem = name[:-5] if name.lower().endswith(".gguf") else name
    split = _SPLIT.match(stem)
    return split["stem"] if split else stem


def quant_of(name: str) -> str | None:
    """Return the quantisation that the file name spells last, upper case; None where it spells none."""
    found = _QUANT.findall(stem_of(name).rsplit("/", 1)[-1])
    return found[-1].upper() if found else None


def group(names: Iterable[str]) -> list[NamedSet]:
    """Put the parts of split sets together, in order; side files and others than GGUF are left out."""
    plain: list[NamedSet] = []
    parts: dict[tuple[str, int], dict[int, str]] = {}
    for name in sorted(names):
        if not is_model(name):
            continue
        split = _SPLIT.match(name[:-5])
        if split is None or not 0 < int(split["part"]) <= int(split["total"]):
            plain.append(NamedSet(stem_of(name), (name,)))
        else:
            parts.setdefault((split["stem"], int(split["total"])), {})[int(split["part"])] = name
    for (stem, total), found in parts.items():
        there = tuple(found[part] for part in sorted(found))
        missing = tuple(f"{stem}-{n:05d}-of-{total:05d}.gguf" for n in range(1, total + 1) if n not in found)
        plain.append(NamedSet(stem, there, missing))
    return sorted(plain, key=lambda one: one.stem)


def choose_quant(sets: Iterable[NamedSet], quant: str) -> list[NamedSet]:
    """Return the sets whose name ends in exactly this quantisation; plain names before variants such as UD-."""
    wanted = quant.upper()
    exact = [one for one in sets if quant_of(one.stem) == wanted]
    if exact:
        return exact
    token = re.compile(rf"(?:^|[-._]){re.escape(quant)}(?=$|[-.])", re.IGNORECASE)
    return [one for one in sets if token.search(one.stem.rsplit("/", 1)[-1])]
