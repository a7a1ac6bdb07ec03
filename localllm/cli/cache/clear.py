"""`localllm cache clear`: forget all that is kept."""

from __future__ import annotations

from localllm.cli.options import Json, Quiet

_TIMEOUT_S = 40.0  # a server itself waits for 30


def clear(json: Json = False, quiet: Quiet = False) -> None:
    """Forget all that is kept of prompts: on disk, pinned too, and in the models of running servers."""
    from localllm.cli.cache.models import answers, wait_stopping
    from localllm.cli.failures import AfterOutput
    from localllm.cli.keeping import default_folder
    from localllm.cli.output import Answer, Notes
    from localllm.cli.tables import size
    from localllm.errors import LocalLLMError
    from localllm.runtime.kv.disk_list import delete_all

    notes = Notes(quiet=quiet)
    left = wait_stopping(notes)
    models, silent = answers("clear_cache", notes, _TIMEOUT_S)
    deleted = delete_all(default_folder())
    n_blocks = deleted.n_blocks + sum(model["n_disk_blocks"] for model in models)
    n_bytes = deleted.n_bytes + sum(model["disk_bytes"] for model in models)
    left += silent + ([f"{deleted.n_left} files in {default_folder()}"] if deleted.n_left else [])
    if json:
        Answer().document({"disk": {"n_blocks": n_blocks, "bytes": n_bytes}, "models": models, "not_cleared": left})
    else:
        for model in models:
            freed = f"{size(model['ram_bytes'])} of RAM and {model['n_device_cells']} cells freed"
            notes.say(f"{model['model']} at {model['server']}: {freed}")
        notes.say(f"{size(n_bytes)} in {n_blocks} blocks deleted from disk")
    if left:
        raise AfterOutput(LocalLLMError(f"Not cleared: {', '.join(left)}.", "localllm cache clear"))
