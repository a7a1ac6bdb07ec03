"""A model file or folder that is used where it lies."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

from localllm.errors import ModelNotFound, ModelRefused, UsageError, pasteable
from localllm.models import filenames
from localllm.models.filenames import NamedSet

_MAX_LISTED = 20
_SENTENCES = {
    errno.ELOOP: "its links go round in a circle",
    errno.ENAMETOOLONG: "the name is too long for this file system",
    errno.EACCES: "you may not read it",
    errno.ENOTDIR: "a part of the path is a file, not a folder",
    errno.EINVAL: "the name is not one that this file system allows",
}


def find(text: str) -> tuple[Path, ...]:
    """Return the files of the model that a path names: one file, a whole split set, or the only model of a folder.

    Names are compared composed (NFC) where the exact spelling is not there. Raises UsageError (several
    models in the folder, no home folder), ModelNotFound, ModelRefused (parts missing, not a file).
    """
    path = _expand(text)
    try:
        path = _existing(path)
        if os.path.isdir(path):
            return _in_folder(path)
        if not os.path.isfile(path):
            raise ModelRefused(f"{path} is neither a file nor a folder", "localllm ls")
        return _whole_set(path)
    except OSError as error:
        reason = _SENTENCES.get(error.errno or 0, error.strerror or str(error))
        raise ModelNotFound(f"{path} cannot be used: {reason}", "localllm ls") from error
    except ValueError as error:
        raise ModelNotFound(f"{text[:200]!r} is no path: {error}", "localllm ls") from error


def _expand(text: str) -> Path:
    expanded = os.path.expanduser(text)
    if text.startswith("~") and expanded == text:
        raise UsageError(f"{text}: no home folder is known", "export HOME=/your/home, or write the whole path")
    try:
        return Path(os.path.abspath(expanded))
    except FileNotFoundError:
        raise ModelNotFound(f"{text}: the folder you are in is gone", "cd somewhere, or write the whole path") from None


def _existing(path: Path) -> Path:
    """Return the path as it is spelt on disk. Raises ModelNotFound, OSError."""
    try:
        os.stat(path)
        return path
    except FileNotFoundError:
        pass
    found = Path(path.anchor)
    for part in path.parts[1:]:
        step = found / part
        if not os.path.lexists(step):
            other = _other_spelling(found, part)
            if other is None:
                raise ModelNotFound(f"there is no {path}", _near(path))
            step = found / other
        found = step
    os.stat(found)
    return found


def _other_spelling(folder: Path, name: str) -> str | None:
    """Return the entry of `folder` that is the same name in another Unicode composition."""
    wanted = filenames.composed(name)
    with contextlib.suppress(OSError):
        return next((entry for entry in os.listdir(folder) if filenames.composed(entry) == wanted), None)
    return None


def _near(path: Path) -> str:
    with contextlib.suppress(OSError):
        names = [entry for entry in os.listdir(path.parent) if entry.lower().endswith(".gguf")]
        if names:
            return pasteable("localllm", "run", str(path.parent / sorted(names)[0]))
    return "localllm ls"


def _whole_set(path: Path) -> tuple[Path, ...]:
    """Return the file, or the set it is a part of."""
    for one in _sets(path.parent):
        if path.name in one.files and len(one.files) + len(one.missing) > 1:
            _require_whole(one, path.parent)
            return tuple(path.parent / name for name in one.files)
    return (path,)


def _in_folder(folder: Path) -> tuple[Path, ...]:
    sets = _sets(folder)
    if not sets:
        below = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and _sets(Path(entry.path)))
        hint = pasteable("localllm", "run", str(folder / below[0])) if below else "localllm ls"
        more = f"; the folders {', '.join(below[:_MAX_LISTED])} below it do" if below else ""
        raise ModelNotFound(f"{folder} holds no GGUF file{more}", hint)
    if len(sets) > 1:
        names = ", ".join(one.files[0] for one in sets[:_MAX_LISTED])
        first = folder / sets[0].files[0]
        raise UsageError(f"{folder} holds {len(sets)} models: {names}", pasteable("localllm", "run", str(first)))
    _require_whole(sets[0], folder)
    return tuple(folder / name for name in sets[0].files)


def _sets(folder: Path) -> list[NamedSet]:
    """Return the models of one folder; links to files count, broken ones do not."""
    return filenames.group(name for name in os.listdir(folder) if os.path.isfile(folder / name))


def _require_whole(one: NamedSet, folder: Path) -> None:
    if one.missing:
        raise ModelRefused(
            f"{folder} lacks {len(one.missing)} of the set's parts: {', '.join(one.missing[:5])}",
            "fetch the missing parts into the same folder",
        )
