"""Runs one test's coroutine on a loop of its own and checks that it left nothing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
import time
from collections.abc import Coroutine, Iterator
from typing import Any

import psutil

LIMIT_S = 60.0


def run(work: Coroutine[Any, Any, None], limit_s: float = LIMIT_S) -> None:
    """Run a test; fail where it takes too long, leaves a task, or something told the loop of an error."""
    told: list[dict[str, Any]] = []

    async def checked() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
        await asyncio.wait_for(work, limit_s)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left, left

    asyncio.run(checked())
    assert not told, told


@contextlib.contextmanager
def nothing_left() -> Iterator[None]:
    """Fail where descriptors, child processes or threads are left, and end such processes."""
    before = _descriptors()
    children = set(psutil.Process().children(recursive=True))
    threads = set(threading.enumerate())
    try:
        yield
        _settle(lambda: not set(psutil.Process().children(recursive=True)) - children)
        _settle(lambda: _descriptors() <= before)
        _settle(lambda: not set(threading.enumerate()) - threads)
        assert not set(psutil.Process().children(recursive=True)) - children
        assert _descriptors() <= before, "descriptors left"
        assert not set(threading.enumerate()) - threads, "threads left"
    finally:
        for child in set(psutil.Process().children(recursive=True)) - children:
            with contextlib.suppress(psutil.Error):
                child.kill()


def _settle(is_done: Any, limit_s: float = 3.0) -> None:
    end_s = time.monotonic() + limit_s
    while not is_done() and time.monotonic() < end_s:
        time.sleep(0.01)


def _descriptors() -> set[str]:
    if sys.platform != "linux":
        return set()
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.add(f"{name} {os.readlink(f'/proc/self/fd/{name}')}")
    return found
