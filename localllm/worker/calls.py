"""What a worker is asked besides requests: tokens, prompts, counters, its caches."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec

from localllm.errors import LocalLLMError, UsageError
from localllm.models.system import resident_bytes
from localllm.runtime.types import ChatRequest, EmbeddingRequest, GenerationRequest, Request
from localllm.worker.protocol import BadFrame, Call, Result, Submit, request_of

if TYPE_CHECKING:
    from localllm.runtime.service import Service

logger = logging.getLogger("localllm.worker")
T = TypeVar("T")
_KEPT_S = 20.0  # for things to be written: who asks waits for 30
_TIER_COUNTS = ("pool_tokens", "ram_limit_bytes", "ram_bytes", "n_ram_blocks", "n_ram_evictions")


class Tokenize(msgspec.Struct, forbid_unknown_fields=True):
    """Argument of "tokenize"; `with_pieces` asks for each token's bytes too."""

    text: str
    parse_special: bool = False
    add_bos: bool = False
    with_pieces: bool = False


class Detokenize(msgspec.Struct, forbid_unknown_fields=True):
    """Argument of "detokenize"."""

    tokens: list[int]


class RamLimit(msgspec.Struct, forbid_unknown_fields=True):
    """Argument of "limit_ram"."""

    limit_bytes: Annotated[int, msgspec.Meta(ge=0)]


class Prompt(msgspec.Struct, forbid_unknown_fields=True):
    """Argument of "template", "prompt_tokens", "explain", "document" and "kept": a request as `Submit` holds it."""

    kind: str
    request: dict[str, Any]


class Calls:
    """Answers `Call` frames about one service."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._slow: Mapping[str, Callable[[Any], Any]] = {
            "tokenize": self._tokenize,
            "detokenize": self._detokenize,
            "template": self._template,
            "prompt_tokens": self._prompt_tokens,
        }
        self._about_caches: Mapping[str, Callable[[Any], Any]] = {
            "explain": lambda argument: service.explain(_request(argument)),
            "document": lambda argument: {"tokens": service.document(_request(argument))},
            "clear_cache": lambda argument: service.clear_cache(),
        }
        self._quick: Mapping[str, Callable[[Any], Any]] = {
            "stats": self._stats,
            "cache_stats": lambda argument: service.cache_stats(),
        }
        self._about_writing: Mapping[str, Callable[[Any], Any]] = {
            "kept": lambda argument: dict(service.kept(_prompt(argument), _KEPT_S))
        }
        self._limits: Mapping[str, Callable[[Any], Any]] = {
            "limit_ram": lambda argument: service.limit_ram(_argument(argument, RamLimit).limit_bytes)
        }

    def is_slow(self, call: Call) -> bool:
        """Say whether an answer may take long enough to keep others waiting."""
        return call.verb in self._slow

    def is_about_caches(self, call: Call) -> bool:
        """Say whether an answer may wait for the engine's thread or the disk, for seconds."""
        return call.verb in self._about_caches

    def is_about_writing(self, call: Call) -> bool:
        """Say whether an answer waits until things are written: those who clear the caches must not wait behind it."""
        return call.verb in self._about_writing

    def is_limit(self, call: Call) -> bool:
        """Say whether a call frees memory: it waits for nothing, and that may take a second."""
        return call.verb in self._limits

    def answer(self, call: Call) -> Result:
        """Return the answer. Raises UsageError for an unknown verb or a bad argument, and what the runtime raises."""
        kinds = (self._slow, self._about_caches, self._about_writing, self._limits, self._quick)
        verb = next((kind[call.verb] for kind in kinds if call.verb in kind), None)
        if verb is None:
            raise UsageError("There is no such call.", "use the same version on both sides", field="verb")
        return Result(call.number, msgspec.to_builtins(verb(call.argument)))

    def _tokenize(self, argument: Any) -> dict[str, Any]:
        wanted = _argument(argument, Tokenize)
        tokenizer = self._service.tokenizer
        tokens = tokenizer.encode(wanted.text, parse_special=wanted.parse_special, add_bos=wanted.add_bos)
        if not wanted.with_pieces:
            return {"tokens": tokens}
        return {"tokens": tokens, "pieces": [list(tokenizer.piece(token)) for token in tokens]}

    def _detokenize(self, argument: Any) -> dict[str, Any]:
        tokens = _argument(argument, Detokenize).tokens
        n_vocab = self._service.tokenizer.vocabulary.n_vocab
        for position, token in enumerate(tokens):
            if not 0 <= token < n_vocab:
                raise UsageError(
                    f"Token {position} is not an id of this vocabulary (0 to {n_vocab - 1}).",
                    "localllm tokens MODEL TEXT shows the ids of a text",
                    field="tokens",
                )
        return {"text": self._service.tokenizer.decode(tokens)}

    def _template(self, argument: Any) -> dict[str, Any]:
        request = _request(argument)
        if not isinstance(request, ChatRequest):
            raise UsageError("Only a conversation has a template.", "send messages", field="messages")
        text, tokens = self._service.render_prompt(request)
        return {"prompt": text, "n_tokens": len(tokens)}

    def _prompt_tokens(self, argument: Any) -> dict[str, Any]:
        return {"tokens": self._service.prompt_tokens(_request(argument))}

    def _stats(self, argument: Any) -> dict[str, Any]:
        caches = msgspec.to_builtins(self._service.cache_stats())
        disk = {f"disk_{name}": value for name, value in (caches["disk"] or {}).items()}
        tiers = {name: caches[name] for name in _TIER_COUNTS}
        return {**msgspec.to_builtins(self._service.stats()), **tiers, **disk, "rss_bytes": resident_bytes()}


def unexpected(error: BaseException) -> LocalLLMError:
    """Return a failure as others are told it: of one that nobody foresaw, its own text might quote a prompt."""
    if isinstance(error, LocalLLMError):
        return error
    if isinstance(error, BadFrame):
        return UsageError("The answer to this is too large for one message.", "ask for less at once")
    logger.error("%s\n%s", type(error).__name__, "".join(traceback.format_tb(error.__traceback__)))
    return LocalLLMError(f"The model's process failed at this ({type(error).__name__}).", "localllm doctor")


def _argument(argument: Any, kind: type[T]) -> T:
    try:
        return msgspec.convert(argument, kind)
    except msgspec.ValidationError as error:
        raise UsageError(f"The argument of this call is wrong: {error}", "use the same version on both sides") from None


def _prompt(argument: Any) -> GenerationRequest:
    request = _request(argument)
    if isinstance(request, EmbeddingRequest):
        raise UsageError("Texts to embed are never cached.", "give one prompt", field="prompt")
    return request


def _request(argument: Any) -> Request:
    wanted = _argument(argument, Prompt)
    try:
        return request_of(Submit(0, wanted.kind, wanted.request))
    except BadFrame:
        raise UsageError("This is no request.", "use the same version on both sides", field="request") from None
