"""A worker process without a supervisor, for tests: started, spoken to by frames, and gone afterwards."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from localllm.runtime import events
from localllm.runtime.config import LoadConfig, RuntimeConfig
from localllm.runtime.events import Event
from localllm.runtime.types import Request
from localllm.worker.board import StepBoard
from localllm.worker.description import config_to_wire, runtime_to_wire
from localllm.worker.protocol import (
    AnyFrame,
    Call,
    Failed,
    Frame,
    FrameReader,
    Happened,
    Load,
    Loaded,
    Result,
    event_from_wire,
    pack,
    submit_frame,
)
from tests.conftest import PROJECT

F = TypeVar("F", bound=Frame)
FAKE = {"LOCALLLM_FAULTS": "1", "LOCALLLM_ENGINE": "tests.fake_engine:parts"}
_PATIENCE_S = 20.0


def load_frame(model: str | Path = "fake.gguf", **settings: Any) -> Load:
    """Return a frame that loads `model`; `config`, `runtime` and the frame's other fields may be given."""
    config = config_to_wire(settings.pop("config", LoadConfig(parallel=8)))
    runtime = runtime_to_wire(settings.pop("runtime", RuntimeConfig()))
    return Load(str(model), settings.pop("name", "tested"), config, runtime, settings.pop("key", b"k" * 32), **settings)


class LoneWorker:
    """One worker process over a FakeEngine (or another one, by `environment`)."""

    def __init__(self, environment: Mapping[str, str] = FAKE, *, launcher: tuple[str, ...] = ()) -> None:
        self.board, board_fd = StepBoard.create()
        self.socket, theirs = socket.socketpair()
        self.socket.settimeout(_PATIENCE_S)
        command = [*launcher, sys.executable, "-m", "localllm.worker.main", str(theirs.fileno()), str(board_fd)]
        with theirs:
            self.process = subprocess.Popen(
                command,
                pass_fds=(theirs.fileno(), board_fd),
                env={**os.environ, "PYTHONPATH": str(PROJECT), **environment},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        os.close(board_fd)
        self._reader = FrameReader()
        self._frames: deque[AnyFrame] = deque()
        self.events: dict[int, list[Event]] = {}
        self.n_happened = 0

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.process.pid

    def send(self, *frames: Frame) -> None:
        """Send frames."""
        self.socket.sendall(b"".join(map(pack, frames)))

    def submit(self, number: int, request: Request) -> None:
        """Start a request."""
        self.send(submit_frame(number, request))

    def load(self, frame: Load | None = None) -> Mapping[str, Any]:
        """Have it load, and return what it says of the model."""
        self.send(frame or load_frame())
        return self.expect(Loaded).model

    def next_frame(self) -> AnyFrame | None:
        """Return the next frame; None after its end. What happened is also kept in `events`."""
        while not self._frames:
            try:
                data = self.socket.recv(1 << 16)
            except ConnectionResetError:
                data = b""
            if not data:
                return None
            self._frames.extend(self._reader.feed(data))
        frame = self._frames.popleft()
        if isinstance(frame, Happened):
            self.n_happened += 1
            for number, wires in frame.entries:
                self.events.setdefault(number, []).extend(map(event_from_wire, wires))
        return frame

    def expect(self, kind: type[F], is_it: Callable[[F], bool] = lambda frame: True) -> F:
        """Read until a frame of a kind comes, and return it."""
        while (frame := self.next_frame()) is not None:
            if isinstance(frame, kind) and is_it(frame):
                return frame
        raise AssertionError(f"no {kind.__name__} came")

    def call(self, number: int, verb: str, argument: Any = None) -> Any:
        """Return the value of a call. Raises AssertionError with the code of what it failed with."""
        self.send(Call(number, verb, argument))
        while (frame := self.next_frame()) is not None:
            if isinstance(frame, Result) and frame.number == number:
                return frame.value
            assert not (isinstance(frame, Failed) and frame.number == number), frame
        raise AssertionError("the worker is gone")

    def until(self, is_enough: Callable[[], bool]) -> None:
        """Read frames until something holds."""
        while not is_enough():
            assert self.next_frame() is not None, "the worker is gone"

    def answer(self, number: int) -> list[Event]:
        """Read to the end of a request, and return its events."""
        self.until(lambda: is_over(self.events.get(number, [])))
        return self.events[number]

    def returncode(self, within_s: float = _PATIENCE_S) -> int:
        """Wait for its end."""
        return self.process.wait(within_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.socket.close()
        self.process.kill()
        self.process.communicate()
        self.board.close()


def is_over(batch: list[Event]) -> bool:
    """Say whether events end with a terminal one."""
    return bool(batch) and isinstance(batch[-1], (events.Done, events.Error))


def text_of(batch: list[Event], choice: int = 0) -> str:
    """Return the text in events."""
    return "".join(e.text for e in batch if isinstance(e, events.Token) and e.choice == choice)


def wait_until(holds: Callable[[], bool], within_s: float = _PATIENCE_S) -> None:
    """Wait for something to hold."""
    deadline_s = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline_s, "it never came to hold"
        time.sleep(0.005)
