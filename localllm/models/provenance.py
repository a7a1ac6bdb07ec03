"""Where a stored model came from, kept beside its files."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from localllm.models.disk import record

FILE_NAME = "provenance.json"
KIND = "provenance"
VERSION = 1
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class StoredFile:
    """One file of a model as it was checked."""

    name: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Provenance:
    """The facts of one pull. `pulled_at` in UTC, ISO 8601; `source` can be given to `pull` again."""

    name: str
    source: str
    revision: str | None
    license: str | None
    quant: str | None
    quantiser: str | None
    imatrix: str | None
    pulled_at: str
    files: tuple[StoredFile, ...]

    @property
    def sha256(self) -> str:
        """The model's identity: the hash of its file, or of the list of hashes of a split set."""
        if len(self.files) == 1:
            return self.files[0].sha256
        lines = "".join(f"{one.sha256}  {one.name}\n" for one in self.files)
        return hashlib.sha256(lines.encode()).hexdigest()

    @property
    def size_bytes(self) -> int:
        """Bytes of all files."""
        return sum(one.size_bytes for one in self.files)


def now() -> str:
    """Return the present as provenance writes it."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def save(folder: Path, facts: Provenance) -> None:
    """Write the facts into `folder`, whole or not at all. Raises OSError."""
    record.save(folder / FILE_NAME, KIND, VERSION, asdict(facts))


def load(folder: Path) -> Provenance | None:
    """Return the facts in `folder`; None where there are none that can be trusted (a bad file is set aside)."""
    path = folder / FILE_NAME
    payload = record.load(path, KIND, VERSION)
    if payload is None:
        return None
    try:
        return _decode(payload)
    except (KeyError, TypeError, ValueError) as error:
        record.discard(path, f"field {error}")
        return None


def _decode(payload: Mapping[str, Any]) -> Provenance:
    files = tuple(_decode_file(one) for one in payload["files"])
    if not files:
        raise ValueError("files")
    return Provenance(
        name=_text(payload["name"]),
        source=_text(payload["source"]),
        revision=_text_or_none(payload["revision"]),
        license=_text_or_none(payload["license"]),
        quant=_text_or_none(payload["quant"]),
        quantiser=_text_or_none(payload["quantiser"]),
        imatrix=_text_or_none(payload["imatrix"]),
        pulled_at=_text(payload["pulled_at"]),
        files=files,
    )


def _decode_file(one: Mapping[str, Any]) -> StoredFile:
    name, size, sha256 = _text(one["name"]), one["size_bytes"], _text(one["sha256"])
    if "/" in name or "\0" in name or name.startswith(".") or type(size) is not int or size < 0:
        raise ValueError("files")
    if not _SHA256.fullmatch(sha256):
        raise ValueError("sha256")
    return StoredFile(name, size, sha256)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError("not a text")
    return value


def _text_or_none(value: object) -> str | None:
    return None if value is None else _text(value)
