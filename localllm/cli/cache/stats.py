"""`localllm cache stats`: how much is kept, and what it was good for."""

from __future__ import annotations

from typing import Any

from localllm.cli.options import Json


def stats(json: Json = False) -> None:
    """Count what is kept: on disk, and in the models of running servers."""
    from localllm.cli.cache.models import answers
    from localllm.cli.keeping import default_folder
    from localllm.cli.output import Answer, Notes
    from localllm.runtime.kv.disk_folder import trouble_with
    from localllm.runtime.kv.disk_list import total

    folder = default_folder()
    disk, trouble = total(folder), trouble_with(folder)
    notes = Notes()
    models, _ = answers("cache_stats", notes)
    out = Answer()
    if json:
        out.document({"disk": {"folder": str(folder), **disk, "problem": trouble and trouble.what}, "models": models})
        return
    out.write(_disk_lines(str(folder), disk))
    if trouble:
        notes.always(f"note: {trouble}")
    for model in models:
        out.write("\n" + _model_lines(model))
    if not models:
        notes.say("no server of yours holds a model (localllm serve)")


def _disk_lines(folder: str, disk: dict[str, int]) -> str:
    from localllm.cli.tables import pairs, size

    pinned = f" ({size(disk['pinned_bytes'])} pinned)" if disk["pinned_bytes"] else ""
    kept = f"{size(disk['bytes'])} in {disk['n_blocks']} blocks{pinned}"
    return pairs({"disk": folder, "kept": kept, "written today": size(disk["written_today_bytes"])})


def _model_lines(model: dict[str, Any]) -> str:
    from localllm.cli.tables import pairs, size

    tokens = model["prompt_tokens"]
    lines = {
        "model": f"{model['model']} at {model['server']}",
        "device": f"{model['used_cells']} of {model['pool_tokens']} cells, {model['retained_cells']} of them kept",
        "ram": f"{size(model['ram_bytes'])} of {size(model['ram_limit_bytes'])} in {model['n_ram_blocks']} blocks",
        "prompt tokens": ", ".join(f"{n} {source}" for source, n in tokens.items()),
    }
    disk = model["disk"]
    if disk is not None:
        written = f"{size(disk['written_bytes'])} written, at most {size(disk['daily_bytes'])} a day by all"
        lines["disk"] = f"{written}{'; off: ' + disk['failure'] if disk['failure'] else ''}"
    return pairs(lines)
