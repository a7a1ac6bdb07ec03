"""A plan makes exactly what it says go wrong, once in all workers, and nothing without the switch."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from localllm.errors import EngineError
from localllm.runtime import events
from localllm.runtime.engine import Batch, BatchItem, Clear, NoRoom
from localllm.runtime.stream import collect
from localllm.runtime.types import ChatRequest, CompletionRequest, GenerationOptions
from localllm.worker.faults import Plan, plan_of_environment
from localllm.worker.faulty_engine import FaultyEngine, happen
from localllm.worker.protocol import Failed, Loaded
from tests.conftest import PROJECT
from tests.fake_engine import EOS, SPEC, FakeEngine, fake_service
from tests.worker.lone_worker import FAKE, LoneWorker, load_frame, text_of, wait_until

ENDLESS = {**FAKE, "FAKE_NO_EOS": "1", "FAKE_STEP_MS": "2"}


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    return tmp_path / "plan.json"


def write(path: Path, *faults: dict[str, Any]) -> Path:
    named = [{"id": f"f{index}", **fault} for index, fault in enumerate(faults)]
    beside = path.with_suffix(".new")
    beside.write_text(json.dumps({"faults": named}))
    return beside.rename(path)


def fired(path: Path) -> list[dict[str, Any]]:
    file = Path(f"{path}.fired")
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def rows(*tokens: int, start: int = 0) -> Batch:
    return Batch((BatchItem(0, start, tokens, 1),))


def test_a_fault_fires_at_its_step_once_and_never_again(plan_file: Path) -> None:
    write(plan_file, {"do": "stall", "step": 3})
    plan = Plan(plan_file)
    assert [len(plan.due("forward")) for _ in range(6)] == [0, 0, 1, 0, 0, 0]
    assert [entry["step"] for entry in fired(plan_file)] == [3]
    assert [len(Plan(plan_file).due("forward")) for _ in range(6)] == [0] * 6  # nor in another worker


def test_a_fault_may_fire_several_times_in_all(plan_file: Path) -> None:
    write(plan_file, {"do": "stall", "times": 3})
    first, second = Plan(plan_file), Plan(plan_file)
    n_fired = sum(len(plan.due("forward")) for plan in (first, second) * 4)
    assert n_fired == len(fired(plan_file)) == 3


def test_steps_count_from_when_the_plan_was_read(plan_file: Path) -> None:
    plan = Plan(plan_file)
    assert not plan.due("forward")  # no plan yet
    write(plan_file, {"do": "stall", "in_steps": 2})
    assert [len(plan.due("forward")) for _ in range(4)] == [0, 1, 0, 0]
    write(plan_file, {"id": "another", "do": "stall"})
    assert [fault.id for fault in plan.due("forward")] == ["another"]
    plan_file.unlink()
    assert not plan.due("forward")


def test_a_fault_may_wait_for_tokens(plan_file: Path) -> None:
    write(plan_file, {"do": "stall", "on_tokens": [7, 8]})
    plan = Plan(plan_file)
    assert not plan.due("forward", [(7, 9, 8), (8, 7)])
    assert plan.due("forward", [(1,), (6, 7, 8)])


def test_points_are_told_apart(plan_file: Path) -> None:
    write(plan_file, {"do": "stall", "point": "edit"}, {"do": "stall", "point": "after_forward"})
    plan = Plan(plan_file)
    assert not plan.due("forward")
    assert [fault.id for fault in plan.due("edit")] == ["f0"]
    assert [fault.id for fault in plan.due("after_forward")] == ["f1"]


def test_without_a_plan_nothing_goes_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCALLLM_FAULT_PLAN", raising=False)
    engine = FaultyEngine(FakeEngine(), plan_of_environment())
    assert engine.forward(rows(1, 2)).logits.shape == (1, SPEC.n_vocab)


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ({"do": "raise"}, RuntimeError),
        ({"do": "raise", "error": "MemoryError"}, MemoryError),
        ({"do": "raise", "error": "EngineError"}, EngineError),
        ({"do": "raise", "error": "NoRoom"}, NoRoom),
        ({"do": "rc", "code": 1}, NoRoom),
        ({"do": "rc", "code": -3}, EngineError),
        ({"do": "raise", "error": "KeyError", "point": "after_forward"}, KeyError),
    ],
)
def test_a_forward_fails_as_planned_and_the_next_does_not(
    plan_file: Path, fault: dict[str, Any], error: type[BaseException]
) -> None:
    engine = FaultyEngine(FakeEngine(), Plan(write(plan_file, fault)))
    with pytest.raises(error):
        engine.forward(rows(1, 2))
    engine.edit([Clear(0)])
    assert len(engine.forward(rows(1, 2)).logits) == 1


def test_an_edit_fails_as_planned(plan_file: Path) -> None:
    engine = FaultyEngine(FakeEngine(), Plan(write(plan_file, {"do": "raise", "point": "edit"})))
    engine.edit([])  # nothing is edited: nothing can fail
    with pytest.raises(RuntimeError):
        engine.edit([Clear(0)])


def test_a_logit_is_corrupted_in_a_copy(plan_file: Path) -> None:
    write(plan_file, {"do": "logit", "token": 65, "value": "nan"}, {"do": "logit", "token": 66, "value": 1e30})
    logits = FaultyEngine(FakeEngine(), Plan(plan_file)).forward(rows(1)).logits
    clean = FakeEngine().forward(rows(1)).logits
    assert logits[0, 65] != logits[0, 65]
    assert logits[0, 66] > 1e29
    assert (logits[0, :65] == clean[0, :65]).all()


def test_a_corrupted_logit_ends_its_request_alone(plan_file: Path) -> None:
    write(plan_file, {"do": "logit", "token": 65, "value": "nan", "step": 2})
    with fake_service(hooks=faulty_hooks(plan_file)) as service:
        answer = list(service.submit(CompletionRequest("a", GenerationOptions(max_tokens=5, ignore_eos=True))))
        assert isinstance(answer[-1], events.Error)
        assert isinstance(list(service.submit(CompletionRequest("a")))[-1], events.Done)


def faulty_hooks(path: Path) -> Any:
    from localllm.runtime.hooks import Hooks

    return Hooks(wrap_engine=lambda engine: FaultyEngine(engine, Plan(path)))


def test_a_list_of_tokens_becomes_every_answer(plan_file: Path) -> None:
    said = "né ☃"
    write(plan_file, {"do": "tokens", "tokens": list(said.encode())})
    with fake_service(hooks=faulty_hooks(plan_file)) as service:
        chat = ChatRequest(({"role": "user", "content": "x" * 700},), GenerationOptions(n=2))  # several chunks
        streams = [service.submit(chat), service.submit(CompletionRequest("y"))]
        for stream in streams:
            assert {choice.text for choice in collect(stream).choices} == {said}
        again = collect(service.submit(chat))
        assert (again.text, again.choices[0].finish_reason, EOS in again.choices[0].ids) == (said, "stop", False)


SCRIPT = "import sys\nfrom localllm.worker.faulty_engine import happen\nfrom localllm.worker.faults import Fault\n"


@pytest.mark.parametrize("name", ["SIGSEGV", "SIGABRT", "SIGBUS", "SIGILL", "SIGFPE", "SIGKILL"])
def test_a_signal_ends_the_process(name: str) -> None:
    script = SCRIPT + f"happen(Fault('x', 'signal', signal={name!r}))\n"
    done = subprocess.run([sys.executable, "-c", script], cwd=PROJECT, timeout=20, check=False)
    assert done.returncode == -signal.Signals[name]


def test_the_kth_file_operation_fails_and_the_next_does_not(tmp_path: Path) -> None:
    script = SCRIPT + (
        "happen(Fault('x', 'file', k=3, error='ENOSPC'))\n"
        "made = []\n"
        "for name in 'abcd':\n"
        "    try: open(sys.argv[1] + name, 'w'); made.append(name)\n"
        "    except OSError as error: made.append(error.errno)\n"
        "print(made)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, f"{tmp_path}/"], cwd=PROJECT, timeout=20, check=True, capture_output=True
    )
    assert done.stdout.decode().strip() == "['a', 'b', 28, 'd']"


def test_the_kth_call_finds_no_memory_wherever_it_is(plan_file: Path) -> None:
    for k in (1, 2, 5, 20, 60, 120, 250):
        path = write(plan_file.with_name(f"{k}.json"), {"do": "allocation", "k": k, "step": 2})
        with fake_service(hooks=faulty_hooks(path)) as service:
            stream = service.submit(CompletionRequest("a", GenerationOptions(max_tokens=6, ignore_eos=True)))
            answer = list(stream)
            assert isinstance(answer[-1], (events.Error, events.Done))
            assert fired(path)
            if isinstance(answer[-1], events.Error) and not service.is_alive:
                continue  # the loop itself found none: it says so, and its process ends
            again = CompletionRequest("b", GenerationOptions(max_tokens=6, ignore_eos=True))
            assert isinstance(list(service.submit(again))[-1], events.Done)


@pytest.mark.parametrize("name", ["SIGSEGV", "SIGABRT", "SIGKILL"])
def test_a_worker_dies_where_the_plan_says_and_its_board_tells_of_whom(name: str, plan_file: Path) -> None:
    write(plan_file, {"do": "signal", "signal": name, "step": 6})
    with LoneWorker({**ENDLESS, "LOCALLLM_FAULT_PLAN": str(plan_file)}) as worker:
        worker.load()
        worker.submit(5, CompletionRequest("x", GenerationOptions(max_tokens=50)))
        while worker.next_frame() is not None:
            pass
        assert worker.returncode() == -signal.Signals[name]
        state = worker.board.read()
        assert (state.step, state.is_running, state.numbers) == (6, True, (5,))
        assert len(text_of(worker.events[5])) == 5
    with LoneWorker({**ENDLESS, "LOCALLLM_FAULT_PLAN": str(plan_file)}) as worker:
        worker.load()
        worker.submit(5, CompletionRequest("x", GenerationOptions(max_tokens=50)))
        assert isinstance(worker.answer(5)[-1], events.Done)
    assert len(fired(plan_file)) == 1


@pytest.mark.parametrize("gil", [False, True])
def test_a_hang_answers_no_ping_and_shows_on_the_board(gil: bool, plan_file: Path) -> None:
    write(plan_file, {"do": "hang", "gil": gil, "step": 3})
    with LoneWorker({**ENDLESS, "LOCALLLM_FAULT_PLAN": str(plan_file)}) as worker:
        worker.load()
        worker.submit(5, CompletionRequest("x", GenerationOptions(max_tokens=50)))
        wait_until(lambda: bool(fired(plan_file)))
        state = worker.board.read()
        assert (state.step, state.is_running, state.numbers) == (3, True, (5,))
        worker.socket.settimeout(0.3)
        with pytest.raises((TimeoutError, AssertionError)):
            worker.call(1, "ping")
        assert worker.board.read() == state


def test_a_worker_dies_while_it_loads(plan_file: Path) -> None:
    write(plan_file, {"do": "signal", "point": "load"})
    with LoneWorker({**FAKE, "LOCALLLM_FAULT_PLAN": str(plan_file)}) as worker:
        worker.send(load_frame())
        assert worker.next_frame() is None
        assert worker.returncode() == -signal.SIGSEGV


def test_a_file_operation_that_fails_while_loading_is_survived_or_told(plan_file: Path) -> None:
    for k in (1, 2, 3):
        write(plan_file, {"id": f"k{k}", "do": "file", "point": "load", "k": k})
        with LoneWorker({**FAKE, "LOCALLLM_FAULT_PLAN": str(plan_file)}) as worker:
            worker.send(load_frame())
            assert isinstance(worker.next_frame(), (Loaded, Failed))
    assert len(fired(plan_file)) == 3


@pytest.mark.parametrize("switch", [{}, {"LOCALLLM_FAULTS": "0"}, {"LOCALLLM_FAULTS": ""}])
def test_without_the_switch_there_are_no_faults(switch: dict[str, str], plan_file: Path) -> None:
    write(plan_file, {"do": "signal", "point": "load"})
    with LoneWorker({**FAKE, "LOCALLLM_FAULT_PLAN": str(plan_file), "LOCALLLM_FAULTS": "", **switch}) as worker:
        worker.send(load_frame("/nowhere/model.gguf"))
        assert worker.expect(Failed).code == "model_not_found"  # neither died nor loaded another engine
    assert not fired(plan_file)


def test_the_worker_module_itself_imports_no_fault() -> None:
    script = "import sys, localllm.worker.main\nprint([n for n in sys.modules if 'fault' in n and 'localllm' in n])"
    environment = {**os.environ, "LOCALLLM_FAULTS": "1"}
    done = subprocess.run([sys.executable, "-c", script], cwd=PROJECT, env=environment, capture_output=True, check=True)
    assert done.stdout.decode().strip() == "[]"


def test_a_hook_that_is_no_fault_happens_as_nothing() -> None:
    from localllm.worker.faults import Fault

    happen(Fault("x", "rc", code=0))
