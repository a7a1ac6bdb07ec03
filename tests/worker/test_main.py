"""The worker process as its supervisor sees it: loads, answers, and is gone when it should be."""

from __future__ import annotations

import hashlib
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path

import pytest

import localllm
from localllm.models.resolve import resolve
from localllm.runtime import events
from localllm.runtime.config import LoadConfig, RuntimeConfig, TierConfig
from localllm.runtime.stream import collect
from localllm.runtime.types import ChatRequest, CompletionRequest, GenerationOptions
from localllm.worker import main
from localllm.worker.board import StepBoard
from localllm.worker.main import EXIT_BAD_FRAME, EXIT_ENDED, EXIT_ENGINE_DIED, EXIT_FAILED
from localllm.worker.protocol import Accepted, Call, Cancel, Failed, Happened, Loaded, Log, Result, submit_frame
from tests.fake_engine import fake_service
from tests.worker.lone_worker import FAKE, LoneWorker, is_over, load_frame, text_of, wait_until

HELLO = ChatRequest(({"role": "user", "content": "hello"},), GenerationOptions(max_tokens=9))
ENDLESS = {**FAKE, "FAKE_NO_EOS": "1", "FAKE_STEP_MS": "3"}


def endless(n_tokens: int = 4000, **options: object) -> CompletionRequest:
    return CompletionRequest("go on", GenerationOptions(max_tokens=n_tokens, **options))  # type: ignore[arg-type]


def test_it_loads_says_what_it_is_and_answers_like_the_service_in_process() -> None:
    with fake_service() as alone:
        wanted = collect(alone.submit(HELLO))
    with LoneWorker() as worker:
        model = worker.load(load_frame("some.gguf", name="some", config=LoadConfig(parallel=3)))
        assert (model["name"], model["path"], model["n_ctx"], model["can_chat"]) == ("some", "some.gguf", 4096, True)
        assert model["config"]["parallel"] == 3
        worker.submit(1, HELLO)
        answer = collect(worker.answer(1))
        assert (answer.text, answer.choices, answer.seed != 0) == (wanted.text, wanted.choices, True)
        assert worker.board.read().step == answer.usage.completion_tokens
        worker.socket.close()
        assert worker.returncode() == EXIT_ENDED


def test_a_step_of_several_streams_is_one_frame() -> None:
    with LoneWorker(ENDLESS) as worker:
        worker.load()
        for number in range(4):
            worker.submit(number, endless(60))
        for number in range(4):
            worker.answer(number)
        n_steps = worker.call(99, "stats")["n_steps"]
        assert worker.n_happened <= n_steps + 8  # and those that say that a request is queued


def test_the_board_names_who_is_in_the_step() -> None:
    with LoneWorker({**ENDLESS, "FAKE_STEP_MS": "300"}) as worker:
        worker.load()
        worker.submit(41, endless())
        worker.submit(42, endless())
        wait_until(lambda: worker.board.read().is_running and set(worker.board.read().numbers) == {41, 42})
        assert worker.board.read().step >= 1


def test_every_request_is_told_by_its_fingerprint_before_its_first_event() -> None:
    with LoneWorker() as worker:
        worker.load()
        prints = []
        for number in (1, 2):
            worker.submit(number, HELLO)
            prints.append(worker.expect(Accepted).fingerprint)
            assert number not in worker.events
            worker.answer(number)
        assert prints[0] == prints[1]


def test_suspects_of_the_load_run_alone_or_not_at_all() -> None:
    with LoneWorker(ENDLESS) as worker:
        worker.load()
        worker.submit(1, HELLO)
        worker.submit(2, endless(3))
        marks = {a.number: a.fingerprint for a in (worker.expect(Accepted), worker.expect(Accepted))}
    with LoneWorker(ENDLESS) as worker:
        worker.load(load_frame(lone=[marks[2]], refused=[marks[1]]))
        worker.submit(1, HELLO)
        (error,) = worker.answer(1)
        assert isinstance(error, events.Error)
        assert error.code == "request_crashes_engine"
        worker.submit(3, endless(40))
        worker.until(lambda: bool(text_of(worker.events.get(3, []))))
        worker.submit(2, endless(3))
        worker.answer(2)
        assert is_over(worker.events[3])  # it had to end first


@pytest.mark.parametrize(
    ("environment", "frame", "code"),
    [
        ({}, load_frame("/nowhere/at/all.gguf"), "model_not_found"),
        ({"LOCALLLM_ENGINE": "tests.fake_engine:parts"}, load_frame("/nowhere/at/all.gguf"), "model_not_found"),
        ({**FAKE, "LOCALLLM_ENGINE": "tests.fake_engine:nothing"}, load_frame(), "invalid_request"),
        ({**FAKE, "LOCALLLM_ENGINE": "tests.fake_engine:fake_info"}, load_frame(), "internal_error"),
    ],
)
def test_what_cannot_be_loaded_is_told_and_the_process_ends(
    environment: dict[str, str], frame: object, code: str
) -> None:
    with LoneWorker(environment) as worker:
        worker.send(frame)  # type: ignore[arg-type]
        failed = worker.expect(Failed)
        assert (failed.number, failed.code) == (0, code)
        assert worker.returncode() == EXIT_FAILED


def test_settings_of_another_version_are_refused() -> None:
    with LoneWorker() as worker:
        frame = load_frame()
        worker.send(type(frame)(frame.model, frame.name, {**frame.config, "warp": 9}, frame.runtime, frame.key))
        assert worker.expect(Failed).code == "invalid_request"


def test_what_comes_before_the_model_is_loaded_is_refused_and_harms_nothing(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text('{"faults": [{"id": "slow", "do": "stall", "seconds": 0.5, "point": "load"}]}')
    with LoneWorker({**FAKE, "LOCALLLM_FAULT_PLAN": str(plan)}) as worker:
        worker.send(load_frame())
        worker.submit(1, HELLO)
        worker.send(Cancel(1), Call(2, "ping"))
        (error,) = worker.answer(1)
        assert isinstance(error, events.Error)
        assert error.code == "unavailable"
        assert worker.expect(Failed).number == 2
        worker.expect(Loaded)
        worker.submit(3, HELLO)
        assert isinstance(worker.answer(3)[-1], events.Done)


def test_what_is_kept_of_prompts_is_on_disk_when_it_has_ended(tmp_path: Path) -> None:
    tiers = TierConfig(ram_bytes=1 << 24, disk_dir=str(tmp_path / "kv"), disk_bytes=1 << 24, keeps_all=True)
    with LoneWorker() as worker:
        worker.load(load_frame(runtime=RuntimeConfig(tiers=tiers)))
        worker.submit(1, CompletionRequest("x" * 200, GenerationOptions(max_tokens=2)))
        worker.answer(1)
        worker.socket.close()
        assert worker.returncode() == EXIT_ENDED
    assert len(list((tmp_path / "kv").rglob("*.kv"))) >= 3
    assert not list((tmp_path / "kv").rglob("*.tmp"))


def test_a_model_that_is_stuck_in_a_step_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main, "STEP_S", 0.05)
    board, fd = StepBoard.create()
    os.close(fd)
    watch, stuck = main.BoardWatch(board), threading.Event()
    watch.began((), None)

    class Stuck:
        def close(self) -> None:
            stuck.wait(20)

    try:
        started_s = time.monotonic()
        main.close_in_time(Stuck(), watch, 20.0)  # type: ignore[arg-type]
        assert time.monotonic() - started_s < 5
        watch.ended()
        threading.Timer(0.2, stuck.set).start()
        main.close_in_time(Stuck(), watch, 20.0)  # type: ignore[arg-type]
        assert stuck.is_set()
    finally:
        stuck.set()
        board.close()


def test_a_file_is_hashed_once_so_that_its_kv_may_go_to_disk(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF")
    os.utime(file, (0, 0))
    assert resolve(str(file)).sha256 is None
    main.learn_hash(str(file))
    assert resolve(str(file)).sha256 == hashlib.sha256(b"GGUF").hexdigest()
    main.learn_hash(str(tmp_path / "none.gguf"))


def test_it_ends_while_it_loads(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text('{"faults": [{"id": "slow", "do": "hang", "point": "load"}]}')
    with LoneWorker({**FAKE, "LOCALLLM_FAULT_PLAN": str(plan)}) as worker:
        worker.send(load_frame())
        wait_until(Path(f"{plan}.fired").exists)
        worker.socket.close()
        assert worker.returncode(1.0) == EXIT_ENDED


def test_it_ends_with_its_socket_under_a_running_forward() -> None:
    with LoneWorker({**ENDLESS, "FAKE_STEP_MS": "30000"}) as worker:
        worker.load()
        worker.submit(1, endless())
        wait_until(lambda: worker.board.read().is_running)
        worker.socket.close()
        assert worker.returncode(1.0) == EXIT_ENDED


@pytest.mark.skipif(
    sys.platform != "linux", reason="elsewhere the socket alone tells, and not a process that is stopped"
)
@pytest.mark.parametrize("state", ["idle", "working", "stopped"])
def test_it_is_gone_within_a_second_of_its_parent(state: str, tmp_path: Path) -> None:
    # The parent here starts the worker and waits; the socket is held by this test, so only the kernel tells.
    launcher = (
        "import subprocess, sys; p = subprocess.Popen(sys.argv[1:], close_fds=False); "
        "open({0!r}, 'w').write(str(p.pid)); p.wait()"
    )
    pid_file = tmp_path / "pid"
    with LoneWorker(ENDLESS, launcher=(sys.executable, "-c", launcher.format(str(pid_file)))) as worker:
        worker.load()
        pid = int(pid_file.read_text())
        if state != "idle":
            worker.submit(1, endless())
            worker.until(lambda: 1 in worker.events)
        if state == "stopped":
            os.kill(pid, signal.SIGSTOP)
        worker.process.kill()
        died_s = time.monotonic()
        try:
            wait_until(lambda: not Path(f"/proc/{pid}").exists() or is_zombie(pid), 5)
            assert time.monotonic() - died_s < 1.0
        finally:
            if Path(f"/proc/{pid}").exists() and not is_zombie(pid):
                os.kill(pid, signal.SIGKILL)


def is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_signals_to_the_whole_group_leave_it_at_work(signum: signal.Signals) -> None:
    with LoneWorker() as worker:
        worker.load()
        os.kill(worker.pid, signum)
        worker.submit(1, HELLO)
        assert isinstance(worker.answer(1)[-1], events.Done)


@pytest.mark.parametrize(
    "data",
    [b"\xff\xff\xff\xff", b"\x05\0\0\0hello", b"\x01\0\0\0\xc1", b"\x0a\0\0\0\x92\xa6loaded\x80\xc0"],
    ids=["too long", "no msgpack", "broken", "not for a worker"],
)
def test_what_is_no_frame_of_ours_ends_it(data: bytes) -> None:
    with LoneWorker() as worker:
        worker.load()
        worker.socket.sendall(data)
        assert worker.expect(Log).level == "error"
        assert worker.returncode() == EXIT_BAD_FRAME


def test_a_second_load_ends_it() -> None:
    with LoneWorker() as worker:
        worker.load()
        worker.send(load_frame())
        assert worker.returncode() == EXIT_BAD_FRAME


def test_an_engine_that_dies_tells_everyone_and_takes_the_process_with_it(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text('{"faults": [{"id": "x", "do": "raise", "error": "SystemExit", "in_steps": 5}]}')
    with LoneWorker({**ENDLESS, "LOCALLLM_FAULT_PLAN": str(plan)}) as worker:
        worker.load()
        worker.submit(1, endless())
        worker.submit(2, endless())
        for number in (1, 2):
            answer = worker.answer(number)
            assert isinstance(answer[-1], events.Error)
            assert answer[-1].code == "engine_error"
        assert worker.returncode() == EXIT_ENGINE_DIED


def test_a_reader_that_stops_reading_does_not_stop_the_engine() -> None:
    with LoneWorker({**ENDLESS, "FAKE_STEP_MS": "0"}) as worker:
        worker.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        worker.load()
        for number in range(8):
            worker.submit(number, endless(480, logprobs=20))
        wait_until(lambda: worker.board.read().step >= 480)  # while nothing was read
        for number in range(8):
            answer = worker.answer(number)
            assert sum(len(e.ids) for e in answer if isinstance(e, events.Token)) == 480
            assert isinstance(answer[-1], events.Done)


def test_beyond_the_queue_a_request_is_refused() -> None:
    with LoneWorker({**ENDLESS, "FAKE_STEP_MS": "20"}) as worker:
        worker.load(load_frame(runtime=RuntimeConfig(max_waiting=2, max_running=1)))
        for number in range(30):
            worker.submit(number, endless())
        worker.until(lambda: sum(map(is_over, worker.events.values())) >= 25)
        assert {batch[-1].code for batch in worker.events.values() if isinstance(batch[-1], events.Error)} == {
            "queue_full"
        }


def test_nothing_of_a_request_is_printed_or_logged() -> None:
    canary = "CANARY7f3a"
    with LoneWorker() as worker:
        worker.load()
        worker.submit(1, ChatRequest(({"role": canary, "content": 5},)))
        worker.submit(2, CompletionRequest(canary * 2000))
        worker.submit(3, CompletionRequest(canary, GenerationOptions(sampling={"top_k": -1})))
        worker.send(Call(4, canary, {"text": canary}), Call(5, "tokenize", {"text": [canary]}))
        for number in (1, 2, 3):
            assert canary not in str(worker.answer(number))
        worker.submit(6, CompletionRequest(canary))
        worker.answer(6)
        seen = []
        worker.send(Call(7, "ping"))
        while not isinstance(frame := worker.next_frame(), Result):
            seen.append(frame)
        assert canary not in str([frame for frame in seen if not isinstance(frame, Happened)])
        worker.socket.close()
        worker.returncode()
        out, err = worker.process.communicate()
        assert (out, err) == (b"", b"")


@pytest.mark.skipif(sys.platform != "linux", reason="counted there")
def test_an_idle_worker_does_not_wake_up() -> None:
    with LoneWorker() as worker:
        worker.load()
        worker.submit(1, HELLO)
        worker.answer(1)
        time.sleep(0.3)
        before = switches(worker.pid)
        time.sleep(1.5)
        assert switches(worker.pid) - before <= 3


def switches(pid: int) -> int:
    """Return the context switches of all threads of a process so far."""
    total = 0
    for status in Path(f"/proc/{pid}/task").glob("*/status"):
        total += sum(int(line.split()[1]) for line in status.read_text().splitlines() if "ctxt_switches" in line)
    return total


@pytest.mark.real
def test_a_real_model_answers_as_in_process_and_dies_within_a_forward(smollm2: Path) -> None:
    config = LoadConfig(ctx=1024, threads=1, parallel=2)
    options = GenerationOptions(max_tokens=12, sampling={"temperature": 0.0}, ignore_eos=True)
    chat = ChatRequest(({"role": "user", "content": "Name three colours."},), options)
    with localllm.open(smollm2, ctx=1024, threads=1, parallel=2) as alone:
        wanted = collect(alone.submit(chat))
    with LoneWorker({}) as worker:
        model = worker.load(load_frame(smollm2, config=config))
        assert (model["architecture"], model["n_ctx"], model["config"]["threads"]) == ("llama", 1024, 1)
        worker.submit(1, chat)
        assert collect(worker.answer(1)).choices == wanted.choices
        assert worker.call(2, "template", {"kind": "chat", "request": submit_frame(0, chat).request})["n_tokens"] > 10
        worker.submit(3, CompletionRequest(tuple(range(1000, 1900)), options))  # a long forward
        wait_until(lambda: worker.board.read().is_running and worker.board.read().numbers == (3,))
        worker.socket.close()
        assert worker.returncode(1.0) == EXIT_ENDED
        assert worker.process.communicate() == (b"", b"")


@pytest.mark.real
def test_a_real_abort_prints_no_prompt_and_is_told_by_its_signal(smollm2: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text('{"faults": [{"id": "x", "do": "signal", "signal": "SIGABRT", "step": 4}]}')
    with LoneWorker({"LOCALLLM_FAULTS": "1", "LOCALLLM_FAULT_PLAN": str(plan)}) as worker:
        worker.load(load_frame(smollm2, config=LoadConfig(ctx=512, threads=1, parallel=2)))
        worker.submit(1, CompletionRequest("CANARY7f3a CANARY7f3a", GenerationOptions(max_tokens=20, ignore_eos=True)))
        while worker.next_frame() is not None:
            pass
        assert worker.returncode() == -signal.SIGABRT
        assert worker.board.read().numbers == (1,)
        assert b"CANARY" not in b"".join(worker.process.communicate())
