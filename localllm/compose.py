"""The only wiring: from a reference and wishes to a model, its placement, an engine and a service."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from localllm.backends import registry
from localllm.backends.cpu.probe import probe
from localllm.backends.placement import Machine, Placement, place, shape_for
from localllm.errors import UsageError
from localllm.models import memory
from localllm.models.info import ModelInfo, read_info, require_generation
from localllm.models.resolve import ModelFile, resolve
from localllm.runtime.config import ANSWER_TOKENS, LoadConfig, RuntimeConfig
from localllm.runtime.types import ChatRequest

if TYPE_CHECKING:
    from localllm.backends.llamacpp.bare import BareLoop
    from localllm.backends.llamacpp.model import LlamaModel
    from localllm.models.tokenizer import Tokenizer
    from localllm.runtime.hooks import Hooks
    from localllm.runtime.prepare import ModelFacts
    from localllm.runtime.service import Service
    from localllm.runtime.types import Request

T = TypeVar("T")
_HANDOVER_S = 0.0002


def open(
    model: str | Path,
    config: LoadConfig = LoadConfig(),
    *,
    runtime: RuntimeConfig = RuntimeConfig(),
    sized_for: Request | None = None,
    hooks: Hooks | None = None,
) -> Service:
    """Load a model and return the service over it.

    With `sized_for`, an automatic context is just long enough for that request and its answer.
    Raises: ModelNotFound, ModelRefused, NotEnoughMemory (before loading), UsageError, TemplateError.
    """
    found, info = find(model)
    source = _template_source(info, config)
    if not source and isinstance(sized_for, ChatRequest):
        from localllm.models.chat_template import missing

        raise missing(found.name)
    machine, placement, weights = _beside(lambda: _load(info, found, config, sized_for is not None), _import_the_rest)
    from localllm.runtime.hooks import NO_HOOKS
    from localllm.runtime.loaded_model import LoadedModel
    from localllm.runtime.service import Service

    try:
        facts = _facts(found, info, source, machine, placement, weights.tokenizer)
        if sized_for is not None and config.ctx is None:
            placement = place(info, machine, config, need_tokens(sized_for, facts))
        engine = registry.open_engine(weights, placement)
    except BaseException:
        weights.close()
        raise
    loaded = LoadedModel(
        name=found.name,
        path=found.path,
        sha256=found.sha256,
        info=info,
        n_ctx=placement.max_sequence_tokens if placement.cut_tokens else engine.spec.pool_tokens,
        n_slots=engine.spec.n_slots,
        sampling=facts.sampling,
        notes=placement.notes,
        settings=_settings(placement),
        is_deterministic=placement.cut_tokens > 0,
    )
    return Service(loaded, facts, engine, _running_at_most(runtime, config.parallel), hooks=hooks or NO_HOOKS)


def open_tokenizer(model: str | Path) -> LlamaModel:
    """Load a vocabulary alone; the result has `.tokenizer` and `.close()`. Raises as `open`."""
    _, info = find(model, needs_weights=False)
    return registry.load_vocabulary(info)


def open_bare(model: str | Path, config: LoadConfig = LoadConfig(), *, need_tokens: int | None = None) -> BareLoop:
    """Load a model for the bare loop that decode is measured against. Raises as `open`."""
    from localllm.backends.llamacpp.bare import BareLoop

    found, info = find(model)
    placement = place(info, registry.machine(), config, need_tokens)
    weights = registry.load_model(info, placement, found.sha256 or "")
    try:
        return BareLoop(weights, registry.context_settings(placement))
    except BaseException:
        weights.close()
        raise


def memory_shape(config: LoadConfig) -> memory.ContextShape:
    """Return what memory depends on under `config` on this CPU; which native library there is, is not asked."""
    return shape_for(config, probe())


def find(model: str | Path, *, needs_weights: bool = True) -> tuple[ModelFile, ModelInfo]:
    """Return a model's files and facts, read under bounds before native code sees them.

    Raises: ModelNotFound; ModelRefused for what is malformed, or cannot answer (an adapter, ...).
    """
    found = resolve(str(model))
    registry.engine_kind(found.path)
    info = read_info(found.path)
    if needs_weights:
        require_generation(info)
    return found, info


def need_tokens(request: Request, facts: ModelFacts) -> int:
    """Return the tokens that a request's prompt and answer may take."""
    from localllm.runtime.prompts import encode_prompt

    n_answer = ANSWER_TOKENS if request.options.max_tokens is None else request.options.max_tokens
    return len(encode_prompt(request, facts).tokens) + n_answer


def _load(
    info: ModelInfo, found: ModelFile, config: LoadConfig, is_sized: bool
) -> tuple[Machine, Placement, LlamaModel]:
    """Place and load the weights; a context to be sized later is checked at its smallest now."""
    machine = registry.machine()
    placement = place(info, machine, config, 1 if is_sized else None)
    return machine, placement, registry.load_model(info, placement, found.sha256 or "")


def _import_the_rest() -> None:
    """Import what only the time after the load needs (numpy, Jinja): a fifth of a second of a start."""
    import localllm.backends.llamacpp.engine
    import localllm.models.template.sandbox
    import localllm.runtime.service  # noqa: F401


def _beside(work: Callable[[], T], meanwhile: Callable[[], None]) -> T:
    """Run `work` on a thread of its own and `meanwhile` on this one; return what `work` returns, or raise it."""
    results, failures = list[T](), list[BaseException]()

    def call() -> None:
        try:
            results.append(work())
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=call, name="localllm-load", daemon=True)
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(_HANDOVER_S)  # the load's many short native calls would wait 5 ms each for the lock
    thread.start()
    try:
        meanwhile()
    finally:
        thread.join()
        sys.setswitchinterval(interval_s)
    if failures:
        raise failures[0]
    return results[0]


def _facts(
    found: ModelFile,
    info: ModelInfo,
    source: str | None,
    machine: Machine,
    placement: Placement,
    tokenizer: Tokenizer,
) -> ModelFacts:
    from localllm.models.chat_template import ChatTemplate
    from localllm.runtime.prepare import ModelFacts
    from localllm.runtime.sampling_params import model_defaults

    vocabulary = tokenizer.vocabulary
    template = source and ChatTemplate(
        source,
        specials=vocabulary.specials,
        bos=_spelling(tokenizer, vocabulary.bos_id),
        eos=_spelling(tokenizer, vocabulary.eos_id),
    )
    budget = int(memory.USABLE_SHARE * machine.available_bytes)
    return ModelFacts(
        name=found.name,
        tokenizer=tokenizer,
        template=template or None,
        sampling=model_defaults(info.sampling_defaults),
        largest_ctx=lambda: memory.largest_ctx(info, budget, placement.shape),
    )


def _template_source(info: ModelInfo, config: LoadConfig) -> str | None:
    if config.template is None:
        return info.chat_template
    from localllm.models.chat_template import MAX_SOURCE_BYTES

    try:
        with config.template.open("rb") as file:
            data = file.read(MAX_SOURCE_BYTES + 1)
        if not data.strip():
            raise UsageError(f"The template {config.template} is empty.", "leave --template out for the model's own")
        return data.decode()
    except OSError as error:
        raise UsageError(
            f"The template {config.template} cannot be read: {error.strerror}.", "--template FILE"
        ) from None
    except UnicodeDecodeError:
        raise UsageError(f"The template {config.template} is not UTF-8 text.", "--template FILE") from None


def _settings(placement: Placement) -> dict[str, object]:
    """Return the parameters in force, by llama-bench's names where it has them."""
    return {
        "n_gpu_layers": placement.n_gpu_layers,
        "n_ctx": placement.n_ctx,
        "n_slots": placement.n_slots,
        "n_batch": placement.n_batch,
        "n_ubatch": placement.n_ubatch,
        "n_threads": placement.n_threads,
        "flash_attn": placement.flash_attn,
        "type_k": placement.kv.k,
        "type_v": placement.kv.v,
        "kv_unified": placement.kv_unified,
        "use_mmap": placement.use_mmap,
        "repack": placement.repack,
    }


def _running_at_most(runtime: RuntimeConfig, parallel: int) -> RuntimeConfig:
    return runtime if runtime.max_running is not None else replace(runtime, max_running=parallel)


def _spelling(tokenizer: Tokenizer, token: int | None) -> str:
    return "" if token is None else tokenizer.piece(token).decode("utf-8", "replace")
