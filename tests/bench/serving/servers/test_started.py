"""Servers are started, found ready, restarted and ended for certain, whatever they and we do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from localllm.bench.serving.servers import kept, process_tree, started
from localllm.bench.serving.servers.given import GivenServer
from localllm.bench.serving.servers.process_tree import ProcessTree
from localllm.bench.serving.servers.started import StartedServer, own_server
from localllm.bench.serving.servers.starting import Starting
from localllm.errors import ModelRefused, ServerUnreachable, UsageError

SCRIPT = Path(__file__).with_name("small_server.py")
PROJECT = SCRIPT.parents[4]


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Fail a test after which one of its small servers, or what that started, is there."""
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    yield
    left = [c for c in psutil.Process().children(recursive=True) if c.pid not in before]
    for child in left:
        child.kill()
    assert not left


def small(tmp_path: Path, *manners: str, **settings: object) -> StartedServer:
    variables = {"PIDS": str(tmp_path / "pids")}
    command = (sys.executable, str(SCRIPT), "{port}", *manners)
    return StartedServer(Starting("small", command, variables=variables, **settings))  # type: ignore[arg-type]


def pid_in(tmp_path: Path) -> int:
    return int(within(lambda: (tmp_path / "pids").exists() and (tmp_path / "pids").read_text()))


def within(what: Callable[[], object], seconds: float = 20.0) -> str:
    """Return what is true in the end."""
    give_up_s = time.monotonic() + seconds
    while time.monotonic() < give_up_s:
        found = what()
        if found:
            return str(found)
        time.sleep(0.02)
    raise AssertionError("it did not come about in time")


def is_gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_a_server_is_ready_when_entered_and_gone_when_left(tmp_path: Path) -> None:
    server = small(tmp_path)
    assert (server.url, server.ready_s, server.pids()) == ("", None, ())
    with server as running:
        pids = running.pids()
        assert running.url.startswith("http://127.0.0.1:")
        assert running.ready_s is not None
        assert len(pids) == 1
        assert running.can_restart
        assert running.name == "small"
        assert any("a small server on" in line for line in running.last_lines())
    assert is_gone(pids[0])
    server.stop()


def test_a_restart_is_another_process_on_another_port(tmp_path: Path) -> None:
    with small(tmp_path) as running:
        first_url, first_pids = running.url, running.pids()
        running.restart()
        assert running.url != first_url
        assert not set(running.pids()) & set(first_pids)
        assert is_gone(first_pids[0])


def test_children_count_as_the_server_and_end_with_it(tmp_path: Path) -> None:
    with small(tmp_path, "child") as running:
        child = pid_in(tmp_path)
        assert child in running.pids()
    assert is_gone(child)


def test_a_child_that_left_the_session_and_ignores_sigterm_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_tree, "CHILDREN_S", 0.2)
    with small(tmp_path, "stranger") as running:
        stranger = pid_in(tmp_path)
        assert stranger in running.pids()
    assert is_gone(stranger)


def test_a_child_whose_parent_died_is_ended_all_the_same(tmp_path: Path) -> None:
    with small(tmp_path, "child") as running:
        child = pid_in(tmp_path)
        leader = next(pid for pid in running.pids() if pid != child)
        os.kill(leader, signal.SIGKILL)
        within(lambda: is_gone(leader))
    assert is_gone(child)


def test_a_daemon_of_a_command_that_ends_is_told_and_ended(tmp_path: Path) -> None:
    with pytest.raises(ServerUnreachable, match="ended with code 0 before it answered"):
        small(tmp_path, "daemon").start()
    assert within(lambda: not (tmp_path / "pids").exists() or is_gone(pid_in(tmp_path)), seconds=5)


def test_a_child_that_became_a_daemon_unseen_ends_with_its_server(tmp_path: Path) -> None:
    became = "import os, sys, time; os.fork() and os._exit(0); os.setsid(); os.fork() and os._exit(0); time.sleep(0.2)"
    program = f"{became}; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(600)"
    tree = ProcessTree([sys.executable, "-c", program, str(tmp_path / "pids")], os.environ, None)
    pid = pid_in(tmp_path)
    assert pid not in tree.pids()
    tree.end()
    assert is_gone(pid)


def test_last_words_hold_no_secret_of_the_environment(tmp_path: Path) -> None:
    variables = {"SOME_TOKEN": "abcdefgh12345"}
    command = (sys.executable, str(SCRIPT), "{port}", "dies")
    with pytest.raises(ServerUnreachable, match=r"so it ends \(secret\)") as caught:
        StartedServer(Starting("small", command, variables=variables)).start()
    assert "abcdefgh" not in str(caught.value)


def test_a_server_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    server = small(tmp_path, "deaf")
    server.start()
    (pid,) = server.pids()
    assert server._tree is not None
    server._tree.end(terminate_s=0.2)
    server.stop()
    assert is_gone(pid)


def test_a_command_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="There is no program no-such-server"):
        StartedServer(Starting("x", ("no-such-server", "{port}"))).start()


def test_a_command_that_may_not_be_run_is_named(tmp_path: Path) -> None:
    file = tmp_path / "server"
    file.write_text("#!/bin/sh\n")
    file.chmod(0o600)
    with pytest.raises(UsageError, match="may not be run"):
        StartedServer(Starting("x", (str(file), "{port}"))).start()


def test_a_command_that_no_system_takes_is_a_sentence() -> None:
    with pytest.raises(UsageError, match="cannot be run"):
        StartedServer(Starting("x", ("true\0", "{port}"))).start()


def test_a_server_that_ends_is_told_with_its_code_and_last_words(tmp_path: Path) -> None:
    with pytest.raises(ServerUnreachable, match=r"ended with code 7.*cannot read the model . so it ends") as caught:
        small(tmp_path, "dies").start()
    assert caught.value.exit_code == 6


def test_a_server_that_does_not_answer_in_time_is_told_and_ended(tmp_path: Path) -> None:
    server = small(tmp_path, "silent", ready_timeout_s=1.0)
    with pytest.raises(ServerUnreachable, match="did not answer within 1 s"):
        server.start()
    assert server.pids() == ()


@pytest.mark.parametrize(("key", "words"), [(None, "asks for a key"), ("wrong", "does not take the key")])
def test_a_key_that_is_missing_or_wrong_is_told_at_once(key: str | None, words: str) -> None:
    command = (sys.executable, str(SCRIPT), "{port}")
    server = StartedServer(Starting("small", command, variables={"SMALL_KEY": "secret"}, key=key))
    with pytest.raises(ServerUnreachable, match=words):
        server.start()
    assert server.pids() == ()


def test_a_key_is_sent_where_the_server_asks_for_one(tmp_path: Path) -> None:
    command = (sys.executable, str(SCRIPT), "{port}")
    server = StartedServer(Starting("small", command, variables={"SMALL_KEY": "secret"}, key="secret"))
    with server as running:
        assert running.ready_s is not None


def test_the_model_that_is_meant_stands_in_the_url(tmp_path: Path) -> None:
    with small(tmp_path, serves="small") as running:
        assert running.url.endswith("?model=small")


def test_our_server_says_itself_why_it_refuses_a_model() -> None:
    with pytest.raises(ModelRefused, match="no model here is called 'nosuch'") as caught:
        own_server("nosuch").start()
    assert caught.value.exit_code == 3
    assert caught.value.hint


def test_our_server_keeps_kv_in_a_folder_of_its_own_over_restarts_and_nothing_of_it_is_left(
    monkeypatch: pytest.MonkeyPatch, isolated_home: Path
) -> None:
    seen: list[str] = []
    home = isolated_home / "localllm"
    left = home / "bench-kv-999999999-x"
    left.mkdir(parents=True)

    def spawned(words: object, environment: dict[str, str], folder: object) -> None:
        seen.append(environment[kept.VARIABLE])
        assert Path(seen[-1]).is_dir()

    monkeypatch.setattr(started, "ProcessTree", spawned)
    monkeypatch.setattr(StartedServer, "_await_ready", lambda self, tree, give_up_s: 0.0)
    with own_server("m") as running:
        assert not left.exists()
        running.restart()
    assert seen[0] == seen[1]
    assert list(home.iterdir()) == []
    with pytest.raises(KeyError), own_server("m"):
        raise KeyError
    assert list(home.iterdir()) == []


def test_nothing_is_left_where_this_program_is_killed(tmp_path: Path) -> None:
    code = (
        "import sys, time\n"
        "from localllm.bench.serving.servers.started import StartedServer\n"
        "from localllm.bench.serving.servers.starting import Starting\n"
        f"server = StartedServer(Starting('small', (sys.executable, {str(SCRIPT)!r}, '{{port}}', 'child'),"
        f" variables={{'PIDS': {str(tmp_path / 'pids')!r}}}))\n"
        "server.start()\n"
        "print(*server.pids(), flush=True)\n"
        "time.sleep(600)\n"
    )
    program = subprocess.Popen([sys.executable, "-c", code], cwd=PROJECT, stdout=subprocess.PIPE, text=True)
    try:
        assert program.stdout is not None
        pids = [int(word) for word in program.stdout.readline().split()]
        assert len(pids) == 2
    finally:
        program.kill()
        program.wait()
        program.stdout.close() if program.stdout is not None else None
    within(lambda: all(is_gone(pid) for pid in pids))


def test_an_interrupt_while_it_starts_leaves_nothing(tmp_path: Path) -> None:
    server = small(tmp_path, "silent", "child")

    def interrupt() -> None:
        pid_in(tmp_path)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        server.start()
    assert is_gone(pid_in(tmp_path))


def test_a_given_server_is_seen_by_its_port_and_left_alone(tmp_path: Path) -> None:
    with small(tmp_path, "child") as running:
        child = pid_in(tmp_path)
        given = GivenServer(running.url)
        assert set(given.pids()) == set(running.pids())
        assert child in given.pids()
        given.stop()
        assert GivenServer(running.url).pids()
        assert given.ready_s is None
        assert not given.can_restart
        with pytest.raises(UsageError, match="was not started here"):
            given.restart()
    assert given.pids() == ()


@pytest.mark.parametrize("url", ["http://192.0.2.1:80", "http://example.invalid", "http://127.0.0.1:1"])
def test_a_given_server_elsewhere_has_no_processes_here(url: str) -> None:
    assert GivenServer(url).pids() == ()


def test_a_port_that_another_program_holds_is_no_sign_of_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with small(tmp_path) as other:
        port = int(other.url.rpartition(":")[2])
        monkeypatch.setattr("localllm.bench.serving.servers.started.free_port", lambda: port)
        with pytest.raises(ServerUnreachable, match="ended with code"):
            small(tmp_path).start()
