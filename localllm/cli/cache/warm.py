"""`localllm cache warm`: compute a document or a system prompt ahead, and keep it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from localllm.cli.cache.prompt_file import PromptFile
from localllm.cli.options import CacheFlags, Json, LoadFlags, Model, NoServer, Quiet, Verbose
from localllm.errors import UsageError

if TYPE_CHECKING:
    from localllm.cli.output import Notes
    from localllm.runtime.kv.explain import Warmed


def warm(
    model: Model,
    file: PromptFile,
    *,
    load: LoadFlags,
    cache: CacheFlags,
    no_server: NoServer = False,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Compute a document or a system prompt now, and keep it until the cache is cleared.

    Every later prompt that begins with it starts where it ends; after a restart too, unless it is --private.
    """
    from dataclasses import replace

    import msgspec

    from localllm.cli.cache.models import Flags, isolating, opened
    from localllm.cli.cache.prompt_file import read_request
    from localllm.cli.keeping import own_options, tell_once, tier_config
    from localllm.cli.output import Answer, Notes
    from localllm.runtime.events import Event, Progress
    from localllm.runtime.service import Service
    from localllm.runtime.warming import continued

    notes = Notes(quiet=quiet, verbose=verbose)
    request = read_request(file, own_options(cache), notes)

    def tell(event: Event) -> None:
        if isinstance(event, Progress):
            notes.progress(f"{event.done_tokens} of {event.total_tokens} tokens")

    with opened(model, Flags(load, cache, no_server), notes, continued(request), is_hashed=True) as service:
        if url := isolating(service):
            raise UsageError(
                f"The server at {url} keeps its clients apart (--no-shared-cache): none would find this.",
                "send it the document over HTTP with the key of those it is for, or serve without --no-shared-cache",
            )
        try:
            warmed = service.warm(request, tell)
        finally:
            notes.clear()
        if isinstance(service, Service):  # what is in memory here goes with this process
            on_disk = {tier: n for tier, n in warmed.kept_tokens.items() if tier == "disk"}
            warmed = replace(warmed, kept_tokens=on_disk, is_pinned=any(on_disk.values()))
            if warmed.is_pinned:
                tell_once(tier_config(cache), notes.say)
    if json:
        Answer().document(msgspec.to_builtins(warmed))
        return
    _tell(warmed, notes)


def _tell(warmed: Warmed, notes: Notes) -> None:
    kept = ", ".join(f"{n} on {tier}" for tier, n in warmed.kept_tokens.items() if n) or "nowhere"
    notes.say(f"{warmed.n_tokens} tokens, {warmed.n_computed_tokens} of them computed now; kept: {kept}")
    n_lasting = max((n for tier, n in warmed.kept_tokens.items() if tier != "device"), default=0)
    if not warmed.is_pinned:
        notes.always(
            "note: nothing of it is kept beyond this: there is no tier with room for it (localllm cache stats)"
        )
    elif n_lasting < warmed.n_tokens:
        notes.always(
            f"note: only its first {n_lasting} tokens are kept: there was no room for the rest (localllm cache stats)"
        )
    if warmed.is_pinned and not warmed.kept_tokens.get("disk"):
        notes.say("it lies in the server's memory only, until the model is closed there")
