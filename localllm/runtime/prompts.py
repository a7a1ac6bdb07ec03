"""From what a request says to token ids: template, fill-in-the-middle, texts to embed."""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from localllm.errors import ContextOverflow, TemplateError, UsageError
from localllm.models import chat_template
from localllm.models.chat_template import Encoded, Rendered
from localllm.models.template.messages import count_chars
from localllm.models.tokenizer import Tokenizer
from localllm.runtime.answers import Recollection
from localllm.runtime.sequence import Timeline
from localllm.runtime.types import ChatRequest, CompletionRequest, EmbeddingRequest, GenerationRequest, Request, Tokens

if TYPE_CHECKING:
    from localllm.runtime.prepare import ModelFacts

_MAX_UNCOUNTED_CHARS = 2_000_000
_MAX_CHARS_PER_TOKEN = 64  # on average over a whole prompt; the longest tokens of some vocabularies are longer


def encode_prompt(
    request: Request, model: ModelFacts, timeline: Timeline | None = None, recollection: Recollection | None = None
) -> Encoded:
    """Return the prompt's token ids, and where messages end in them.

    `recollection`: earlier answers in a conversation keep the tokens that were generated; it takes note of the prompt.

    Raises: TemplateError (no template, or it refuses this conversation); UsageError;
    ContextOverflow for a text so long that counting its tokens would take minutes.
    """
    timeline = timeline or Timeline()
    started_s = time.perf_counter()
    if isinstance(request, EmbeddingRequest):
        raise UsageError("Texts to embed are no prompt.", "give one prompt", field="prompt")
    _refuse_endless(request, model)
    if isinstance(request, ChatRequest):
        rendered = render_prompt(request, model)
        timeline.add("template", time.perf_counter() - started_s)
        started_s = time.perf_counter()
        encoded = chat_template.encode(model.tokenizer, rendered, recollection)
        if recollection is not None:
            recollection.ends(rendered)
    else:
        encoded = Encoded(_completion_ids(request, model.tokenizer), ())
    timeline.add("tokenise", time.perf_counter() - started_s)
    if not encoded.tokens:
        raise UsageError(
            "The prompt is empty, and this model has no token to begin a text with.", "give a prompt", field="prompt"
        )
    return encoded


def encode_texts(
    request: EmbeddingRequest, model: ModelFacts, max_tokens: int, timeline: Timeline
) -> tuple[Tokens, ...]:
    """Return the token ids of each text to embed.

    Raises: UsageError (no texts, or an empty one), ContextOverflow; all or none is taken.
    """
    started_s = time.perf_counter()
    if not request.inputs:
        raise UsageError("There is nothing to embed.", "give at least one text", field="input")
    texts = tuple(_text_ids(text, index, model, max_tokens) for index, text in enumerate(request.inputs))
    timeline.add("tokenise", time.perf_counter() - started_s)
    return texts


def render_prompt(request: ChatRequest, model: ModelFacts) -> Rendered:
    """Return the conversation as the chat template writes it. Raises: TemplateError, UsageError."""
    if model.template is None:
        raise chat_template.missing(model.name)
    taken = {"tools", "max_chars"} & request.template_kwargs.keys()
    if taken:
        raise UsageError(
            f"The template argument {min(taken)!r} is a part of the request itself.",
            "rename it",
            field="chat_template_kwargs",
        )
    rendered = model.template.render(
        request.messages,
        tools=request.tools,
        max_chars=4 * count_chars([list(request.messages), list(request.tools)]) + 262_144,
        **request.template_kwargs,
    )
    _refuse_left_out(request, rendered)
    return rendered


def _refuse_left_out(request: ChatRequest, rendered: Rendered) -> None:
    """Refuse a conversation of which the template drops a turn; reasoning alone may be left out of answers."""
    left_out = [i for i in rendered.unseen if request.messages[i].get("role") != "assistant"]
    if left_out:
        raise TemplateError(
            f"The chat template leaves out message {left_out[0]} (role {request.messages[left_out[0]]['role']}): "
            "the model would not see it.",
            "change the conversation, or give another template with --template FILE",
            field=f"messages[{left_out[0]}]",
        )


def _completion_ids(request: CompletionRequest, tokenizer: Tokenizer) -> list[int]:
    """Return the ids of a prompt; with a suffix, both in the model's fill-in-the-middle form."""
    vocabulary = tokenizer.vocabulary
    if request.suffix is None:
        if isinstance(request.prompt, str):
            return tokenizer.encode(request.prompt, parse_special=True, add_bos=True)
        return _checked_ids(request.prompt, vocabulary.n_vocab, "prompt")
    if vocabulary.fim_ids is None:
        raise UsageError("This model cannot fill in: it has no tokens for that.", "leave suffix out", field="suffix")
    before, after, middle = vocabulary.fim_ids
    if isinstance(request.prompt, str):
        prefix = tokenizer.encode(request.prompt, parse_special=False)
    else:
        prefix = _checked_ids(request.prompt, vocabulary.n_vocab, "prompt")
    suffix = tokenizer.encode(request.suffix, parse_special=False, continues=True)
    start = [vocabulary.bos_id] if vocabulary.add_bos and vocabulary.bos_id is not None else []
    return [*start, before, *prefix, after, *suffix, middle]


def _text_ids(text: str | tuple[int, ...], index: int, model: ModelFacts, max_tokens: int) -> list[int]:
    where = {"field": "input", "index": index}
    if not text:
        raise UsageError(f"Input {index} is empty.", "leave it out", **where)
    n_chars = len(text) if isinstance(text, str) else 0
    if n_chars > _MAX_UNCOUNTED_CHARS and n_chars > _MAX_CHARS_PER_TOKEN * max_tokens:
        raise ContextOverflow(
            f"Input {index} has {n_chars} characters; at most {max_tokens} tokens are embedded at once.",
            "split it into parts",
            n_prompt_chars=n_chars,
            n_ctx=max_tokens,
            **where,
        )
    if isinstance(text, str):
        ids = model.tokenizer.encode(text, parse_special=False, add_bos=True)
    else:
        ids = _checked_ids(text, model.tokenizer.vocabulary.n_vocab, "input", index)
    if len(ids) > max_tokens:
        raise ContextOverflow(
            f"Input {index} has {len(ids)} tokens; at most {max_tokens} are embedded at once.",
            "split it into parts, or use a larger --ctx",
            n_prompt_tokens=len(ids),
            n_ctx=max_tokens,
            **where,
        )
    return ids


def _checked_ids(given: Seq[int], n_vocab: int, field: str, index: int | None = None) -> list[int]:
    where = {"field": field} if index is None else {"field": field, "index": index}
    if not isinstance(given, (tuple, list)):  # bytes would pass for ids
        raise UsageError(f"{field} must be a text or a list of token ids.", "decode bytes first", **where)
    for position, token in enumerate(given):
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < n_vocab:
            raise UsageError(
                f"{field} token {position} is not an id of this vocabulary (0 to {n_vocab - 1}).",
                "localllm tokens MODEL --encode shows the ids of a text",
                **where,
            )
    return [int(token) for token in given]


def _refuse_endless(request: GenerationRequest, model: ModelFacts) -> None:
    """Refuse what no context holds before it is rendered and its tokens are counted."""
    if isinstance(request, ChatRequest):
        n_chars = count_chars(list(request.messages))
    else:
        n_chars = sum(len(text) for text in (request.prompt, request.suffix) if isinstance(text, str))
    if n_chars <= _MAX_UNCOUNTED_CHARS or n_chars <= _MAX_CHARS_PER_TOKEN * (largest := model.largest_ctx()):
        return
    raise ContextOverflow(
        f"The prompt has {n_chars} characters; this model and machine allow a context of {largest} tokens.",
        "shorten the prompt",
        n_prompt_chars=n_chars,
        largest_ctx=largest,
    )
