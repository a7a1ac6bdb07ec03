"""The whole benchmark of one model, in its order: what is loaded for which rows, and how each number is taken."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Protocol

from localllm.bench.engine import bandwidth
from localllm.bench.engine.bare_script import BareStart
from localllm.bench.engine.measuring import (
    Bare,
    Sizes,
    Subject,
    context_tokens,
    measure_decode,
    measure_deep,
    measure_overhead,
    measure_parallel,
    measure_prefill,
)
from localllm.bench.engine.recorder import Recorder
from localllm.bench.engine.rows import Case, EngineFacts
from localllm.bench.engine.starts import RunCommand, measure_help, measure_starts
from localllm.bench.engine.watch import Prompts
from localllm.bench.machine import fingerprint
from localllm.models.available import available_bytes
from localllm.models.info import ModelInfo
from localllm.models.memory import kv_bytes_per_token
from localllm.runtime.config import LoadConfig
from localllm.runtime.service import Service
from localllm.runtime.types import GenerationRequest

METHOD = {
    "rows": "{n_reps} repetitions after a warm-up, through Service.submit: greedy, end tokens ignored, random token "
    "ids that no held prefix serves, nothing else in the KV cache; t/s = mean and sample deviation over repetitions",
    "prefill": "from the request to its first token, which one more row of logits decides",
    "depth": "the first tokens are held by a finished request; from the next request to its first token",
    "parallel": "per step, while all sequences decode",
    "overhead": "pairs in turn, the first side changing: {overhead_pairs} of one sequence, {overhead_pairs_parallel} "
    "of {n_parallel}; two contexts with the same settings side by side in this process; the same prompts, "
    "the same number of steps at the same positions, prefill not counted; the bare loop decodes and takes the best "
    "logit; median of the pairs' ratios of speed, bootstrap interval",
    "start": "{start_pairs} pairs in turn of new processes, from their start to their first byte of output, after one "
    "of each: `localllm run` and a script that imports the bindings, loads the model and prefills the same token ids "
    "in a context of the same size, types, threads and batch; peak resident memory by the kernel's high-water mark",
    "bandwidth": "sequential reading by as many threads, over four times the last cache (at most a quarter of what is "
    "free); bytes a token = the weights that one row reads, and the KV of half the answer",
}


class ClosableBare(Bare, Protocol):
    """A bare loop that owns a context."""

    def close(self) -> None:
        """Free the context."""
        ...


class OpensModel(Protocol):
    """Loads what is measured (`opener.Opener`, or a fake)."""

    def info(self) -> ModelInfo:
        """Return what the model's files say."""
        ...

    def service(self, config: LoadConfig, sized_for: GenerationRequest | None = None) -> Service:
        """Load the model behind a service."""
        ...

    def bare(self, config: LoadConfig) -> ClosableBare:
        """Open a bare loop of `config.parallel` sequences with the settings that `service` gets."""
        ...

    def facts(self, service: Service) -> EngineFacts:
        """Return what the rows say of this model and these settings."""
        ...


DEFAULT_SIZES = Sizes()


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured: the model as it was named, how it is loaded, how much of each kind.

    `n_start_pairs` 0 leaves out what starts new processes. `probe_bytes` None = large enough for
    this machine's caches.
    """

    model: str
    config: LoadConfig = LoadConfig()
    sizes: Sizes = DEFAULT_SIZES
    n_start_pairs: int = 6
    n_help: int = 5
    probe_bytes: int | None = None

    def method(self) -> dict[str, str]:
        """Return how each kind of number is taken, in sentences."""
        numbers = asdict(self.sizes) | {"start_pairs": self.n_start_pairs}
        return {name: text.format(**numbers) for name, text in METHOD.items()}


def measure(plan: Plan, recorder: Recorder, opener: OpensModel) -> None:
    """Measure everything in order; what was done when it is interrupted stays in `recorder`."""
    recorder.on_progress("loading", 0, 1)
    info = opener.info()
    recorder.method = plan.method()
    recorder.fingerprint = fingerprint.begin(info)
    _measure_single(plan, info, recorder, opener)
    _measure_deep(plan, info, recorder, opener)
    _measure_parallel(plan, info, recorder, opener)
    if plan.n_start_pairs:
        _measure_starts(plan, info, recorder, opener)
        measure_help(plan.n_help, recorder)
    fingerprint.end(recorder.fingerprint)


def _measure_single(plan: Plan, info: ModelInfo, recorder: Recorder, opener: OpensModel) -> None:
    sizes = plan.sizes
    cases = _fitting((sizes.prefill, sizes.decode, sizes.overhead), plan, info, recorder)
    if not cases:
        return
    config = _config(plan, cases, parallel=1, retained=0)
    with closing(opener.service(config)) as service:
        subject = _subject(opener, service)
        recorder.fingerprint["parameters"] = dict(service.model.settings)
        if sizes.prefill in cases:
            measure_prefill(subject, sizes.prefill, sizes.n_reps, recorder)
        recorder.on_progress("memory bandwidth", 0, 1)
        n_threads = subject.facts.n_threads
        probe = plan.probe_bytes or bandwidth.probe_bytes(bandwidth.last_cache_bytes(), available_bytes())
        recorder.bandwidth = bandwidth.read_bandwidth(n_threads, probe)
        if sizes.decode in cases:
            share = partial(_share, recorder.bandwidth.median, info, plan.config, subject.facts, sizes.n_gen)
            measure_decode(subject, sizes.decode, sizes.n_reps, recorder, share)
        if sizes.overhead in cases:
            with closing(opener.bare(config)) as bare:
                measure_overhead(subject, bare, sizes.overhead, sizes.overhead_pairs, recorder)


def _measure_deep(plan: Plan, info: ModelInfo, recorder: Recorder, opener: OpensModel) -> None:
    for case in _fitting((plan.sizes.deep,), plan, info, recorder):
        config = _config(plan, (case,), parallel=1, retained=1)
        with closing(opener.service(config)) as service:
            measure_deep(_subject(opener, service), case, plan.sizes.n_reps, recorder)


def _measure_parallel(plan: Plan, info: ModelInfo, recorder: Recorder, opener: OpensModel) -> None:
    sizes = plan.sizes
    cases = _fitting((sizes.parallel, sizes.overhead_parallel), plan, info, recorder)
    if not cases:
        return
    config = _config(plan, cases, parallel=sizes.n_parallel, retained=0)
    with closing(opener.service(config)) as service:
        subject = _subject(opener, service)
        if sizes.parallel in cases:
            measure_parallel(subject, sizes.parallel, sizes.n_reps, recorder)
        if sizes.overhead_parallel in cases:
            with closing(opener.bare(config)) as bare:
                measure_overhead(subject, bare, sizes.overhead_parallel, sizes.overhead_pairs_parallel, recorder)


def _measure_starts(plan: Plan, info: ModelInfo, recorder: Recorder, opener: OpensModel) -> None:
    run = RunCommand(plan.model, plan.config, raw=info.chat_template is None)
    request = run.request()
    with closing(opener.service(plan.config, sized_for=request)) as service:
        facts = opener.facts(service)
        tokens = tuple(service.prompt_tokens(request))
        n_ctx = service.model.n_ctx
    bare = BareStart(
        path=info.path,
        tokens=tokens,
        n_ctx=n_ctx,
        n_threads=facts.n_threads,
        n_batch=facts.n_batch,
        n_ubatch=facts.n_ubatch,
        n_gpu_layers=facts.n_gpu_layers,
        repack=facts.repack,
        type_k=facts.type_k,
        type_v=facts.type_v,
        flash_attn=facts.flash_attn,
    )
    measure_starts(run, bare, facts, plan.n_start_pairs, recorder)


def _fitting(cases: Sequence[Case], plan: Plan, info: ModelInfo, recorder: Recorder) -> list[Case]:
    """Return the cases that fit the context; each other one becomes a note."""
    fitting = []
    for case in cases:
        trained = (info.n_ctx_train or context_tokens(case)) * case.n_parallel
        most, needed = min(plan.config.ctx or trained, trained), context_tokens(case)
        if needed <= most:
            fitting.append(case)
        else:
            recorder.notes.append(f"{case.name}: it takes {needed} tokens, the context holds {most}")
    return fitting


def _config(plan: Plan, cases: Sequence[Case], *, parallel: int, retained: int) -> LoadConfig:
    """Return the load settings for these cases: the context asked for, else what the largest of them fills."""
    ctx = plan.config.ctx or max(map(context_tokens, cases))
    return replace(plan.config, ctx=ctx, parallel=parallel, retained=retained)


def _subject(opener: OpensModel, service: Service) -> Subject:
    prompts = Prompts(service.tokenizer.vocabulary.n_vocab)
    return Subject(service, opener.facts(service), prompts)


def _share(
    bytes_per_s: float, info: ModelInfo, config: LoadConfig, facts: EngineFacts, n_gen: int, rate: float
) -> Mapping[str, Any]:
    """Return the bytes a decoded token reads, and their share of what the memory gives at `rate` tokens a second."""
    n_bytes = bandwidth.weight_bytes_per_token(info) + kv_bytes_per_token(info, config.kv) * n_gen // 2
    on_cpu = facts.n_gpu_layers == 0
    return {"bytes_per_token": n_bytes, "bandwidth_share": n_bytes * rate / bytes_per_s if on_cpu else None}
