"""`localllm cache ls`: the prefixes that lie on disk."""

from __future__ import annotations

import time

from localllm.cli.options import Json


def ls(json: Json = False) -> None:
    """List the prefixes on disk: model, length, size, age. Their text is not known there."""
    from dataclasses import asdict

    from localllm.cli.keeping import default_folder
    from localllm.cli.output import Answer, Notes
    from localllm.cli.tables import ago, size, table
    from localllm.runtime.kv.disk_folder import trouble_with
    from localllm.runtime.kv.disk_list import prefixes

    folder = default_folder()
    kept, trouble = prefixes(folder), trouble_with(folder)
    if json:
        listed = [asdict(one) for one in kept]
        Answer().document({"folder": str(folder), "prefixes": listed, "problem": trouble and trouble.what})
        return
    if trouble:
        Notes().always(f"note: {trouble}")
    if not kept:
        Notes().say("nothing is kept on disk")
        return
    rows = [
        (
            one.model,
            str(one.n_tokens),
            size(one.n_bytes),
            ago(time.time() - one.used_s),
            "pinned" if one.is_pinned else "",
        )
        for one in kept
    ]
    out = Answer()
    out.write(table(("MODEL", "TOKENS", "SIZE", "LAST USED", ""), rows, frozenset((1, 2))))
    if len(kept) > 1:
        Notes().say("what beginnings share counts in each, and lies on disk once (in all: localllm cache stats)")
