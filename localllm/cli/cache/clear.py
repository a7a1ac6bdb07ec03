"""`localllm cache clear`: forget all that is kept."""

from __future__ import annotations

from localllm.cli.options import Json, Quiet


def clear(json: Json = False, quiet: Quiet = False) -> None:
    """Forget all that is kept of prompts: on disk, pinned too, and in the models of running servers."""
    from localllm.cli.cache.models import answers
    from localllm.cli.keeping import default_folder
    from localllm.cli.output import Answer, Notes
    from localllm.cli.tables import size
    from localllm.runtime.kv.disk_list import delete_all

    notes = Notes(quiet=quiet)
    models = answers("clear_cache", notes)
    n_blocks, n_bytes = delete_all(default_folder())
    n_blocks += sum(model["n_disk_blocks"] for model in models)
    n_bytes += sum(model["disk_bytes"] for model in models)
    if json:
        Answer().document({"disk": {"n_blocks": n_blocks, "bytes": n_bytes}, "models": models})
        return
    for model in models:
        freed = f"{size(model['ram_bytes'])} of RAM and {model['n_device_cells']} cells freed"
        notes.say(f"{model['model']} at {model['server']}: {freed}")
    notes.say(f"{size(n_bytes)} in {n_blocks} blocks deleted from disk")
