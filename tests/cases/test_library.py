"""Reported faults of other runtimes, as far as the library can show them, on tiny and on real weights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import localllm
from localllm.backends import registry
from localllm.backends.placement import place
from localllm.models.info import read_info
from localllm.runtime.config import LoadConfig
from localllm.runtime.engine import Batch, BatchItem
from localllm.runtime.sampling_params import model_defaults
from localllm.runtime.service import Service
from localllm.runtime.stream import collect
from localllm.runtime.types import CompletionRequest, GenerationOptions

ENDLESS = GenerationOptions(ignore_eos=True, sampling={"temperature": 0.0})


def _open(path: Path, **config: object) -> Service:
    return localllm.open(path, threads=1, **config)


def test_b06_bos_is_added_once_where_the_model_asks_for_it(shared: Path) -> None:
    from localllm import compose

    model = compose.open_tokenizer(shared / "models" / "vocab" / "ggml-vocab-llama-spm.gguf")
    try:
        plain, spelt = (
            model.tokenizer.encode(text, parse_special=True, add_bos=True) for text in ("Hello", "<s>Hello")
        )
    finally:
        model.close()
    assert plain == spelt
    assert plain.count(plain[0]) == 1


@pytest.mark.real
def test_b06_a_chat_has_one_start_mark_a_turn(smollm2: Path) -> None:
    from localllm.runtime.types import ChatRequest

    with _open(smollm2, ctx=256) as service:
        chat = ({"role": "system", "content": "s"}, {"role": "user", "content": "u"})
        ids = service.prompt_tokens(ChatRequest(chat))
        (start,) = service.tokenizer.encode("<|im_start|>", parse_special=True, add_bos=False)
    assert ids[0] == start
    assert ids.count(start) == 3  # system, user, and the answer's


@pytest.mark.parametrize("name", ["llama-dense", "gemma3-dense", "mamba2-dense"])
def test_b14_an_answer_without_limit_ends_when_its_context_is_full(tiny: Path, name: str) -> None:
    with _open(tiny / f"{name}.gguf", ctx=128, parallel=2) as service:
        streams = [service.submit(CompletionRequest((start, 5, 6), ENDLESS)) for start in (3, 4)]
        answers = [collect(stream) for stream in streams]
    assert [answer.choices[0].finish_reason for answer in answers] == ["length", "length"]
    assert all(answer.usage.prompt_tokens + answer.usage.completion_tokens <= 128 for answer in answers)


@pytest.mark.parametrize("prompt", [(7,), tuple(range(3, 40))])
def test_b15_three_equal_prompts_are_answered_alike(tiny: Path, prompt: tuple[int, ...]) -> None:
    options = GenerationOptions(max_tokens=6, ignore_eos=True, sampling={"temperature": 0.0})
    with _open(tiny / "llama-dense.gguf", ctx=256) as service:
        answers = [collect(service.submit(CompletionRequest(prompt, options))) for _ in range(3)]
    assert all(len(answer.choices[0].ids) == 6 for answer in answers)
    assert len({answer.choices[0].ids for answer in answers}) == 1
    assert all(sum(answer.usage.cached_tokens.values()) <= len(prompt) - 1 for answer in answers)


@pytest.mark.parametrize("name", ["llama-dense", "qwen2-dense"])
def test_b23_greedy_is_the_argmax_of_the_raw_logits(tiny: Path, name: str) -> None:
    prompt, n_tokens = tuple(range(3, 20)), 24
    options = GenerationOptions(max_tokens=n_tokens, ignore_eos=True, sampling={"temperature": 0.0})
    with _open(tiny / f"{name}.gguf", ctx=256) as service:
        answer = collect(service.submit(CompletionRequest(prompt, options)))
    assert answer.choices[0].ids == _argmax_answer(tiny / f"{name}.gguf", prompt, n_tokens)


def test_b23_no_penalty_comes_unasked() -> None:
    for stated in ({}, {"temperature": 0.6, "repeat_penalty": 1.1, "presence_penalty": 1.5}):
        sampling = model_defaults(stated)
        assert (sampling.repeat_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1.0, 0.0, 0.0)
        assert sampling.dry_multiplier == 0.0


def _argmax_answer(path: Path, prompt: tuple[int, ...], n_tokens: int) -> tuple[int, ...]:
    info = read_info(path)
    placement = place(info, registry.machine(), LoadConfig(ctx=256, threads=1))
    engine = registry.open_engine(registry.load_model(info, placement), placement)
    eog = set(engine.tokenizer.vocabulary.eog_ids)
    tokens, done = list(prompt), 0
    try:
        while len(tokens) < len(prompt) + n_tokens:
            item = BatchItem(0, done, tokens[done:], n_logits=1)
            done = len(tokens)
            logits = engine.forward(Batch((item,))).logits[0].copy()
            logits[list(eog)] = -np.inf  # what ignore_eos means
            tokens.append(int(logits.argmax()))
    finally:
        engine.close()
    return tuple(tokens[len(prompt) :])


def test_b50_closing_during_a_generation_ends_it_and_leaves_no_thread(tiny: Path) -> None:
    for _ in range(3):
        service = _open(tiny / "llama-dense.gguf", ctx=256)
        stream = service.submit(CompletionRequest((3, 4), ENDLESS))
        next(iter(stream))
        service.close()
        last = [type(event).__name__ for event in stream][-1]
        assert last in ("Error", "Done")
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("localllm")]


def test_b52_a_store_of_any_name_is_listed_without_home_or_temporary_folder(tmp_path: Path) -> None:
    home = tmp_path / "Модели ü 山 (1)" / ("x" * 200) / "dot."
    environment = {**os.environ, "LOCALLLM_HOME": str(home), "TMPDIR": "/no/such/place", "XDG_CONFIG_HOME": "/no/such"}
    environment.pop("HOME", None)
    command = [sys.executable, "-m", "localllm", "ls", "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, json.loads(done.stdout)["models"]) == (0, [])
    assert json.loads(done.stdout)["home"] == str(home)


MEASURE = """
import json, resource, sys
from localllm import compose
from localllm.backends import placement, registry
from localllm.models.kv_types import KvTypes
from localllm.runtime.config import LoadConfig
from localllm.runtime.stream import collect
from localllm.runtime.types import CompletionRequest, GenerationOptions
config = LoadConfig(ctx=int(sys.argv[2]), kv=KvTypes.parse(sys.argv[3]), threads=1)
total = placement.place(compose.find(sys.argv[1])[1], registry.machine(), config).memory.total_bytes
with compose.open(sys.argv[1], config) as service:
    collect(service.submit(CompletionRequest(tuple(range(300, 700)), GenerationOptions(max_tokens=2))))
    try:  # what getrusage says counts the process that forked this one, too
        status = open("/proc/self/status").read()
        peak = 1024 * int(status.partition("VmHWM:")[2].split()[0])
    except OSError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps([total, peak]))
"""


@pytest.mark.real
@pytest.mark.parametrize(("n_ctx", "kv"), [(512, "f16"), (8192, "f16"), (8192, "q8_0")])
def test_b56_the_estimate_is_within_15_percent_of_the_peak(smollm2: Path, n_ctx: int, kv: str) -> None:
    command = [sys.executable, "-c", MEASURE, str(smollm2), str(n_ctx), kv]
    total, peak = json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout)
    assert abs(total / peak - 1) <= 0.15
