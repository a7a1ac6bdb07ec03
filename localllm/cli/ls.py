"""`localllm ls`: the models that are here, wherever they lie."""

from __future__ import annotations

from typing import TYPE_CHECKING

from localllm.cli.options import Json, TalkFlags
from localllm.cli.output import Answer, Notes

if TYPE_CHECKING:
    from localllm.models.sources.caches import CachedModel
    from localllm.models.store import Store, StoredModel

STORE = "store"


def ls(talk: TalkFlags, json: Json = False) -> None:
    """List the models on this machine.

    Those in the store and in the caches of other tools, each with its quantisation and hash.
    """
    from localllm.models.sources import caches
    from localllm.models.store import Store

    store = Store()
    stored, cached = store.list(), caches.find_all()
    notes = Notes(quiet=talk.quiet, verbose=talk.verbose)
    if json:
        rows = [*map(_stored_document, stored), *(_cached_document(model, store) for model in cached)]
        unfinished = [{"folder": str(left.folder), "size_bytes": left.size_bytes} for left in store.unfinished()]
        Answer().document({"home": str(store.home), "models": rows, "unfinished": unfinished})
        return
    if stored or cached:
        Answer().write(_listing(stored, cached, store))
    else:
        notes.say("no models here yet: localllm pull smollm2:135m (98 MB) fetches the smallest")
    _tell_troubles(stored, store, notes)


def _listing(stored: list[StoredModel], cached: list[CachedModel], store: Store) -> str:
    from localllm.cli.tables import short_hash, size, table

    rows = [(m.name, m.quant or "?", size(m.size_bytes), short_hash(m.sha256), m.source or STORE) for m in stored]
    rows += [(m.name, m.quant or "?", size(m.size_bytes), short_hash(_hash_of(m, store)), m.source) for m in cached]
    return table(("NAME", "QUANT", "SIZE", "SHA256", "SOURCE"), rows, frozenset((2,)))


def _tell_troubles(stored: list[StoredModel], store: Store, notes: Notes) -> None:
    from localllm.cli.tables import printable, size

    for model in stored:
        if model.problem:
            notes.say(printable(f"{model.name} cannot be used: {model.problem} (localllm rm {model.name})"))
    left = store.unfinished()
    if left:
        total = size(sum(one.size_bytes for one in left))
        notes.say(f"unfinished pulls: {len(left)}, {total}; pulling the same again takes them up")


def _stored_document(model: StoredModel) -> dict[str, object]:
    from localllm.cli.pull import document

    return {**document(model), "in": STORE}


def _cached_document(model: CachedModel, store: Store) -> dict[str, object]:
    return {
        "name": model.name,
        "quant": model.quant,
        "sha256": _hash_of(model, store),
        "size_bytes": model.size_bytes,
        "path": str(model.path),
        "files": [str(path) for path in model.files],
        "in": model.source,
    }


def _hash_of(model: CachedModel, store: Store) -> str | None:
    """Return the hash that the cache tells, or that was computed before; listing hashes nothing."""
    from localllm.models import hashes

    if model.sha256 is not None or len(model.files) != 1:
        return model.sha256
    return hashes.known(model.path, store)
