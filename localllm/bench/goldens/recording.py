"""Takes the answers of a model that a golden keeps: token ids, greedy text, the likeliest tokens at each place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from localllm.bench.goldens.prompts import Prompt
from localllm.errors import ContextOverflow, TemplateError, UsageError
from localllm.runtime.config import LoadConfig
from localllm.runtime.events import TokenLogprob
from localllm.runtime.service import Service
from localllm.runtime.stream import collect
from localllm.runtime.types import GenerationOptions

N_TOKENS = 32
N_TOP = 5
CTX_TOKENS = 2048
_DIGITS = 6

OPTIONS = GenerationOptions(
    max_tokens=N_TOKENS, seed=0, sampling={"temperature": 0.0}, logprobs=N_TOP, reuse_prefix=False
)

OnProgress = Callable[[str, int, int], None]


def load_config(n_ctx_train: int | None, n_threads: int | None = None) -> LoadConfig:
    """Return how a model is loaded for its golden: one sequence, nothing kept, and as many threads as then."""
    return LoadConfig(ctx=min(CTX_TOKENS, n_ctx_train or CTX_TOKENS), threads=n_threads, parallel=1, retained=0)


def take(service: Service, prompts: Sequence[Prompt], on_progress: OnProgress) -> list[dict[str, Any]]:
    """Answer each prompt alone; return an entry for each, in their order."""
    entries = []
    for at, prompt in enumerate(prompts):
        on_progress("golden", at, len(prompts))
        entries.append(prompt.document() | _answer(service, prompt))
    return entries


def _answer(service: Service, prompt: Prompt) -> dict[str, Any]:
    """Return what the model makes of a prompt, or why it refuses it (too long, a role its template lacks)."""
    request = prompt.request(OPTIONS, can_chat=service.can_chat)
    try:
        prompt_ids = service.prompt_tokens(request)
        choice = collect(service.submit(request)).choices[0]
    except (ContextOverflow, TemplateError, UsageError) as refusal:
        return {"refused": refusal.message, "prompt_ids": [], "ids": [], "answer": "", "ended": "", "logprobs": []}
    return {
        "refused": "",
        "prompt_ids": prompt_ids,
        "ids": list(choice.ids),
        "answer": choice.text,
        "ended": choice.finish_reason,
        "logprobs": [list(_likeliest(place)) for place in choice.logprobs],
    }


def _likeliest(place: TokenLogprob) -> Iterator[list[float]]:
    """Yield [id, logprob] of the likeliest tokens, and of the one taken where it is none of them."""
    top = {one.id: one.logprob for one in place.top}
    for token, logprob in (top | {place.id: place.logprob}).items():
        yield [token, round(logprob, _DIGITS)]
