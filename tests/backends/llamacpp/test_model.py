"""Loading and closing: refusals carry the library's reason, nothing leaks, nothing reaches stderr."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from gguf import GGUFReader, GGUFValueType, GGUFWriter

from localllm.backends.llamacpp import bindings
from localllm.backends.llamacpp.bare import BareLoop
from localllm.backends.llamacpp.engine import LlamaEngine
from localllm.backends.llamacpp.model import LlamaModel
from localllm.backends.llamacpp.settings import ModelSettings
from localllm.errors import EngineError, ModelRefused
from localllm.models.info import read_info
from tests.backends.llamacpp.lanes import TEXT, feed, open_model, opened, settings
from tests.conftest import PROJECT

MODEL = "llama-dense.gguf"


@pytest.mark.parametrize("content", [b"", b"GGUF", b"x" * 5000, b"GGUF" + b"\xff" * 5000])
def test_a_file_that_is_no_model_is_refused(tiny: Path, tmp_path: Path, content: bytes) -> None:
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(content)
    info = replace(read_info(tiny / MODEL), path=bad, files=(bad,))
    with pytest.raises(ModelRefused, match=r"bad\.gguf"):
        LlamaModel.load(info, ModelSettings())


def test_a_cut_file_is_refused_with_the_librarys_reason(tiny: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes((tiny / MODEL).read_bytes()[:-100_000])
    info = replace(read_info(tiny / MODEL), path=cut, files=(cut,))
    with pytest.raises(ModelRefused, match="not within the file bounds"):
        LlamaModel.load(info, ModelSettings())


def test_a_path_with_spaces_and_other_scripts_loads(tiny: Path, tmp_path: Path) -> None:
    folder = tmp_path / "Модели ü 山 (1)"
    folder.mkdir()
    path = folder / "a b.gguf"
    path.symlink_to(tiny / MODEL)
    with opened(path) as engine:
        assert feed(engine, 0, TEXT[:5]).shape == (128,)


def test_a_model_without_a_vocabulary_takes_ids_only(tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "no-vocabulary.gguf"
    _write_without_vocabulary(tiny / MODEL, path)
    with opened(path) as engine, opened(tiny / MODEL) as whole:
        assert (feed(engine, 0, TEXT[:20]) == feed(whole, 0, TEXT[:20])).all()
        assert (engine.tokenizer.piece(5), engine.tokenizer.decode([5, 6])) == (b"", "")
        with pytest.raises(ModelRefused, match="no vocabulary"):  # llama.cpp aborts on these
            engine.tokenizer.encode("text", parse_special=True)


def test_a_context_that_cannot_be_opened_says_why(tiny: Path) -> None:
    model = open_model(tiny / MODEL)
    with pytest.raises(EngineError, match="flash_attn") as refused:
        LlamaEngine(model, settings(kv_v="q8_0", flash_attn="off"))
    assert "--flash-attn" in refused.value.hint
    model.close()


@pytest.mark.parametrize("short", [{"n_ctx": 2}, {"n_batch": 2, "n_ubatch": 2}])
def test_a_context_without_a_row_for_every_slot_is_refused_not_asserted(tiny: Path, short: dict[str, int]) -> None:
    model = open_model(tiny / MODEL)
    with pytest.raises(EngineError, match="no row"):
        LlamaEngine(model, settings(n_slots=3, **short))
    model.close()


NO_ROOM = """
import resource, sys
from pathlib import Path
from localllm.errors import NotEnoughMemory
from tests.backends.llamacpp.lanes import open_model, settings
model = open_model(Path(sys.argv[1]))
pages = int(Path("/proc/self/statm").read_text().split()[0])
room = pages * resource.getpagesize() + 200_000_000
resource.setrlimit(resource.RLIMIT_AS, (room, room))
try:
    model.open_context(settings(n_ctx=1 << 20))
except NotEnoughMemory as error:
    print(error.message)
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc and a limit of the address space")
def test_an_allocation_that_fails_is_told_as_missing_memory(tiny: Path) -> None:
    command = [sys.executable, "-c", NO_ROOM, str(tiny / MODEL)]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=60, check=True)
    assert "no memory for a context of 1048576 tokens" in done.stdout


def test_the_model_lives_until_its_last_context_closes(tiny: Path) -> None:
    model = open_model(tiny / MODEL)
    first, second = LlamaEngine(model, settings()), LlamaEngine(model, settings())
    model.close()
    first.close()
    first.close()
    assert feed(second, 0, TEXT[:5]).shape == (128,)
    second.close()
    with pytest.raises(EngineError, match="closed"):
        LlamaEngine(model, settings())


def test_the_bare_loop_runs_beside_an_engine_on_the_same_weights(tiny: Path) -> None:
    model = open_model(tiny / MODEL)
    engine, bare = LlamaEngine(model, settings()), BareLoop(model, settings())
    assert bare.decode([TEXT[:40], TEXT[5:300]], 20) > 0
    assert bare.decode([TEXT[:40]], 20) > 0  # its cache is emptied each time
    with pytest.raises(EngineError):
        bare.decode([[]], 1)
    assert feed(engine, 0, TEXT[:5]).shape == (128,)
    bare.close()
    engine.close()


def test_nothing_is_left_after_twenty_openings(tiny: Path) -> None:
    code = f"""
import ctypes, gc, sys
from pathlib import Path
import psutil
from tests.backends.llamacpp.lanes import TEXT, feed, opened
process = psutil.Process()
def open_and_close(times):
    for _ in range(times):
        with opened(Path({str(tiny / "qwen35-dense.gguf")!r}), n_ctx=8192, kv_k="f16", kv_v="f16") as engine:
            feed(engine, 0, TEXT[:100])
            engine.export(0, 0, 100)
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)  # what is freed but kept for reuse is no leak
    return process.memory_info().rss, process.num_fds(), process.num_threads()
before, after = open_and_close(10), open_and_close(20)
assert after[1] <= before[1] and after[2] <= before[2], (before, after)
assert after[0] - before[0] < 4_000_000, (before, after)  # one context alone takes 10 MB
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=PROJECT)
    assert done.returncode == 0, done.stderr


def test_native_code_says_nothing_by_itself(tiny: Path) -> None:
    code = f"""
import sys
from pathlib import Path
from localllm.models.info import read_info
from localllm.backends.llamacpp.model import LlamaModel
from localllm.backends.llamacpp.engine import LlamaEngine
from localllm.backends.llamacpp.settings import ContextSettings, ModelSettings
path = Path({str(tiny / MODEL)!r})
model = LlamaModel.load(read_info(path), ModelSettings())
engine = LlamaEngine(model, ContextSettings(n_ctx=256, n_slots=2))
engine.close()
assert model.native.log.lines(), "what it says is kept"
assert not {{"jinja2", "llama_cpp", "llama_cpp.llama"}} & set(sys.modules), "only the low-level module is loaded"
import llama_cpp  # the package itself is still whole for others
assert llama_cpp.Llama
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=os.environ)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_log_keeps_little_and_names_the_first_error() -> None:
    log = bindings.NativeLog()
    log.add(2, b"loading\n")
    log.add(4, b"load: bad ma")
    log.add(5, b"gic\n")
    log.add(4, b"second\n")
    assert log.reason() == "bad ma"
    for number in range(2000):
        log.add(2, b"line %d\n" % number)
    assert len(log.lines()) == 400
    log.clear()
    assert (log.lines(), log.reason()) == ([], "")


def _write_without_vocabulary(source: Path, target: Path) -> None:
    reader, writer = GGUFReader(source), GGUFWriter(target, "llama")
    for key, field in reader.fields.items():
        if key.startswith("llama.") and field.types[0] != GGUFValueType.ARRAY:
            writer.add_key_value(key, field.contents(), field.types[0])
    writer.add_string("tokenizer.ggml.model", "no_vocab")
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
