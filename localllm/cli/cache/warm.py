"""`localllm cache warm`: compute a document or a system prompt ahead, and keep it."""

from __future__ import annotations

from localllm.cli.cache.prompt_file import PromptFile
from localllm.cli.options import Json, LoadFlags, Model, Quiet, Verbose


def warm(
    model: Model,
    file: PromptFile,
    *,
    load: LoadFlags,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Compute a document or a system prompt now, and keep it until the cache is cleared.

    Every later prompt that begins with it starts where it ends, after a restart too.
    """
    import msgspec

    from localllm.cli.cache.models import opened
    from localllm.cli.cache.prompt_file import read_request
    from localllm.cli.output import Answer, Notes
    from localllm.runtime.events import Event, Progress

    notes, request = Notes(quiet=quiet, verbose=verbose), read_request(file)

    def tell(event: Event) -> None:
        if isinstance(event, Progress):
            notes.progress(f"{event.done_tokens} of {event.total_tokens} tokens")

    with opened(model, load, notes) as service:
        try:
            warmed = service.warm(request, tell)
        finally:
            notes.clear()
    if json:
        Answer().document(msgspec.to_builtins(warmed))
        return
    kept = ", ".join(f"{n} on {tier}" for tier, n in warmed.kept_tokens.items() if n) or "nowhere"
    notes.say(f"{warmed.n_tokens} tokens, {warmed.n_computed_tokens} of them computed now; kept: {kept}")
    if not warmed.is_pinned:
        notes.say("note: nothing of it is pinned: there is no RAM or disk tier that could keep it")
