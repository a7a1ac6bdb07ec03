"""The step board tells what was going on, also to those who come after a death."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import TypeAlias

import pytest

from localllm.worker.board import HALF_BYTES, MAX_NUMBERS, BoardState, StepBoard
from tests.conftest import PROJECT

Boards: TypeAlias = tuple[StepBoard, StepBoard, int]


@pytest.fixture
def boards() -> Iterator[Boards]:
    """The same board twice: the reader's and the writer's."""
    reader, fd = StepBoard.create()
    writer = StepBoard.attach(fd)
    yield reader, writer, fd
    reader.close()
    writer.close()
    os.close(fd)


def test_a_board_nobody_wrote_on_says_that_nothing_runs(boards: Boards) -> None:
    assert boards[0].read() == BoardState()


def test_a_step_is_read_with_its_requests_until_it_ends(boards: Boards) -> None:
    reader, writer, _ = boards
    before_s = time.monotonic()
    writer.began([7, 2**40], 0.25)
    state = reader.read()
    assert (state.step, state.is_running, state.expected_s, state.numbers) == (1, True, 0.25, (7, 2**40))
    assert before_s <= state.started_s <= time.monotonic()
    writer.ended()
    after = reader.read()
    assert (after.step, after.is_running, after.numbers, after.started_s) == (1, False, (), state.started_s)


def test_steps_are_counted_and_an_unknown_duration_stays_unknown(boards: Boards) -> None:
    reader, writer, _ = boards
    for number in range(5):
        writer.began([number], None)
        writer.ended()
    writer.began([9], None)
    assert reader.read().step == 6
    assert reader.read().expected_s is None


def test_more_requests_than_fit_are_cut_off(boards: Boards) -> None:
    reader, writer, _ = boards
    writer.began(range(MAX_NUMBERS + 50), 1.0)
    assert reader.read().numbers == tuple(range(MAX_NUMBERS))


def test_a_write_that_was_cut_short_anywhere_leaves_the_state_before_it(boards: Boards) -> None:
    reader, writer, fd = boards
    for step in range(4):
        before, old = reader.read(), content(fd)
        if step % 2:
            writer.ended()
        else:
            writer.began([1, 2, 3], 0.5)
        after, new = reader.read(), content(fd)
        changed = [at for at in range(len(old)) if old[at] != new[at]]
        for cut in range(changed[0], changed[-1] + 1):
            os.pwrite(fd, new[:cut] + old[cut:], 0)
            assert reader.read() == before
        os.pwrite(fd, new, 0)
        assert reader.read() == after != before


def content(fd: int) -> bytes:
    return os.pread(fd, 2 * HALF_BYTES, 0)


def test_a_reader_never_sees_half_a_write() -> None:
    reader, fd = StepBoard.create()
    script = (
        "import sys\n"
        "from localllm.worker.board import StepBoard\n"
        "board = StepBoard.attach(int(sys.argv[1]))\n"
        "print('go', flush=True)\n"
        "step = 0\n"
        "while True:\n"
        "    step += 1\n"
        "    board.began([step * 1000 + i for i in range(step % 40)], step / 8)\n"
        "    board.ended()\n"
    )
    writer = subprocess.Popen(
        [sys.executable, "-c", script, str(fd)], pass_fds=(fd,), cwd=PROJECT, stdout=subprocess.PIPE
    )
    try:
        assert writer.stdout is not None
        writer.stdout.readline()
        seen, last, deadline_s = 0, 0, time.monotonic() + 1.0
        while time.monotonic() < deadline_s:
            state = reader.read()
            assert state.step >= last
            last = state.step
            if state.is_running:
                seen += 1
                assert state.expected_s == state.step / 8
                assert state.numbers == tuple(state.step * 1000 + i for i in range(state.step % 40))
        assert seen > 100
    finally:
        writer.kill()
        writer.communicate()
        os.close(fd)
    assert reader.read().step >= last  # and after its death too
    reader.close()


@pytest.mark.skipif(sys.platform != "linux", reason="only there can a file be sealed")
def test_nobody_can_shrink_it_under_a_reader(boards: Boards) -> None:
    with pytest.raises(OSError):
        os.ftruncate(boards[2], 0)


def test_the_memory_outlives_the_descriptor() -> None:
    board, fd = StepBoard.create()
    writer = StepBoard.attach(fd)
    os.close(fd)
    writer.began([3], None)
    assert board.read().numbers == (3,)
    board.close()
    writer.close()
