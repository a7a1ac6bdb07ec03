"""Reads a contract: bytes to TOML to tables to terms, every mistake a sentence with its place."""

from __future__ import annotations

import difflib
import hashlib
import re
import tomllib
from pathlib import Path
from typing import Any

import msgspec

from localllm.bench.contract.check import checked
from localllm.bench.contract.places import Place, Places
from localllm.bench.contract.tables import TABLES, VERSION, ContractTable
from localllm.bench.contract.terms import Contract
from localllm.errors import LocalLLMError, UsageError

MAX_BYTES = 1 << 20
_AT = re.compile(r"(.*?)(?: - at `\$?\.?([a-z_]*)(?:\[(\d+)\])?(?:\.([A-Za-z_]+))?[^`]*`)?", re.DOTALL)
_FIELD = re.compile(r"Object (contains unknown|missing required) field `(.*)`", re.DOTALL)
_TYPES = {
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "array": "a list",
    "object": "a table",
    "bool": "true or false",
    "null": "nothing",
    "datetime": "a date",
    "date": "a date",
    "time": "a time",
}


def read_bytes(path: Path) -> bytes:
    """Return the file's bytes, one more than a contract may have at the most. Raises UsageError."""
    try:
        with path.open("rb") as stream:
            return stream.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise UsageError(f"There is no contract {path}.", f"localllm bench init > {path.name}") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"Cannot read the contract {path}: {_why(error)}.", "localllm bench run FILE") from None


def parse_contract(data: bytes, *, source: str, folder: Path) -> Contract:
    """Return the contract that `data` holds; `source` names it in what is said. Raises UsageError."""
    if len(data) > MAX_BYTES:
        raise UsageError(f"{source} is too long for a contract.", "localllm bench init prints one to change")
    try:
        text = data.decode("utf-8")
        document = tomllib.loads(text)
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise UsageError(f"{source}, line {line}: not UTF-8 text.", "save it as UTF-8") from None
    except RecursionError:
        raise UsageError(f"{source}: its lists are nested too deeply.", "localllm bench init shows the form") from None
    except ValueError as error:
        raise UsageError(f"{source} is no TOML: {_plain(str(error))}.", "localllm bench init shows the form") from None
    places = Places(source, text)
    _check_version(document, places.of())
    try:
        table = msgspec.convert(document, ContractTable)
    except msgspec.ValidationError as error:
        raise _of_shape(str(error), places) from None
    except (RecursionError, OverflowError, UnicodeError):
        raise places.of().mistake("a value in it is not of the form of a contract.") from None
    return checked(table, places, document, hashlib.sha256(data).hexdigest(), folder)


def _check_version(document: dict[str, Any], place: Place) -> None:
    """Refuse what a later program wrote before any of its keys looks unknown."""
    version = document.get("version")
    if "version" not in document:
        raise place.mistake("version is missing.", hint=f"version = {VERSION}")
    if version != VERSION or isinstance(version, bool):
        raise place.mistake(f"this program reads version {VERSION} of contracts.", "version", f"version = {VERSION}")


def _of_shape(message: str, places: Places) -> LocalLLMError:
    """Return what msgspec refuses as a mistake at its place, with the closest key where one is unknown."""
    found = _AT.fullmatch(message)
    assert found is not None
    what, table, index, key = found[1], found[2] or "", int(found[3] or 0), found[4] or ""
    if table not in TABLES or (found[3] is None and table not in ("", "run")):
        table, key = "", table
    place = places.of(table, index)
    field = _FIELD.fullmatch(what)
    if field is None:
        return place.mistake(f"{key or table or 'it'} takes {_asked(what)}.", key)
    if field[1].startswith("missing"):
        return place.mistake(f"{field[2]} is missing.")
    known = TABLES[table].__struct_fields__
    close = difflib.get_close_matches(field[2], known, 1)
    meant = f"; did you mean {close[0]}?" if close else f"; there are {', '.join(known)}."
    return place.mistake(f"there is no key {_plain(field[2])!r}{meant}", field[2])


def _asked(what: str) -> str:
    """Return "Expected `int` >= 1, got `str`" in words."""
    plain = re.sub(r"`([^`]*)`", lambda found: " or ".join(_TYPES.get(t, t) for t in found[1].split(" | ")), what)
    plain = plain.removeprefix("Expected ").replace(" of length >= 1", ", not an empty one")
    return _plain(plain.replace(", got ", ", not ").replace(">=", "of at least").replace("<=", "of at most"))


def _plain(text: str) -> str:
    return "".join(character if character.isprintable() else "?" for character in text)[:200].rstrip(".")


def _why(error: Exception) -> str:
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)
