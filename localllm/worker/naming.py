"""The models that can be asked for by name: those named at start, then the store's. Requests never name files."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from localllm.errors import ModelNotFound, UsageError
from localllm.models import catalog, filenames, reference
from localllm.models.disk.files import Identity
from localllm.models.resolve import ModelFile, resolve
from localllm.models.store import Store

MAX_LISTED = 20
_NAME = re.compile(r"[A-Za-z0-9._:/-]{1,200}")
_OTHER_CHARS = re.compile(r"[^A-Za-z0-9._:/-]+")


@dataclass(frozen=True, slots=True)
class Known:
    """A model that can be asked for. `path` is the file to load, of `files`; `problem`: why it cannot be used."""

    name: str
    path: Path
    files: tuple[Path, ...]
    sha256: str | None
    aliases: tuple[str, ...] = ()
    is_pinned: bool = False
    problem: str = ""

    @property
    def key(self) -> str:
        """What makes it the same model under another name: where its file really lies."""
        return os.path.realpath(self.path)

    def identity(self) -> tuple[Identity, ...]:
        """Return sizes, times and inodes: whether its content changed. Empty where a file is gone."""
        try:
            return tuple(Identity.of(path) for path in self.files)
        except OSError:
            return ()


def is_name(text: str) -> bool:
    """Say whether a model can be called this over HTTP: no path that leads anywhere, no control characters."""
    return bool(_NAME.fullmatch(text)) and all(part not in ("", ".", "..") for part in text.split("/"))


def find_named(references: Sequence[str], aliases: Sequence[str]) -> list[Known]:
    """Return the models that `references` name, each once, the first with `aliases`. Reads the disk.

    Raises: ModelNotFound, ModelRefused, UsageError (a malformed name, or one for two models).
    """
    found = dict[str, Known]()
    for text in references:
        file = resolve(text)
        key = os.path.realpath(file.path)
        taken = {one.name for other, one in found.items() if other != key}
        model = _named(text, file, taken)
        first = found.setdefault(key, model)
        also = dict.fromkeys((*first.aliases, model.name, *model.aliases))
        found[key] = replace(first, aliases=tuple(name for name in also if name != first.name))
    named = list(found.values())
    for alias in aliases:
        if not is_name(alias):
            raise UsageError(f"{alias!r} cannot be a model's name.", "use letters, digits and . _ : / -")
        if not named:
            raise UsageError("An alias needs a model to name.", "localllm serve MODEL --alias NAME")
        if any(folded(alias) in map(folded, (one.name, *one.aliases)) for one in named[1:]):
            raise UsageError(f"{alias!r} already names another model.", "choose another --alias")
    if aliases:
        named[0] = replace(named[0], aliases=tuple(dict.fromkeys((*aliases, *named[0].aliases))))
    return named


def in_store() -> list[Known]:
    """Return the store's models. Reads the disk; what is damaged has its `problem`."""
    return [
        Known(model.name, model.path, model.files, model.sha256, problem=model.problem)
        for model in Store().list()
        if is_name(model.name)
    ]


def choose(text: str, models: Sequence[Known]) -> Known:
    """Return the first model called `text`, else the only one whose name contains it (in any case).

    Raises: ModelNotFound, which lists what there is and does not repeat what was asked for.
    """
    if not is_name(text):
        raise not_found("That cannot be a model's name", models)
    wanted = folded(text)
    fitting = (
        [one for one in models if text in (one.name, *one.aliases)][:1]
        or [one for one in models if wanted in map(folded, (one.name, *one.aliases))][:1]
        or [one for one in models if any(wanted in folded(name) for name in (one.name, *one.aliases))]
    )
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise not_found(f"That name fits {len(fitting)} models", fitting)
    raise not_found("No model has that name", models)


def folded(name: str) -> str:
    """Return the form in which names are compared."""
    return filenames.folded(name)


def not_found(sentence: str, models: Sequence[Known]) -> ModelNotFound:
    """Return the error that says so and lists the models there are."""
    names = [one.name for one in models[:MAX_LISTED]]
    more = f" and {len(models) - MAX_LISTED} more" if len(models) > MAX_LISTED else ""
    there = f"{', '.join(names)}{more}" if names else "none"
    hint = "localllm ls" if names else f"localllm pull {catalog.DEFAULT_ALIAS}"
    return ModelNotFound(f"{sentence}; there are: {there}.", hint, field="model")


def _named(text: str, file: ModelFile, taken: set[str]) -> Known:
    """Return the model under a name that fits HTTP and is its own; what was typed names it too, unless a path."""
    name = _as_name(file.name)
    if name in taken:
        name = _as_name(f"{file.path.parent.name}/{file.name}")
    n = 2
    while name in taken:
        name, n = f"{_as_name(file.name)}-{n}", n + 1
    is_path = isinstance(reference.parse(text), reference.LocalPath)
    aliases = () if is_path or not is_name(text) or text == name else (text,)
    return Known(name, file.path, file.files, file.sha256, aliases, is_pinned=True)


def _as_name(text: str) -> str:
    parts = [part for part in _OTHER_CHARS.sub("-", text).split("/") if part not in ("", ".", "..")]
    return "/".join(parts)[-200:].lstrip("/") or "model"
