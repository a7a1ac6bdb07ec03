"""A step's events leave as one frame, in order, and nobody waits for a slow reader."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import pytest

from localllm.runtime import events
from localllm.worker.outgoing import Outgoing
from localllm.worker.protocol import FrameReader, Happened, Log, Result, event_from_wire

Pair: TypeAlias = tuple[Outgoing, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    ours, theirs = socket.socketpair()
    theirs.settimeout(10)
    outgoing = Outgoing(ours)
    yield outgoing, theirs
    outgoing.close()
    ours.close()
    theirs.close()


def token(text: str, choice: int = 0) -> events.Token:
    return events.Token(choice, text, (1,))


def read_frames(sock: socket.socket, enough: Callable[[list[Any]], Any]) -> list[Any]:
    """Read frames until `enough(frames)`."""
    reader, frames = FrameReader(), list[Any]()
    while not enough(frames):
        frames.extend(reader.feed(sock.recv(1 << 16)))
    return frames


def told(frames: list[Any]) -> dict[int, list[Any]]:
    """Return all events by number."""
    found: dict[int, list[Any]] = {}
    for frame in frames:
        for number, wires in frame.entries if isinstance(frame, Happened) else ():
            found.setdefault(number, []).extend(map(event_from_wire, wires))
    return found


def test_what_was_added_leaves_as_one_frame_and_only_when_published(pair: Pair) -> None:
    outgoing, theirs = pair
    outgoing.add(1, [token("a")])
    outgoing.add(2, [token("b")])
    outgoing.add(1, [token("c"), events.Done()])
    theirs.setblocking(False)
    with pytest.raises(BlockingIOError):
        theirs.recv(1)
    theirs.settimeout(10)
    before_s = time.monotonic()
    outgoing.publish()
    (frame,) = read_frames(theirs, bool)
    assert [(number, len(wires)) for number, wires in frame.entries] == [(1, 3), (2, 1)]
    assert told([frame])[1] == [token("a"), token("c"), events.Done()]
    assert before_s <= frame.sent_s <= time.monotonic()


def test_nothing_added_sends_nothing(pair: Pair) -> None:
    outgoing, theirs = pair
    outgoing.publish()
    outgoing.send(Result(1, 2))
    assert read_frames(theirs, bool) == [Result(1, 2)]


def test_a_frame_leaves_after_the_events_before_it(pair: Pair) -> None:
    outgoing, theirs = pair
    outgoing.add(1, [events.Done()])
    outgoing.send(Result(5))
    frames = read_frames(theirs, lambda frames: len(frames) == 2)
    assert [type(frame) for frame in frames] == [Happened, Result]


def test_a_reader_that_sleeps_keeps_nobody_waiting_and_loses_nothing(pair: Pair) -> None:
    outgoing, theirs = pair
    n_steps, longest_s = 20_000, 0.0
    for step in range(n_steps):
        started_s = time.perf_counter()
        outgoing.add(step % 8, [token(f"{step:>60}")])
        outgoing.publish()
        longest_s = max(longest_s, time.perf_counter() - started_s)
    outgoing.add(0, [events.Done()])
    outgoing.publish()
    assert longest_s < 1.0  # nobody reads: a blocking send would never have come back
    frames = read_frames(theirs, lambda frames: frames and events.Done() in told(frames[-1:]).get(0, []))
    found = told(frames)
    for number in range(8):
        texts = [int(e.text) for e in found[number] if isinstance(e, events.Token)]
        assert texts == list(range(number, n_steps, 8))
    assert len(frames) < n_steps / 4  # what waited went together


def test_it_sends_directly_again_once_the_reader_has_caught_up(pair: Pair) -> None:
    outgoing, theirs = pair
    outgoing.send(Result(1, b"x" * 3_000_000))
    outgoing.send(Result(2))
    assert not outgoing.drain(0.05)
    assert [frame.number for frame in read_frames(theirs, lambda frames: len(frames) == 2)] == [1, 2]
    assert outgoing.drain(5)
    outgoing.add(3, [token("x")])
    outgoing.publish()
    theirs.setblocking(False)  # it is there already: no thread had to wake up for it
    assert theirs.recv(1 << 16)


def test_many_large_events_become_several_frames(pair: Pair) -> None:
    outgoing, theirs = pair
    vector = b"\0" * 400_000
    for index in range(300):  # 120 MB: more than one frame may hold
        outgoing.add(1, [events.Embedded(index, vector)])
    outgoing.add(1, [events.Done()])
    outgoing.publish()
    found, reader = list[Any](), FrameReader()
    while events.Done() not in found:
        for frame in reader.feed(theirs.recv(1 << 20)):
            found += [event.index if isinstance(event, events.Embedded) else event for event in told([frame])[1]]
    assert found == [*range(300), events.Done()]


def test_a_peer_that_is_gone_is_no_error(pair: Pair) -> None:
    outgoing, theirs = pair
    outgoing.send(Result(1, b"x" * 3_000_000))  # the writer's thread is at it
    theirs.close()
    for step in range(100):
        outgoing.add(1, [token(str(step))])
        outgoing.publish()
        outgoing.send(Log("info", "x"))
    assert outgoing.drain(5)


@pytest.mark.parametrize("is_behind", [False, True])
def test_closing_ends_its_thread_and_everything_after_is_dropped(is_behind: bool) -> None:
    ours, theirs = socket.socketpair()
    before = set(threading.enumerate())
    outgoing = Outgoing(ours)
    (writer,) = set(threading.enumerate()) - before
    if is_behind:
        outgoing.send(Result(1, b"x" * 3_000_000))
    outgoing.close()
    outgoing.close()
    outgoing.send(Result(2))
    outgoing.add(1, [token("x")])
    outgoing.publish()
    theirs.close()
    writer.join(5)
    assert not writer.is_alive()
    ours.close()


def test_threads_may_send_at_once(pair: Pair) -> None:
    outgoing, theirs = pair
    n_each = 500

    def work(number: int) -> None:
        for at in range(n_each):
            if at % 3:
                outgoing.add(number, [token(str(at))])
                outgoing.publish()
            else:
                outgoing.send(Result(number, at))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    order: dict[int, list[int]] = {number: [] for number in range(4)}
    reader = FrameReader()
    while sum(map(len, order.values())) < 4 * n_each:
        for frame in reader.feed(theirs.recv(1 << 16)):
            if isinstance(frame, Result):
                order[frame.number].append(frame.value)
            for number, batch in told([frame]).items():
                order[number] += [int(event.text) for event in batch]
    for thread in threads:
        thread.join()
    assert all(seen == list(range(n_each)) for seen in order.values())


def test_while_something_large_is_on_its_way_a_step_waits_for_a_part_of_it_at_most(pair: Pair) -> None:
    outgoing, theirs = pair
    large = threading.Thread(target=outgoing.send, args=(Result(1, b"x" * 50_000_000),))
    reader = threading.Thread(target=lambda: [theirs.recv(1 << 20) for _ in range(40)])
    reader.start()
    large.start()
    large.join(10)
    assert not large.is_alive()  # it was left to the thread, although the peer reads
    outgoing.add(2, [token("x")])
    outgoing.publish()
    reader.join()
    assert outgoing.drain(0.01) is False  # 50 MB have not left after at most 40
