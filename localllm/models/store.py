"""The models that `pull` fetched: one folder each, with its provenance; nothing in it can break a listing.

models/FOLDER/   the files of a model and provenance.json (written last, or renamed into place whole)
partial/FOLDER/  what an unfinished pull has so far · locks/  one flock a model · trash/  being deleted
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from localllm.errors import ModelNotFound, UsageError
from localllm.models import filenames, provenance
from localllm.models.disk import files, lock
from localllm.models.provenance import Provenance

_NAME = re.compile(r"[A-Za-z0-9._:/-]{1,200}")


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A model of the store. `path` is the file to load (the first of a split set).

    `problem` is empty, or says why it cannot be used; then `sha256` is None. Facts lost with a damaged
    provenance are None or empty.
    """

    name: str
    path: Path
    files: tuple[Path, ...]
    size_bytes: int
    sha256: str | None
    quant: str | None
    source: str
    revision: str | None
    license: str | None
    quantiser: str | None
    imatrix: str | None
    pulled_at: str
    folder: Path
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Unfinished:
    """A pull that was broken off and can be resumed."""

    folder: Path
    size_bytes: int


def default_home() -> Path:
    """Return LOCALLLM_HOME, else the user's data folder for localllm. Raises UsageError without a home."""
    text = os.environ.get("LOCALLLM_HOME", "")
    if not text:
        from platformdirs import user_data_path

        text = str(user_data_path("localllm"))
    expanded = os.path.expanduser(text)
    if expanded.startswith("~"):
        raise UsageError(
            "no home folder is known, so there is no place for models", "export LOCALLLM_HOME=/some/folder"
        )
    return Path(os.path.abspath(expanded))


def check_name(name: str) -> str:
    """Return `name` where it may name a stored model. Raises UsageError."""
    if not _NAME.fullmatch(name) or any(part in ("", ".", "..") for part in name.split("/")):
        raise UsageError(f"{name[:200]!r} cannot name a stored model", "localllm ls")
    return name


def folder_of(name: str) -> str:
    """Return the folder name of a model: readable, safe on every file system, its own for every name."""
    slug = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip(".-")[:100] or "model"
    return f"{slug}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


class Store:
    """The folder of pulled models. Holds no state: every call reads the disk."""

    def __init__(self, home: Path | None = None) -> None:
        self.home = default_home() if home is None else home
        self.models = self.home / "models"
        self.partial = self.home / "partial"
        self.cache = self.home / "cache"

    def list(self) -> list[StoredModel]:
        """Return every model, sound or not, by name. Never raises; damaged records are set aside once."""
        found = [_inspect(folder) for folder in _folders(self.models)]
        return sorted(found, key=lambda model: filenames.folded(model.name))

    def unfinished(self) -> tuple[Unfinished, ...]:
        """Return what broken-off pulls left to resume."""
        return tuple(Unfinished(folder, files.tree_bytes(folder)) for folder in _folders(self.partial))

    def get(self, name: str) -> StoredModel | None:
        """Return the model of exactly this name."""
        folder = self.models / folder_of(name)
        return _inspect(folder) if files.is_folder(folder) else None

    def holding(self, path: Path) -> StoredModel | None:
        """Return the sound model that is loaded from this file."""
        place = Path(os.path.realpath(path))
        if place.parent.parent != Path(os.path.realpath(self.models)):
            return None
        model = _inspect(place.parent)
        return model if not model.problem and os.path.realpath(model.path) == str(place) else None

    def find(self, text: str) -> StoredModel | None:
        """Return the model of this name, or the one whose name contains `text` (any case, any composition).

        Raises UsageError where several do, naming them.
        """
        return choose(self.list(), text)

    def remove(self, text: str) -> StoredModel | None:
        """Delete a model, and what an unfinished pull of it left; None where only the latter was there.

        Raises ModelNotFound, UsageError (ambiguous), lock.Busy (being pulled now), OSError.
        """
        model = self.find(text)
        name = model.folder.name if model else folder_of(text)
        rest = self.partial / name
        if model is None and not files.is_folder(rest):
            raise ModelNotFound(f"no stored model is called {text!r}", "localllm ls")
        with lock.hold(self._lock_path(name), on_wait=None):
            for folder in (rest, self.models / name):
                self._discard(folder)
        return model

    @contextlib.contextmanager
    def locked(self, name: str, on_wait: Callable[[lock.Owner], None]) -> Iterator[None]:
        """Be the only process that pulls or removes `name`. Raises OSError, and what `on_wait` raises."""
        with lock.hold(self._lock_path(folder_of(check_name(name))), on_wait=on_wait):
            yield

    def staging(self, name: str) -> Path:
        """Return the folder where `name` is put together, created. Raises OSError."""
        folder = self.partial / folder_of(name)
        if os.path.lexists(folder) and not files.is_folder(folder):
            self._discard(folder)
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def publish(self, staging: Path, facts: Provenance) -> StoredModel:
        """Make the checked files in `staging` the model `facts.name`; a reader sees the old, or the new, whole.

        Needs the lock. Files of an older pull are deleted last. Raises OSError.
        """
        target = self.models / folder_of(facts.name)
        target.parent.mkdir(parents=True, exist_ok=True)
        if os.path.lexists(target) and not files.is_folder(target):
            self._discard(target)
        if target.exists():
            _replace_in(target, staging, facts)
            self._discard(staging)
        else:
            keep = {one.name for one in facts.files}
            _delete_others(staging, keep)
            provenance.save(staging, facts)
            os.rename(staging, target)
            files.sync_folder(target.parent)
        return _inspect(target)

    def _lock_path(self, folder_name: str) -> Path:
        return self.home / "locks" / f"{folder_name}.lock"

    def _discard(self, path: Path) -> None:
        """Delete what is at `path`: renamed away first, so that nobody sees half of it."""
        if not os.path.lexists(path):
            return
        trash = self.home / "trash"
        trash.mkdir(parents=True, exist_ok=True)
        os.rename(path, trash / files.token())
        for left in list(trash.iterdir()):
            with contextlib.suppress(OSError):
                files.remove_tree(left)


def choose(models: list[StoredModel], text: str) -> StoredModel | None:
    """Return the model called `text`, else the only one whose name contains it. Raises UsageError if several."""
    wanted = filenames.folded(text)
    exact = [model for model in models if filenames.folded(model.name) == wanted or model.folder.name == text]
    partly = exact or [model for model in models if wanted and wanted in filenames.folded(model.name)]
    if len(partly) > 1:
        names = ", ".join(model.name for model in partly)
        raise UsageError(f"{text!r} fits {len(partly)} models: {names}", f"localllm show {partly[0].name}")
    return partly[0] if partly else None


def _folders(parent: Path) -> list[Path]:
    try:
        return sorted(path for path in parent.iterdir() if files.is_folder(path) and not path.name.startswith("."))
    except OSError:
        return []


def _inspect(folder: Path) -> StoredModel:
    facts = provenance.load(folder)
    if facts is None or folder_of(facts.name) != folder.name:
        return _without_facts(folder)
    paths = tuple(folder / one.name for one in facts.files)
    problem = next(filter(None, (_problem_of(folder / one.name, one.size_bytes) for one in facts.files)), "")
    return StoredModel(
        name=facts.name,
        path=paths[0],
        files=paths,
        size_bytes=facts.size_bytes,
        sha256=None if problem else facts.sha256,
        quant=facts.quant,
        source=facts.source,
        revision=facts.revision,
        license=facts.license,
        quantiser=facts.quantiser,
        imatrix=facts.imatrix,
        pulled_at=facts.pulled_at,
        folder=folder,
        problem=problem,
    )


def _problem_of(path: Path, size_bytes: int) -> str:
    if not files.is_regular(path):
        return f"{path.name} is missing or no file"
    if path.stat().st_size != size_bytes:
        return f"{path.name} has {path.stat().st_size} bytes, not the {size_bytes} that were pulled"
    return ""


def _without_facts(folder: Path) -> StoredModel:
    """Describe a folder whose provenance is lost: its model can still be used, its hash is not known."""
    try:
        names = [path.name for path in folder.iterdir() if files.is_regular(path)]
    except OSError:
        names = []
    sets = filenames.group(names)
    one = sets[0] if len(sets) == 1 and not sets[0].missing else None
    paths = tuple(folder / name for name in one.files) if one else ()
    size = sum(path.stat().st_size for path in paths)
    problem = "" if one else "its provenance is lost, and it does not hold exactly one model"
    quant = filenames.quant_of(one.stem) if one else None
    path = paths[0] if paths else folder
    return StoredModel(folder.name, path, paths, size, None, quant, "", None, None, None, None, "", folder, problem)


def _delete_others(folder: Path, keep: set[str]) -> None:
    for path in list(folder.iterdir()):
        if path.name not in keep:
            files.remove_tree(path)


def _replace_in(target: Path, staging: Path, facts: Provenance) -> None:
    """Move new files in beside the old ones, switch by the provenance, then delete what it no longer names."""
    renamed = []
    for one in facts.files:
        clash = os.path.lexists(target / one.name)
        name = f"{facts.sha256[:8]}-{one.name}" if clash else one.name
        os.replace(staging / one.name, target / name)
        renamed.append(provenance.StoredFile(name, one.size_bytes, one.sha256))
    files.sync_folder(target)
    provenance.save(target, replace(facts, files=tuple(renamed)))
    _delete_others(target, {one.name for one in renamed} | {provenance.FILE_NAME})
