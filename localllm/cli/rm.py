"""`localllm rm`: delete a model that `pull` fetched."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

from localllm.cli.options import Json, Model, TalkFlags, option
from localllm.errors import ModelNotFound, UsageError, pasteable

if TYPE_CHECKING:
    from localllm.models.store import Store, StoredModel

Yes = Annotated[bool, option("--yes", "-y", help="Do not ask.")]


def rm(model: Model, talk: TalkFlags, yes: Yes = False, json: Json = False) -> None:
    """Delete a stored model.

    Files used in place and those in other tools' caches are never touched.
    """
    from localllm.cli.output import Answer, Notes
    from localllm.cli.tables import printable
    from localllm.models.store import Store

    store = Store()
    name = _name_in_store(model)
    found = store.find(name)
    told = printable(_told(found) if found else _unfinished(store, name, model))
    if not yes and not _agreed(told, model):
        return
    store.remove(found.name if found else name)
    Notes(quiet=talk.quiet, verbose=talk.verbose).say(f"removed {told}")
    if json:
        size_bytes = found.size_bytes if found else None
        Answer().document({"removed": found.name if found else name, "size_bytes": size_bytes})


def _name_in_store(text: str) -> str:
    from localllm.models import reference

    match reference.parse(text):
        case reference.LocalPath(path):
            raise UsageError(
                f"{path} is a file used in place; localllm does not delete it.", pasteable("rm", "-i", str(path))
            )
        case reference.HubRef() | reference.PypiRef() | reference.Alias() as ref:
            return ref.name
        case reference.StoredName(name):
            return name


def _told(found: StoredModel) -> str:
    from localllm.cli.tables import short_hash, size

    quant = found.quant or "unknown quantisation"
    return f"{found.name} ({quant}, {short_hash(found.sha256)}, {size(found.size_bytes)})"


def _unfinished(store: Store, name: str, text: str) -> str:
    """Name what a broken-off pull left, where nothing else is stored under `name`.

    Raises: UsageError for a model in another tool's cache; ModelNotFound.
    """
    from localllm.cli.tables import size
    from localllm.models import resolve
    from localllm.models.store import folder_of

    left = next((one for one in store.unfinished() if one.folder.name == folder_of(name)), None)
    if left is not None:
        return f"the unfinished pull of {name} ({size(left.size_bytes)})"
    try:
        elsewhere = resolve.resolve(text, store)
    except ModelNotFound:
        raise ModelNotFound(f"There is no stored model {text!r}.", "localllm ls") from None
    raise UsageError(f"{text!r} is {elsewhere.path}, which is not localllm's to delete.", "localllm ls")


def _agreed(told: str, model: str) -> bool:
    if sys.stdin is None or not sys.stdin.isatty():
        raise UsageError(
            f"{told} would be deleted, and there is no terminal to ask at.", pasteable("localllm", "rm", model, "--yes")
        )
    print(f"delete {told}? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")
