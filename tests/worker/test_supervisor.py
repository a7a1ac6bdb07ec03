"""The supervisor over workers that do all a worker can do: `stand_in`, and at last the real one."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from localllm.errors import (
    LocalLLMError,
    ModelNotFound,
    ModelRefused,
    NotEnoughMemory,
    Unavailable,
    WorkerDied,
)
from localllm.runtime import events
from localllm.runtime.config import LoadConfig, RuntimeConfig, TierConfig
from localllm.runtime.events import Event
from localllm.runtime.types import CompletionRequest, GenerationOptions
from localllm.worker import eviction, handle, lifecycle, unit, watchdog
from localllm.worker.process import WorkerProcess
from localllm.worker.supervisor import EventStream, ModelState, Supervisor, SupervisorSettings, Worker
from tests.worker import stand_in
from tests.worker.asynchronous import nothing_left, run
from tests.worker.test_naming import stored

WATCHDOG_S = 0.6


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    """Every test here leaves no process, descriptor or thread."""
    with nothing_left():
        yield


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let waits that are long by design be short."""
    monkeypatch.setattr(lifecycle, "BACKOFF_S", (0.0, 0.01, 0.02, 0.05))
    monkeypatch.setattr(watchdog, "_LEAST_LOAD_S", WATCHDOG_S)


class Logged(list[str]):
    """What the supervisor logged."""

    def __call__(self, level: str, text: str) -> None:
        self.append(f"{level}: {text}")


@contextlib.asynccontextmanager
async def supervised(
    *paths: Path, log: Logged | None = None, watchdog_s: float = WATCHDOG_S, **settings: Any
) -> AsyncIterator[Supervisor]:
    """Run a supervisor of stand-ins; close it whatever happens."""
    wanted = SupervisorSettings(models=tuple(map(str, paths)), watchdog_s=watchdog_s, **settings)
    start = partial(WorkerProcess, module=stand_in.MODULE)
    supervisor = Supervisor(wanted, Logged() if log is None else log, start)
    try:
        await supervisor.start()
        yield supervisor
    finally:
        await supervisor.close()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model that loads."""
    return planned(tmp_path / "m.gguf")


def planned(path: Path, **plan: Any) -> Path:
    path.write_text(json.dumps(plan))
    return path


async def all_of(stream: EventStream) -> list[Event]:
    got: list[Event] = []
    while batch := await stream.next_events():
        got += batch
    return got


async def ask(worker: Worker, command: str) -> Event:
    """Return the terminal event; there is exactly one."""
    got = await all_of(worker.submit(CompletionRequest(command)))
    assert [isinstance(event, (events.Done, events.Error)) for event in got].count(True) == 1
    return got[-1]


async def good(supervisor: Supervisor) -> None:
    """Get a good answer, as a client that tries again."""
    worker = await supervisor.worker(None, wait_s=20)
    assert await ask(worker, "say 2") == events.Done()


async def reached(supervisor: Supervisor, state: ModelState, limit_s: float = 20.0) -> None:
    end_s = time.monotonic() + limit_s
    while supervisor.entry(None).state is not state:
        assert time.monotonic() < end_s, supervisor.entry(None)
        await asyncio.sleep(0.005)


# Serving


def test_a_named_model_is_loaded_and_serves(model: Path) -> None:
    async def work() -> None:
        config = LoadConfig(ctx=64)
        async with supervised(model, aliases=("gpt-4",), config=config, runtime=RuntimeConfig(), nice=3) as supervisor:
            assert supervisor.entry(None).state is ModelState.LOADING
            worker = await supervisor.worker("gpt-4")
            assert (worker.name, worker.is_alive, worker.model["nice"]) == ("m.gguf", True, 3)
            got = await all_of(worker.submit(CompletionRequest("say 3", request_id="r")))
            assert [event.text for event in got if isinstance(event, events.Token)] == ["w0 ", "w1 ", "w2 "]
            assert await worker.call("echo", {"a": [1]}) == {"a": [1]}
            assert await worker.ping(5)
            waiting = worker.submit(CompletionRequest("wait"))
            entry = supervisor.entry("M.GGUF")
            assert (entry.name, entry.aliases, entry.path) == ("m.gguf", ("gpt-4",), model)
            assert (entry.state, entry.reason, entry.is_pinned) == (ModelState.READY, "", True)
            assert (entry.n_requests, entry.pid, entry.model) == (1, worker.pid, worker.model)
            assert entry.size_bytes == model.stat().st_size
            assert abs(entry.last_used_s - time.time()) < 20
            assert supervisor.workers() == [worker]
            waiting.cancel()
            assert (await all_of(waiting))[-1] == events.Done()
            assert supervisor.entry(None).n_requests == 0

    run(work())


def test_many_requests_at_once_each_get_their_own_events(model: Path) -> None:
    async def work() -> None:
        async with supervised(model) as supervisor:
            worker = await supervisor.worker(None)
            streams = [worker.submit(CompletionRequest(f"say {n}")) for n in range(1, 50)]
            answers = await asyncio.gather(*map(all_of, streams))
            assert [sum(isinstance(e, events.Token) for e in answer) for answer in answers] == list(range(1, 50))

    run(work())


def test_a_request_waits_for_a_load_only_so_long(tmp_path: Path) -> None:
    async def work() -> None:
        async with supervised(planned(tmp_path / "m.gguf", load_s=0.5)) as supervisor:
            with pytest.raises(Unavailable, match="being loaded") as caught:
                await supervisor.worker(None, wait_s=0.05)
            assert (caught.value.code, caught.value.details["state"]) == ("loading", "loading")
            assert caught.value.details["retry_after_s"] >= 1
            await supervisor.worker(None)

    run(work())


def test_waiting_requests_share_one_load(tmp_path: Path) -> None:
    async def work() -> None:
        async with supervised(planned(tmp_path / "m.gguf", load_s=0.2)) as supervisor:
            workers = await asyncio.gather(*(supervisor.worker(None) for _ in range(20)))
            assert len({worker.pid for worker in workers}) == 1

    run(work())


# Deaths

FAULTS = [
    *("die SIGSEGV", "die SIGABRT", "die SIGKILL", "die SIGBUS", "die SIGILL", "die SIGTERM", "die SIGSEGV idle"),
    *("hang 0.01", "doze", "stop", "linger", "fork", "flood 1"),
    *("cut 0", "cut 5", "rubbish length", "rubbish event"),  # the others: test_link.py
]


@pytest.mark.parametrize("fault", FAULTS)
def test_whatever_a_worker_does_its_requests_end_and_the_next_is_answered(model: Path, fault: str) -> None:
    async def work() -> None:
        log = Logged()
        async with supervised(model, log=log) as supervisor:
            worker = await supervisor.worker(None)
            beside = [worker.submit(CompletionRequest("wait secret")) for _ in range(3)]
            call = asyncio.create_task(worker.call("silence"))
            await asyncio.sleep(0.01)
            began_s = time.monotonic()
            error = await ask(worker, fault)
            took_s = time.monotonic() - began_s
            assert isinstance(error, events.Error)
            assert error.code == "worker_died"
            for stream in beside:
                assert (await all_of(stream))[-1] == error
            with pytest.raises(WorkerDied):
                await call
            assert not worker.is_alive
            with pytest.raises(Unavailable):
                worker.submit(CompletionRequest("say 1"))
            if fault.split()[0] not in ("hang", "doze", "stop", "flood"):
                assert took_s < 0.5
            await good(supervisor)
            assert not any("secret" in line for line in log)

    run(work())


def test_a_worker_that_dies_unused_is_started_again(model: Path) -> None:
    async def work() -> None:
        async with supervised(model) as supervisor:
            worker = await supervisor.worker(None)
            os.kill(worker.pid, signal.SIGKILL)
            await reached(supervisor, ModelState.RESTARTING)
            await reached(supervisor, ModelState.READY)
            await good(supervisor)

    run(work())


def test_why_a_worker_died_is_logged_with_its_safe_last_words(model: Path) -> None:
    async def work() -> None:
        log = Logged()
        async with supervised(model, log=log) as supervisor:
            await ask(await supervisor.worker(None), "flood 1")
            await good(supervisor)
        assert any("SIGABRT (/src/ggml.c:77: GGML_ASSERT(a > b) failed; 20000 other lines)" in line for line in log)

    run(work())


def test_deaths_in_a_row_end_in_failed_and_later_requests_try_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unit, "COOLDOWN_S", 0.0)
    path = planned(tmp_path / "m.gguf", load="exit")

    async def work() -> None:
        log = Logged()
        async with supervised(path, log=log) as supervisor:
            await reached(supervisor, ModelState.FAILED)
            assert sum("code 3" in line for line in log) == 5
            assert "5 times in a row" in supervisor.entry(None).reason
            with pytest.raises(Unavailable, match="6 times in a row"):
                await supervisor.load(None)
            assert sum("code 3" in line for line in log) == 6
            planned(path)
            assert (await supervisor.load(None)).state is ModelState.READY
            await good(supervisor)
            assert supervisor.entry(None).reason == ""

    run(work())


def test_a_failed_model_is_not_loaded_anew_for_every_request(tmp_path: Path) -> None:
    async def work() -> None:
        log = Logged()
        path = planned(tmp_path / "m.gguf", load="fail", code="invalid_request")
        async with supervised(path, log=log) as supervisor:
            for _ in range(5):
                with pytest.raises(Unavailable, match="it does not go"):
                    await supervisor.worker(None)
            assert sum("not loaded" in line for line in log) == 1

    run(work())


def test_good_answers_between_deaths_keep_a_model_alive(model: Path) -> None:
    async def work() -> None:
        async with supervised(model) as supervisor:
            for _ in range(7):
                await ask(await supervisor.worker(None), "die SIGKILL")
                await good(supervisor)

    run(work())


# Loading that goes wrong


def test_a_file_that_crashes_its_loader_is_refused_until_it_changes(tmp_path: Path) -> None:
    path = planned(tmp_path / "m.gguf", load="crash")

    async def work() -> None:
        log = Logged()
        async with supervised(path, log=log) as supervisor:
            for _ in range(3):
                with pytest.raises(ModelRefused, match=r"crashes its process.*SIGSEGV"):
                    await supervisor.worker(None)
                with pytest.raises(ModelRefused):
                    await supervisor.load(None)
            assert supervisor.entry(None).state is ModelState.REFUSED
            planned(path, load="ok")
            await good(supervisor)

    run(work())


def test_a_file_that_loaded_before_is_not_refused_for_one_crash(tmp_path: Path) -> None:
    switch = tmp_path / "switch"
    path = planned(tmp_path / "m.gguf", switch=str(switch))

    async def work() -> None:
        async with supervised(path) as supervisor:
            worker = await supervisor.worker(None)
            switch.write_text("crash")
            await ask(worker, "die SIGKILL")
            while supervisor.entry(None).pid == worker.pid or supervisor.entry(None).pid is None:
                await asyncio.sleep(0.001)
            await asyncio.sleep(0.1)
            switch.unlink()
            await good(supervisor)

    run(work())


@pytest.mark.parametrize("load", ["silent", "hang", "stop", "rubbish", "exit"])
def test_a_load_that_comes_to_nothing_is_tried_again(tmp_path: Path, load: str) -> None:
    switch = tmp_path / "switch"
    switch.write_text(load)
    path = planned(tmp_path / "m.gguf", switch=str(switch))

    async def work() -> None:
        async with supervised(path) as supervisor:
            await reached(supervisor, ModelState.RESTARTING)
            switch.unlink()
            await good(supervisor)

    run(work())


@pytest.mark.parametrize(
    ("code", "raised", "state"),
    [
        ("model_refused", ModelRefused, ModelState.REFUSED),
        ("not_enough_memory", NotEnoughMemory, ModelState.FAILED),
        ("model_not_found", ModelNotFound, ModelState.FAILED),
        ("invalid_request", Unavailable, ModelState.FAILED),
        ("template_error", Unavailable, ModelState.FAILED),
        ("nonsense", Unavailable, ModelState.FAILED),
    ],
)
def test_why_a_model_cannot_be_loaded_is_told(
    tmp_path: Path, code: str, raised: type[LocalLLMError], state: ModelState
) -> None:
    async def work() -> None:
        async with supervised(planned(tmp_path / "m.gguf", load="fail", code=code)) as supervisor:
            with pytest.raises(raised, match="it does not go") as caught:
                await supervisor.worker(None)
            assert type(caught.value) is raised
            assert supervisor.entry(None).state is state
            assert "it does not go" in supervisor.entry(None).reason
            assert supervisor.workers() == []

    run(work())


def test_a_file_that_went_away_is_told(model: Path) -> None:
    async def work() -> None:
        async with supervised(model) as supervisor:
            await supervisor.worker(None)
            await supervisor.unload(None)
            model.unlink()
            with pytest.raises(ModelNotFound, match="are gone"):
                await supervisor.worker(None)
            assert supervisor.entry(None).size_bytes == 0

    run(work())


def test_a_process_that_cannot_be_started_is_tried_again(model: Path) -> None:
    n_failures = 2

    def start(on_exit: Any) -> WorkerProcess:
        nonlocal n_failures
        if n_failures:
            n_failures -= 1
            raise OSError(24, "Too many open files")
        return WorkerProcess(on_exit, stand_in.MODULE)

    async def work() -> None:
        log = Logged()
        supervisor = Supervisor(SupervisorSettings(models=(str(model),)), log, start)
        try:
            await supervisor.start()
            await good(supervisor)
            assert sum("Too many open files" in line for line in log) == 2
        finally:
            await supervisor.close()

    run(work())


# Poison


def test_a_request_that_kills_is_suspected_then_runs_alone_then_is_refused(model: Path) -> None:
    async def work() -> None:
        async with supervised(model) as supervisor:
            name = stand_in.fingerprint_of("die SIGSEGV")
            seen = []
            for _ in range(3):
                worker = await supervisor.worker(None)
                seen.append((worker.model["lone"], worker.model["refused"]))
                await ask(worker, "die SIGSEGV")
            worker = await supervisor.worker(None)
            seen.append((worker.model["lone"], worker.model["refused"]))
            assert seen == [([], []), ([], []), ([name], []), ([], [name])]

    run(work())


@pytest.mark.parametrize("death", ["die SIGKILL", "die SIGSEGV idle", "rubbish text"])
def test_deaths_that_no_step_brought_about_make_no_suspects(model: Path, death: str) -> None:
    async def work() -> None:
        async with supervised(model) as supervisor:
            for _ in range(3):
                await ask(await supervisor.worker(None), death)
            worker = await supervisor.worker(None)
            assert (worker.model["lone"], worker.model["refused"]) == ([], [])

    run(work())


def test_a_hang_makes_suspects_of_all_in_the_step_and_of_none_beside_it(model: Path) -> None:
    async def work() -> None:
        async with supervised(model) as supervisor:
            for _ in range(2):
                worker = await supervisor.worker(None)
                inside = worker.submit(CompletionRequest("wait inside"))
                beside = worker.submit(CompletionRequest("wait beside"))
                await inside.next_events()
                await ask(worker, f"die SIGABRT {inside.number}")
                await all_of(beside)
            worker = await supervisor.worker(None)
            expected = {stand_in.fingerprint_of("wait inside")}
            assert expected < set(worker.model["lone"])
            assert stand_in.fingerprint_of("wait beside") not in worker.model["lone"]

    run(work())


# Watching


def test_a_long_step_that_was_expected_is_left_alone(model: Path) -> None:
    async def work() -> None:
        async with supervised(model) as supervisor:
            worker = await supervisor.worker(None)
            stream = worker.submit(CompletionRequest("hang 0.15"))
            await asyncio.sleep(WATCHDOG_S + 0.3)
            assert worker.is_alive
            assert await worker.ping(0.01)
            (error,) = await all_of(stream)
            assert isinstance(error, events.Error)
            await good(supervisor)

    run(work())


def test_a_stopped_worker_does_not_answer_pings_and_is_replaced_for_them(model: Path) -> None:
    async def work() -> None:
        async with supervised(model) as supervisor:
            worker = await supervisor.worker(None)
            os.kill(worker.pid, signal.SIGSTOP)
            pings = [asyncio.create_task(worker.ping(0.05)) for _ in range(3)]
            assert await asyncio.gather(*pings) == [False] * 3
            assert worker.link.n_calls == 1
            await reached(supervisor, ModelState.RESTARTING)
            assert not await worker.ping(0.05)
            await good(supervisor)

    run(work())


def test_an_idle_worker_costs_no_timers(model: Path) -> None:
    async def work() -> None:
        async with supervised(model) as supervisor:
            await good(supervisor)
            await asyncio.sleep(2 * WATCHDOG_S)
            scheduled = [handle for handle in asyncio.get_running_loop()._scheduled if not handle.cancelled()]  # type: ignore[attr-defined]
            assert [handle for handle in scheduled if "localllm" in repr(handle)] == []

    run(work())


# Loading and unloading on demand


def test_unload_ends_requests_with_an_error_and_load_brings_it_back(model: Path) -> None:
    async def work() -> None:
        async with supervised(model) as supervisor:
            worker = await supervisor.worker(None)
            stream = worker.submit(CompletionRequest("wait"))
            call = asyncio.create_task(worker.call("silence"))
            await asyncio.sleep(0.01)
            entry = await supervisor.unload("m.gguf")
            assert (entry.state, entry.pid, entry.model) == (ModelState.UNLOADED, None, {})
            error = (await all_of(stream))[-1]
            assert isinstance(error, events.Error)
            assert (error.code, error.message) == ("unavailable", "The model was unloaded.")
            with pytest.raises(Unavailable, match="unloaded"):
                await call
            assert (await supervisor.unload(None)).state is ModelState.UNLOADED
            assert (await supervisor.load(None)).state is ModelState.READY
            await good(supervisor)

    run(work())


def test_unload_while_loading_ends_the_load_and_those_who_wait_for_it(tmp_path: Path) -> None:
    async def work() -> None:
        async with supervised(planned(tmp_path / "m.gguf", load_s=0.5)) as supervisor:
            waiting = asyncio.create_task(supervisor.worker(None))
            await asyncio.sleep(0.1)
            stopping = [asyncio.create_task(supervisor.unload(None)) for _ in range(2)]
            await asyncio.sleep(0)
            late = asyncio.create_task(supervisor.worker(None))
            await asyncio.gather(*stopping)
            with pytest.raises(Unavailable, match="unloaded"):
                await waiting
            assert (await late).is_alive

    run(work())


def test_an_unload_whose_caller_went_away_is_done(model: Path) -> None:
    async def work() -> None:
        async with supervised(model) as supervisor:
            await supervisor.worker(None)
            task = asyncio.create_task(supervisor.unload(None))
            await asyncio.sleep(0)
            task.cancel()
            await reached(supervisor, ModelState.UNLOADED)

    run(work())


def test_stored_models_are_loaded_on_demand_and_unloaded_when_unused() -> None:
    stored("org/m:Q4")

    async def work() -> None:
        async with supervised(keep_alive_s=1.2, watchdog_s=30) as supervisor:
            (entry,) = supervisor.entries()
            assert (entry.name, entry.state, entry.is_pinned) == ("org/m:Q4", ModelState.UNLOADED, False)
            worker = await supervisor.worker("m:q4")
            assert worker.model["sha256"] == "0" * 64
            stream = worker.submit(CompletionRequest("wait"))
            await asyncio.sleep(2)
            assert worker.is_alive
            stream.cancel()
            assert (await all_of(stream))[-1] == events.Done()
            await reached(supervisor, ModelState.UNLOADED, limit_s=4)

    run(work())


def test_what_is_named_at_start_stays(model: Path) -> None:
    async def work() -> None:
        async with supervised(model, keep_alive_s=0.05) as supervisor:
            await good(supervisor)
            await asyncio.sleep(1.5)
            assert supervisor.entry(None).state is ModelState.READY

    run(work())


def test_models_pulled_and_removed_meanwhile_are_seen(monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    monkeypatch.setattr("localllm.worker.supervisor._STORE_READ_EVERY_S", 0.0)

    async def work() -> None:
        async with supervised(model) as supervisor:
            with pytest.raises(ModelNotFound):
                supervisor.entry("org/m:Q4")
            path = stored("org/m:Q4")
            assert [entry.name for entry in supervisor.entries()] == ["m.gguf", "org/m:Q4"]
            await supervisor.worker("org/m:Q4")
            path.unlink()
            assert supervisor.entry("org/m:Q4").state is ModelState.READY
            await supervisor.unload("org/m:Q4")
            assert "missing" in supervisor.entries()[1].reason
            with pytest.raises(ModelRefused):
                await supervisor.worker("org/m:Q4")

    run(work())


def test_without_a_name_only_an_only_model_is_meant() -> None:
    async def work() -> None:
        async with supervised() as supervisor:
            for name in (None, ""):
                with pytest.raises(ModelNotFound, match="there are: none"):
                    supervisor.entry(name)

    run(work())
    stored("one")

    async def one() -> None:
        async with supervised() as supervisor:
            assert supervisor.entry(None).name == "one"

    run(one())
    stored("two")

    async def two() -> None:
        async with supervised() as supervisor:
            with pytest.raises(ModelNotFound, match="there are: one, two"):
                await supervisor.worker(None)

    run(two())


# Memory


def test_unused_models_make_room_under_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eviction, "estimate_bytes", lambda path, config: 10**9)
    monkeypatch.setattr(unit, "resident_bytes", lambda pid: 10**9)
    for name in ("one", "two", "three"):
        stored(name)

    async def work() -> None:
        async with supervised(max_memory_bytes=2 * 10**9, watchdog_s=30) as supervisor:
            await supervisor.worker("one")
            busy = (await supervisor.worker("two")).submit(CompletionRequest("wait"))
            with pytest.raises(Unavailable, match="at work") as caught:
                await supervisor.worker("three")
            assert caught.value.details["retry_after_s"] == 5
            assert supervisor.entry("three").state is ModelState.UNLOADED
            await asyncio.sleep(eviction.RESERVED_S)
            await supervisor.worker("three")
            states = [entry.state.value for entry in supervisor.entries()]
            assert states == ["unloaded", "ready", "ready"]  # one, three, two
            busy.cancel()

    stored("one")
    run(work())


def test_models_share_what_the_limit_leaves_for_kv_and_none_has_to_go_for_it(
    monkeypatch: pytest.MonkeyPatch, model: Path
) -> None:
    monkeypatch.setattr(eviction, "estimate_bytes", lambda path, config: 10**9)
    monkeypatch.setattr(unit, "resident_bytes", lambda pid: 10**9)
    second = stored("two")

    def kept_bytes(path: Path) -> int:
        return int(json.loads(path.with_suffix(".ram").read_text()))

    async def work() -> None:
        async with supervised(model, max_memory_bytes=23 * 10**8) as supervisor:
            await good(supervisor)
            assert kept_bytes(model) == 23 * 10**8 // 4
            await supervisor.worker("two")
            assert kept_bytes(second) == 15 * 10**7
            while kept_bytes(model) != 15 * 10**7:
                await asyncio.sleep(0.01)
            assert await ask(await supervisor.worker(None), "say 1") == events.Done()

    run(work())


KEEPING = RuntimeConfig(tiers=TierConfig(disk_dir="kv", disk_bytes=1, flush_s=20.0))


def test_a_worker_may_put_on_disk_what_it_keeps_before_it_ends(tmp_path: Path) -> None:
    model = planned(tmp_path / "m.gguf", says_it_keeps=True, keep_s=1.5, kept=str(tmp_path / "kept"))

    async def work() -> None:
        async with supervised(model, runtime=KEEPING) as supervisor:
            await good(supervisor)
            await supervisor.unload(None)
            assert (tmp_path / "kept").exists()

    run(work())


def test_one_that_does_not_say_that_it_does_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handle, "_ANSWER_S", 0.3)
    model = planned(tmp_path / "m.gguf", keep_s=60.0)

    async def work() -> None:
        async with supervised(model, runtime=KEEPING) as supervisor:
            await good(supervisor)
            started_s = time.monotonic()
            await supervisor.unload(None)
            assert time.monotonic() - started_s < 5

    run(work())


def test_who_is_in_a_hurry_does_not_wait_for_what_is_kept(tmp_path: Path) -> None:
    model = planned(tmp_path / "m.gguf", says_it_keeps=True, keep_s=60.0)

    async def work() -> None:
        async with supervised(model, runtime=KEEPING) as supervisor:
            await good(supervisor)
            started_s = time.monotonic()
            closing = asyncio.create_task(supervisor.close())
            await asyncio.sleep(0.5)
            assert not closing.done()
            supervisor.hurry()
            await closing
            assert time.monotonic() - started_s < 5

    run(work())


def test_ram_that_was_asked_for_is_counted(monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    monkeypatch.setattr(eviction, "estimate_bytes", lambda path, config: 10**9)
    runtime = RuntimeConfig(tiers=TierConfig(ram_bytes=6 * 10**8))

    async def work() -> None:
        async with supervised(model, max_memory_bytes=15 * 10**8, runtime=runtime) as supervisor:
            with pytest.raises(NotEnoughMemory, match=r"1\.60 GB"):
                await supervisor.worker(None)

    run(work())


def test_what_cannot_fit_beside_pinned_models_is_refused(monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    monkeypatch.setattr(eviction, "estimate_bytes", lambda path, config: 10**9)
    stored("two")

    async def work() -> None:
        async with supervised(model, max_memory_bytes=15 * 10**8) as supervisor:
            await good(supervisor)
            with pytest.raises(NotEnoughMemory, match="--max-memory"):
                await supervisor.worker("two")
            await good(supervisor)

    run(work())


def test_a_machine_without_room_gets_some_from_unused_models(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(eviction, "RESERVED_S", 0.0)
    stored("one")
    pid_file = tmp_path / "pid"
    stored("two", json.dumps({"load": "ok", "unless_alive": str(pid_file)}))

    async def work() -> None:
        async with supervised() as supervisor:
            worker = await supervisor.worker("one")
            pid_file.write_text(str(worker.pid))
            await supervisor.worker("two")
            assert supervisor.entry("one").state is ModelState.UNLOADED

    run(work())


# The end


@pytest.mark.parametrize("moment", ["at once", "loading", "ready", "dying", "waiting", "unloading", "stopped"])
def test_close_leaves_nothing_at_any_moment(model: Path, moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        async with supervised(model) as supervisor:
            if moment == "loading":
                await asyncio.sleep(0.03)
            if moment in ("ready", "dying", "waiting", "unloading", "stopped"):
                worker = await supervisor.worker(None)
                stream = worker.submit(CompletionRequest("wait"))
                await stream.next_events()
            if moment in ("dying", "waiting"):
                monkeypatch.setattr(lifecycle, "BACKOFF_S", (100.0,))
                os.kill(worker.pid, signal.SIGKILL)
                await all_of(stream)
                await asyncio.sleep(0.1 if moment == "waiting" else 0)
            if moment == "unloading":
                task = asyncio.create_task(supervisor.unload(None))
                await asyncio.sleep(0)
            if moment == "stopped":
                os.kill(worker.pid, signal.SIGSTOP)
            waiting = asyncio.create_task(supervisor.worker(None, wait_s=30))
            await asyncio.sleep(0)
            began_s = time.monotonic()
            await asyncio.gather(supervisor.close(), supervisor.close())
            assert time.monotonic() - began_s < 2
            if moment in ("ready", "stopped"):
                assert (await all_of(stream))[-1] == events.Error(
                    "unavailable", "The server is stopping.", "start it again: localllm serve"
                )
            if moment == "unloading":
                await task
            with contextlib.suppress(Unavailable):
                assert not (await waiting).is_alive
            for late in (supervisor.worker(None), supervisor.load(None)):
                with pytest.raises(Unavailable, match="stopping"):
                    await late
            assert supervisor.workers() == []
            assert supervisor.entry(None).pid is None

    run(work())


def test_close_without_a_start_does_nothing() -> None:
    async def work() -> None:
        await Supervisor(SupervisorSettings()).close()

    run(work())


def test_the_http_process_loads_no_native_code_for_it() -> None:
    script = (
        "import sys, localllm.worker.supervisor\n"
        "print(*{name.split('.')[0] for name in sys.modules} & {'numpy', 'llama_cpp', 'jinja2', 'starlette', 'rich'})"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == ""


# The real worker


@pytest.fixture
def fake_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let real workers run without a model."""
    monkeypatch.setenv("LOCALLLM_FAULTS", "1")
    monkeypatch.setenv("LOCALLLM_ENGINE", "tests.fake_engine:parts")
    monkeypatch.setenv("FAKE_NO_EOS", "1")
    monkeypatch.setenv("FAKE_STEP_MS", "2")


@pytest.mark.usefixtures("fake_engine")
@pytest.mark.parametrize("name", ["SIGSEGV", "SIGKILL", "SIGSTOP"])
def test_real_workers_are_killed_and_come_back(model: Path, name: str) -> None:
    async def work() -> None:
        settings = SupervisorSettings(models=(str(model),), config=LoadConfig(parallel=4), watchdog_s=1.0)
        supervisor = Supervisor(settings)
        try:
            await supervisor.start()
            worker = await supervisor.worker(None, wait_s=30)
            assert await worker.ping(5)
            options = GenerationOptions(max_tokens=1000)
            streams = [worker.submit(CompletionRequest(f"text {i}", options)) for i in range(4)]
            for stream in streams:
                while not any(isinstance(event, events.Token) for event in await stream.next_events()):
                    pass
            os.kill(worker.pid, signal.Signals[name])
            for stream in streams:
                error = (await all_of(stream))[-1]
                assert isinstance(error, events.Error)
                assert error.code == "worker_died"
            worker = await supervisor.worker(None, wait_s=30)
            got = await all_of(worker.submit(CompletionRequest("text", GenerationOptions(max_tokens=3))))
            assert got[-1] == events.Done()
        finally:
            await supervisor.close()

    run(work())
