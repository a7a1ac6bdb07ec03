"""From what a person typed to the files of a model on this machine; no network."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from localllm.errors import ModelNotFound, ModelRefused, UsageError, pasteable
from localllm.models import catalog, filenames, hashes, reference
from localllm.models.sources import caches, local
from localllm.models.sources.caches import CachedModel
from localllm.models.store import Store, StoredModel

_MIN_PART = 3
"""Letters from which a part of a catalog name is taken as meant: `x` is in qwen3-next too."""

_ALIKE = 0.75
"""How alike two names are, of 1, where the one is taken as the other misspelt."""


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A model found on this machine. `path` is the file to load; `files` are all parts, in order.

    `sha256` None: not known yet (see `hashes.sha256_of`). `source`: where it lies ("file", "store", or a tool).
    """

    name: str
    path: Path
    files: tuple[Path, ...]
    sha256: str | None
    source: str


def resolve(text: str, store: Store | None = None) -> ModelFile:
    """Find the model that `text` names: a path, else a pulled model, else another tool's cache.

    Raises ModelNotFound (the hint pulls it, where that is possible), UsageError (several fit, or malformed),
    ModelRefused (its files are damaged or missing).
    """
    ref = reference.parse(text)
    store = store or Store()
    match ref:
        case reference.LocalPath(path_text):
            return _from_path(path_text, store)
        case reference.HubRef():
            return _from_hub(ref, store)
        case reference.PypiRef():
            stored = store.get(ref.name)
            if stored is not None and (ref.version is None or stored.revision == ref.version):
                return _from_store(stored)
            raise ModelNotFound(f"{ref} is not here yet", f"localllm pull {ref}")
        case reference.Alias(name):
            return _from_alias(name, store)
        case reference.StoredName(name):
            return _by_name(name, store)


def _from_path(text: str, store: Store) -> ModelFile:
    paths = local.find(text)
    stored = store.holding(paths[0])  # then it is that model, and called by the name that can be typed
    known = hashes.known(paths[0], store) if len(paths) == 1 else None
    if stored is not None:
        return ModelFile(stored.name, paths[0], paths, known or stored.sha256, "file")
    return ModelFile(paths[0].name, paths[0], paths, known, "file")


def _from_store(model: StoredModel) -> ModelFile:
    if model.problem:
        raise ModelRefused(
            f"the stored model {model.name} cannot be used: {model.problem}",
            f"localllm pull {model.source}" if model.source else f"localllm rm {model.name}",
        )
    return ModelFile(model.name, model.path, model.files, model.sha256, "store")


def _from_cache(model: CachedModel) -> ModelFile:
    return ModelFile(model.name, model.path, model.files, model.sha256, model.source)


def _from_hub(ref: reference.HubRef, store: Store) -> ModelFile:
    """Find a repository's model in the store, else (its newest, or the asked commit) in a tool's cache."""
    stored = store.get(ref.name)
    if stored is not None:
        return _from_store(stored)
    quant = ref.quant or reference.DEFAULT_QUANT
    wanted = filenames.folded(f"{ref.repo}:{quant}")
    for model in caches.find_all():
        right_commit = ref.revision is None or ref.revision in model.path.parts
        if filenames.folded(model.name) == wanted and right_commit:
            return _from_cache(model)
    raise ModelNotFound(f"{ref} is not here yet", f"localllm pull {ref}")


def _from_alias(name: str, store: Store) -> ModelFile:
    """Find a catalog model under its alias, or the same file under another name."""
    stored = store.get(name)
    if stored is not None:
        return _from_store(stored)
    entry = catalog.find(name)
    if entry is not None:
        for model in store.list():
            if model.sha256 == entry.sha256:
                return _from_store(model)
        for cached in caches.find_all():
            if cached.sha256 == entry.sha256:
                return _from_cache(cached)
    raise ModelNotFound(f"{name} is not here yet", f"localllm pull {name}")


def _by_name(text: str, store: Store) -> ModelFile:
    stored = store.find(text)
    if stored is not None:
        return _from_store(stored)
    cached = _choose_cached(caches.find_all(), text)
    if cached is not None:
        return _from_cache(cached)
    if os.path.lexists(text):
        raise ModelNotFound(
            f"no stored model is called {text!r}, but a file or folder here is",
            pasteable("localllm", "run", f"./{text}"),
        )
    raise ModelNotFound(f"no model here is called {text!r}", _meant(text, store))


def _meant(text: str, store: Store) -> str:
    """Return the hint of a name that nothing has: pull what it is a part of, or name what is spelt like it."""
    wanted = filenames.folded(text)
    aliases = [entry.alias for entry in catalog.CATALOG]
    partly = [alias for alias in aliases if alias.startswith(wanted)] or [
        alias for alias in aliases if len(wanted) >= _MIN_PART and wanted in alias
    ]
    if partly:
        return f"localllm pull {partly[0]}"
    import difflib

    stored = {filenames.folded(model.name): model.name for model in store.list()}
    for close in difflib.get_close_matches(wanted, [*stored, *aliases], 1, _ALIKE):
        return f"did you mean {stored[close]}?" if close in stored else f"localllm pull {close}"
    is_repository = text.count("/") == 1 and " " not in text
    return pasteable("localllm", "pull", f"hf:{text}") if is_repository else "localllm ls"


def _choose_cached(models: Sequence[CachedModel], text: str) -> CachedModel | None:
    wanted = filenames.folded(text)
    exact = [model for model in models if filenames.folded(model.name) == wanted]
    partly = exact or [model for model in models if wanted in filenames.folded(model.name)]
    names = sorted({model.name for model in partly})
    if len(names) > 1:
        raise UsageError(
            f"{text!r} fits {len(names)} models of other tools: {', '.join(names)}",
            pasteable("localllm", "show", names[0]),
        )
    return partly[0] if partly else None
