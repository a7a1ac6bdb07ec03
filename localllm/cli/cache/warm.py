"""`localllm cache warm`: compute a document or a system prompt ahead, and keep it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from localllm.cli.cache.prompt_file import PromptFile
from localllm.cli.options import CacheFlags, Json, LoadFlags, Model, NoServer, Quiet, Verbose
from localllm.errors import LocalLLMError, UsageError

if TYPE_CHECKING:
    from localllm.cli.output import Notes
    from localllm.runtime.kv.explain import Warmed
    from localllm.runtime.service import Service
    from localllm.runtime.types import GenerationRequest
    from localllm.worker.client import RemoteService

_PLACES = {"device": "on the device", "ram": "in RAM", "disk": "on disk"}


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
    import msgspec

    from localllm.cli.cache.models import Flags, opened
    from localllm.cli.cache.prompt_file import read_request
    from localllm.cli.failures import AfterOutput
    from localllm.cli.keeping import own_options, tell_once, tier_config
    from localllm.cli.output import Answer, Notes
    from localllm.runtime.service import Service
    from localllm.runtime.warming import continued

    notes = Notes(quiet=quiet, verbose=verbose)
    request = read_request(file, own_options(cache), notes)
    with opened(model, Flags(load, cache, no_server), notes, continued(request), must_last=True) as service:
        _check(service)
        warmed = _warmed(service, request, notes)
        lacking = "" if _n_lasting(warmed) == warmed.n_tokens else _why(service, request)
        if warmed.is_pinned and isinstance(service, Service):
            tell_once(tier_config(cache), notes.say)
    if json:
        Answer().document(msgspec.to_builtins(warmed))
    else:
        _tell(warmed, notes)
    if not warmed.is_pinned:
        raise AfterOutput(LocalLLMError(f"Nothing of it is kept: {lacking}.", "localllm cache stats"))
    if lacking:
        notes.always(f"note: only its first {_n_lasting(warmed)} tokens are kept: {lacking} (localllm cache stats)")


def _check(service: Service | RemoteService) -> None:
    """Refuse a model in whose caches nobody would find it. Raises: UsageError, LocalLLMError."""
    from localllm.cli.cache.lasting import require_folder
    from localllm.cli.cache.models import isolating
    from localllm.runtime.service import Service

    if url := isolating(service):
        raise UsageError(
            f"The server at {url} keeps its clients apart (--no-shared-cache): none would find this.",
            "send it the document over HTTP with the key of those it is for, or serve without --no-shared-cache",
        )
    if isinstance(service, Service):
        require_folder(service)


def _warmed(service: Service | RemoteService, request: GenerationRequest, notes: Notes) -> Warmed:
    """Compute it; return what is kept of it once this command has ended."""
    from contextlib import suppress
    from dataclasses import replace

    from localllm.cli.signals import Stopped
    from localllm.runtime.events import Event, Progress
    from localllm.runtime.warming import continued

    def tell(event: Event) -> None:
        if isinstance(event, Progress):
            notes.progress(f"{event.done_tokens} of {event.total_tokens} tokens")

    try:
        warmed = service.warm(request, tell)
    except Stopped:
        notes.clear()
        with suppress(LocalLLMError):
            kept = _lasting(service, service.kept(continued(request)))
            notes.say(f"interrupted; of what was computed stay, until others need the room: {_places(kept)}")
        raise
    finally:
        notes.clear()
    kept = _lasting(service, warmed.kept_tokens)
    return replace(warmed, kept_tokens=kept, is_pinned=warmed.is_pinned and any(kept.values()))


def _lasting(service: Service | RemoteService, kept: Mapping[str, int]) -> Mapping[str, int]:
    """Return the tokens by tier without those that end with this process."""
    from localllm.runtime.service import Service

    return {tier: n for tier, n in kept.items() if tier == "disk"} if isinstance(service, Service) else kept


def _places(kept: Mapping[str, int]) -> str:
    return ", ".join(f"{n} {_PLACES[tier]}" for tier, n in kept.items() if n) or "nothing"


def _tell(warmed: Warmed, notes: Notes) -> None:
    computed = f"{warmed.n_tokens} tokens, {warmed.n_computed_tokens} of them computed now"
    notes.say(f"{computed}; kept: {_places(warmed.kept_tokens)}")
    if warmed.is_pinned and not warmed.kept_tokens.get("disk"):
        notes.say("it lies in the server's memory only, until the model is closed there")


def _n_lasting(warmed: Warmed) -> int:
    """Return how many of its tokens are pinned somewhere."""
    return max((n for tier, n in warmed.kept_tokens.items() if tier != "device"), default=0)


def _why(service: Service | RemoteService, request: GenerationRequest) -> str:
    """Return why not all of it is kept."""
    from localllm.cli.cache.lasting import why_not_in_ram, why_not_on_disk
    from localllm.worker.client import RemoteService

    stats = service.cache_stats()
    on_disk = "it is private" if request.options.is_private else why_not_on_disk(stats)
    return f"{on_disk}, and {why_not_in_ram(stats)}" if isinstance(service, RemoteService) else on_disk
