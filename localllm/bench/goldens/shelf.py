"""Where goldens are kept: one file a model, named by the hash of its bytes, in the user's data folder."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from localllm.errors import Unavailable
from localllm.models import hashes
from localllm.models.disk import files, record
from localllm.models.resolve import ModelFile
from localllm.models.store import Store

_KIND, _VERSION = "golden", 1


class Shelf:
    """The goldens of this user. Holds no state: every call reads the disk."""

    def __init__(self, store: Store | None = None) -> None:
        self.folder = (store or Store()).home / "goldens"

    def put(self, golden: Mapping[str, Any]) -> Path:
        """Keep a golden in place of an older one of the same bytes.

        Raises OSError; the older one is still there then.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self._path(golden["model"]["id"])
        record.save(path, _KIND, _VERSION, golden, mode=0o600)
        return path

    def get(self, model_id: str) -> dict[str, Any] | None:
        """Return the golden of these bytes; None where there is none that can be used.

        Raises Unavailable where a later version wrote it.
        """
        path = self._path(model_id)
        golden = record.load(path, _KIND, _VERSION)
        if golden is None and _is_newer(path):
            raise Unavailable(f"{path} was written by a newer localllm.", "pip install -U localllm")
        return golden

    def of(self, found: ModelFile, model_id: str) -> dict[str, Any] | None:
        """Return the golden to check a model against; `model_id`: the hash of its bytes now.

        That of its bytes; but that of its name where those of its bytes are another model's: other
        bytes went by this name when it was recorded.
        """
        exact, where = self.get(model_id), place(found)
        if exact is not None and all(exact["model"][key] == where[key] for key in where):
            return exact
        return self.newest_named(found) or exact

    def newest_named(self, found: ModelFile) -> dict[str, Any] | None:
        """Return the newest golden of a model of this name in this place, whatever its bytes were."""
        where = place(found)
        named = (golden for golden in self.all() if all(golden["model"][key] == where[key] for key in where))
        return max(named, key=lambda golden: str(golden["recorded_at"]), default=None)

    def all(self) -> Iterator[dict[str, Any]]:
        """Yield every golden that can be read."""
        for path in sorted(self.folder.glob("*.json")):
            golden = record.load(path, _KIND, _VERSION)
            if golden is not None:
                yield golden

    def _path(self, model_id: str) -> Path:
        return self.folder / f"{model_id}.json"


def _is_newer(path: Path) -> bool:
    try:
        record.decode(files.read_bounded(path, record.LIMIT_BYTES), _KIND, _VERSION)
    except record.Newer:
        return True
    except (OSError, ValueError, record.Damaged):
        return False
    return False


def model_id(found: ModelFile) -> str:
    """Return the hash of a model's bytes, that of the store: SHA-256, over those of its parts where it has several.

    Hashes the files, unless their hashes are remembered. Raises OSError.
    """
    parts = [(hashes.sha256_of(path), path.name) for path in found.files]
    if len(parts) == 1:
        return parts[0][0]
    lines = "".join(f"{digest}  {name}\n" for digest, name in parts)
    return hashlib.sha256(lines.encode()).hexdigest()


def place(found: ModelFile) -> dict[str, str]:
    """Return what stays when the bytes under a name change. The path of a file of one's own is not told, but hashed."""
    where = os.path.realpath(found.path) if found.source == "file" else ""
    return {"name": found.name, "source": found.source, "place": hashlib.sha256(where.encode()).hexdigest()[:16]}
