"""`localllm cache explain`: how much of a prompt is known, and why not more."""

from __future__ import annotations

from typing import TYPE_CHECKING

from localllm.cli.cache.prompt_file import PromptFile
from localllm.cli.options import CacheFlags, Json, LoadFlags, Model, NoServer, Verbose

if TYPE_CHECKING:
    from localllm.runtime.kv.explain import Explanation

_PLACES = {"device": "the device", "ram": "RAM", "disk": "disk"}


def explain(
    model: Model,
    file: PromptFile,
    *,
    load: LoadFlags,
    cache: CacheFlags,
    no_server: NoServer = False,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Say how much of a prompt is known, where it lies, and why not more. Nothing is computed.

    The server is asked that `run` would go through with these flags; else the model is loaded, which knows what lies on
    disk.
    """
    import msgspec

    from localllm.cli.cache.models import Flags, isolating, opened
    from localllm.cli.cache.prompt_file import read_request
    from localllm.cli.keeping import own_options
    from localllm.cli.output import Answer, Notes

    notes = Notes(verbose=verbose)
    request = read_request(file, own_options(cache), notes)
    with opened(model, Flags(load, cache, no_server), notes, request) as service:
        if url := isolating(service):
            notes.say(
                f"note: the server at {url} keeps its clients apart (--no-shared-cache): this is what `run` and `chat` "
                "would find there, not what its HTTP clients would"
            )
        told = service.explain(request)
    if json:
        Answer().document({"n_known_tokens": told.n_known_tokens, **msgspec.to_builtins(told)})
        return
    Answer().write(_lines(told))


def _lines(told: Explanation) -> str:
    from localllm.cli.tables import ago, pairs

    known = ", ".join(f"{n} from {_PLACES[tier]}" for tier, n in told.known_tokens.items() if n) or "none"
    lines = {
        "prompt": f"{told.n_prompt_tokens} tokens",
        "known": f"{told.n_known_tokens} tokens ({known})" if told.n_known_tokens else "0 tokens",
        "why not more": told.message,
    }
    if told.age_s is not None:
        lines["last used"] = ago(told.age_s)
    parting = told.diverges_at
    if parting is not None:
        lines["first unknown"] = f"token {parting.position}, {parting.text!r}"
        lines["there"] = f"{parting.before!r} | {(parting.text + parting.after)!r}"
    return pairs(lines)
