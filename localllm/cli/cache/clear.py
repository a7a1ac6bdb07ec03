"""`localllm cache clear`: forget all that is kept."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from localllm.cli.options import Json, Quiet

if TYPE_CHECKING:
    from localllm.runtime.kv.disk_folder import Trouble
    from localllm.runtime.kv.disk_room import Deleted

_TIMEOUT_S = 40.0  # a server itself waits for 30


def clear(json: Json = False, quiet: Quiet = False) -> None:
    """Forget all that is kept of prompts: on disk, pinned too, and in the models of running servers."""
    from localllm.cli.cache.models import answers, wait_stopping
    from localllm.cli.failures import AfterOutput
    from localllm.cli.keeping import default_folder
    from localllm.cli.output import Answer, Notes
    from localllm.cli.tables import size
    from localllm.errors import LocalLLMError

    folder, notes = default_folder(), Notes(quiet=quiet)
    left = wait_stopping(notes)
    models, silent = answers("clear_cache", notes, _TIMEOUT_S)
    deleted, trouble = _delete_all(folder)
    n_blocks = deleted.n_blocks + sum(model["n_disk_blocks"] for model in models)
    n_bytes = deleted.n_bytes + sum(model["disk_bytes"] for model in models)
    left += silent + ([f"{deleted.n_left} files in {folder}"] if deleted.n_left else [])
    left += [trouble.what] if trouble else []
    if json:
        Answer().document({"disk": {"n_blocks": n_blocks, "bytes": n_bytes}, "models": models, "not_cleared": left})
    else:
        for model in models:
            freed = f"{size(model['ram_bytes'])} of RAM and {model['n_device_cells']} cells freed"
            notes.say(f"{model['model']} at {model['server']}: {freed}")
        notes.say(f"{size(n_bytes)} in {n_blocks} blocks deleted from disk")
    if left:
        hint = trouble.advice if trouble else "localllm cache clear"
        raise AfterOutput(LocalLLMError(f"Not cleared: {', '.join(left)}.", hint))


def _delete_all(folder: Path) -> tuple[Deleted, Trouble | None]:
    """Delete what lies in the folder; return what that was, and why nobody can tell what lies there."""
    from localllm.runtime.kv.disk_folder import trouble_of, trouble_with
    from localllm.runtime.kv.disk_list import delete_all
    from localllm.runtime.kv.disk_room import Deleted

    try:
        deleted = delete_all(folder)
    except OSError as error:
        return Deleted(), trouble_with(folder) or trouble_of(folder, error)
    return deleted, trouble_with(folder) if deleted.n_left else None
