"""The answers of the generation routes as structs: only /openapi.json reads them; encoders write what they say."""

from __future__ import annotations

from typing import Literal

import msgspec


class CachedByTier(msgspec.Struct, frozen=True):
    """Prompt tokens that were not computed, by where their KV was."""

    device: int
    ram: int
    disk: int


class CachedDetails(msgspec.Struct, frozen=True):
    """Prompt tokens that were not computed."""

    cached_tokens: int
    cached_tokens_by_tier: CachedByTier


class CompletionDetails(msgspec.Struct, frozen=True):
    """Of the answer's tokens, those of a kind; drafted ones among them."""

    reasoning_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class UsageBody(msgspec.Struct, frozen=True):
    """What a request cost in tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedDetails
    completion_tokens_details: CompletionDetails


class Timings(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """llama.cpp's times in ms, that in the queue, and the limit of an answer where it was lowered."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_second: float
    queue_ms: float
    max_tokens: int = 0
    max_tokens_asked: int = 0
    timeline_ms: dict[str, float] = {}


class TopLogprob(msgspec.Struct, frozen=True):
    """A token that could have stood there."""

    id: int
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct, frozen=True):
    """A token of the answer, and the best ones at its place."""

    id: int
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """An entry a token."""

    content: list[TokenLogprob]
    refusal: None


class ChatMessage(msgspec.Struct, frozen=True):
    """The answer."""

    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(msgspec.Struct, frozen=True):
    """One answer of several."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length"]


class OwnFields(msgspec.Struct, frozen=True):
    """What no other server tells. `deterministic`: equal requests get answers equal to the last bit."""

    deterministic: bool


class WholeAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What every whole answer holds. `localllm`: from a model that was loaded with --deterministic."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    usage: UsageBody
    timings: Timings
    localllm: OwnFields | msgspec.UnsetType = msgspec.UNSET


class ChatAnswer(WholeAnswer, frozen=True, kw_only=True):
    """A whole chat answer."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """The older shape: an entry a token in each list."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct, frozen=True):
    """One answer of several."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"]


class CompletionAnswer(WholeAnswer, frozen=True, kw_only=True):
    """A whole completion."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class ChatDelta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is new: the role first, then text; nothing at the end."""

    role: Literal["assistant", ""] = ""
    content: str = ""


class ChatChunkChoice(msgspec.Struct, frozen=True):
    """What is new of one answer."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length"] | None


class PromptProgress(msgspec.Struct, frozen=True):
    """How far the prompt is computed, in tokens, and the time so far in ms."""

    total: int
    cache: int
    processed: int
    time_ms: float


class ChunkUsage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a request has cost so far; the details come at the end."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedDetails | None = None
    completion_tokens_details: CompletionDetails | None = None


class Chunk(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What every server-sent event holds. `usage` (null until the end) and `timings` where they were asked for."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    usage: ChunkUsage | None = None
    timings: Timings | None = None
    prompt_progress: PromptProgress | None = None
    localllm: OwnFields | None = None


class ChatChunk(Chunk, frozen=True, kw_only=True, omit_defaults=True):
    """The data of one server-sent event of a chat."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]


class CompletionChunkChoice(msgspec.Struct, frozen=True):
    """What is new of one answer."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None


class CompletionChunk(Chunk, frozen=True, kw_only=True, omit_defaults=True):
    """The data of one server-sent event of a completion."""

    object: Literal["text_completion"]
    choices: list[CompletionChunkChoice]


class ErrorFacts(msgspec.Struct, frozen=True):
    """Why a request failed; the numbers behind it stand beside. `param`: the field at fault, where one is."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(msgspec.Struct, frozen=True):
    """Every failure's body."""

    error: ErrorFacts
