"""The process that owns an engine: `python -m localllm.worker.main SOCKET_FD BOARD_FD`.

It is started by the supervisor, on a thread that outlives it (the kernel ends a worker with the thread
that started it), with the two descriptors inherited. The first frame is `Load`; the process ends with
its socket, whatever is computed then; only what is kept of prompts may go to disk before, for as long as the
settings say.

Threads: this one reads the socket; one loads and then waits for the engine's end; two prepare; the
engine's own; one writes while the peer is slow.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NoReturn

from localllm.errors import LocalLLMError, Unavailable
from localllm.runtime.hooks import Hooks
from localllm.runtime.types import ChatRequest
from localllm.worker.board import StepBoard
from localllm.worker.calls import unexpected
from localllm.worker.delivery import Delivery
from localllm.worker.description import config_from_wire, describe_loaded, runtime_from_wire
from localllm.worker.desk import Desk, refuse
from localllm.worker.gate import Gate
from localllm.worker.harden import harden, take_niceness
from localllm.worker.lifecycle import KEEPING_LINE, STEP_S, keeping_s
from localllm.worker.outgoing import Outgoing
from localllm.worker.protocol import (
    Accepted,
    AnyFrame,
    BadFrame,
    Call,
    Cancel,
    Frame,
    FrameReader,
    Load,
    Loaded,
    Log,
    Submit,
    failure,
)

if TYPE_CHECKING:
    from localllm.runtime.config import LoadConfig, RuntimeConfig
    from localllm.runtime.sequence import RequestRun
    from localllm.runtime.service import Service

EXIT_ENDED, EXIT_FAILED, EXIT_ENGINE_DIED, EXIT_BAD_FRAME = 0, 1, 70, 76
_RECEIVE_BYTES = 1 << 18
_LAST_WORDS_S = 1.0
# With Python's 5 ms, steps of the engine come up to nine times later while long prompts are prepared
# (p95 of 41 to 52 ms instead of 14, steps of 5 ms): its thread asks for the lock several times a step.
_HANDOVER_S = 0.0005
_MAX_LOG_CHARS = 2000

logger = logging.getLogger("localllm.worker")


def main() -> None:
    """Serve until the socket ends. Never returns, and runs no clean-up that native code could hang in."""
    code = EXIT_FAILED
    try:
        harden()
        sys.setswitchinterval(_HANDOVER_S)
        sock = socket.socket(fileno=int(sys.argv[1]))
        sock.set_inheritable(False)
        board = StepBoard.attach(int(sys.argv[2]))
        os.close(int(sys.argv[2]))
        code = Worker(sock, board).serve()
    except BaseException as error:
        with contextlib.suppress(OSError):
            traceback.print_tb(error.__traceback__)
            print(type(error).__name__, file=sys.stderr, flush=True)  # its own text might quote a request
    finally:
        os._exit(code)


class Worker:
    """Reads frames, on one thread; hands work to those who do it."""

    def __init__(self, sock: socket.socket, board: StepBoard) -> None:
        self._socket = sock
        self._watch = BoardWatch(board)
        self._outgoing = Outgoing(sock)
        self._loading: threading.Thread | None = None
        self._desk: Desk | None = None
        self._keep: Callable[[], None] = _nothing
        self._is_ending = False
        tell_logs(self._outgoing)

    def serve(self) -> int:
        """Do what frames ask for until the socket ends; return the exit code."""
        try:
            for frame in received(self._socket):
                self._handle(frame)
        except BadFrame as error:
            logger.error("the socket brought what is no frame of ours: %s", error)
            self._outgoing.drain(_LAST_WORDS_S)
            return EXIT_BAD_FRAME
        self._is_ending = True
        self._keep()
        return EXIT_ENDED

    def _handle(self, frame: AnyFrame) -> None:
        match frame:
            case Load() if self._loading is None:
                take_niceness(frame.nice)
                self._loading = threading.Thread(target=self._load, args=(frame,), name="localllm-load", daemon=True)
                self._loading.start()
            case Submit() | Call() | Cancel() if self._desk is not None:
                self._desk.take(frame)
            case Submit() | Call():
                error = Unavailable("The model is being loaded.", "try again in a moment")
                refuse(frame, error, self._outgoing)
            case Cancel():
                pass
            case _:
                raise BadFrame(type(frame).__name__)

    def _load(self, load: Load) -> None:
        """Load the model, say so, and wait for its engine's end: nobody waits for answers of a dead one."""
        gate = Gate(load.key, load.lone, load.refused)
        hooks = Hooks(watch=self._watch, gate=partial(judge, gate, self._outgoing), published=self._outgoing.publish)
        try:
            config, runtime = config_from_wire(load.config), runtime_from_wire(load.runtime)
            service = open_service(load, config, runtime, hooks)
            model = {**describe_loaded(service, config), "name": load.name or service.model.name}
        except BaseException as error:
            self._leave(failure(0, unexpected(error)), EXIT_FAILED)
        self._desk = Desk(service, self._outgoing, runtime.max_waiting)
        self._keep = partial(close_in_time, service, self._watch, keeping_s(runtime))
        self._outgoing.send(Loaded(model))
        warm_up(service)
        service.wait_ended()
        if self._is_ending:
            return
        self._leave(Log("error", "the engine's thread has ended: the process ends with it"), EXIT_ENGINE_DIED)

    def _leave(self, last: Frame, code: int) -> NoReturn:
        """End the process once its last words have left."""
        self._outgoing.send(last)
        self._outgoing.drain(_LAST_WORDS_S)
        os._exit(code)


class BoardWatch:
    """Writes every step on the board, by the numbers of its requests."""

    def __init__(self, board: StepBoard) -> None:
        self._board = board
        self.is_running = False

    def began(self, runs: tuple[RequestRun, ...], expected_s: float | None) -> None:
        """Tell which requests are about to enter native code."""
        self.is_running = True
        self._board.began([run.stream.number for run in runs if isinstance(run.stream, Delivery)], expected_s)

    def ended(self) -> None:
        """Tell that the step came back."""
        self._board.ended()
        self.is_running = False


def judge(gate: Gate, outgoing: Outgoing, run: RequestRun) -> None:
    """Let a prepared request in, unless it is suspected or gone. Raises: Poisoned, GoneAlready."""
    delivery = run.stream
    assert isinstance(delivery, Delivery)
    fingerprint = gate.judge(run, delivery.options)
    delivery.let_in()
    outgoing.send(Accepted(delivery.number, fingerprint))


def open_service(load: Load, config: LoadConfig, runtime: RuntimeConfig, hooks: Hooks) -> Service:
    """Load what is asked for. With LOCALLLM_FAULTS=1, what a test wants to go wrong does. Raises as `compose.open`."""
    if os.environ.get("LOCALLLM_FAULTS") == "1":
        from localllm.worker import faults, faulty_engine

        plan = faults.plan_of_environment()
        for fault in plan.due("load"):
            faulty_engine.happen(fault)
        hooks = replace(hooks, wrap_engine=lambda engine: faulty_engine.FaultyEngine(engine, plan))
        named = os.environ.get("LOCALLLM_ENGINE")
        if named:
            return faults.open_named(named, load, config, runtime, hooks)
    from localllm import compose

    if keeping_s(runtime):
        learn_hash(load.model)
    return compose.open(load.model, config, runtime=runtime, hooks=hooks)


def learn_hash(model: str) -> None:
    """Hash a file that never was, once and for all: without it nothing of the model may be kept on disk."""
    from localllm.models.hashes import sha256_of
    from localllm.models.resolve import resolve

    with contextlib.suppress(LocalLLMError, OSError):  # loading tells what is wrong
        found = resolve(model)
        if found.sha256 is None and len(found.files) == 1:
            sha256_of(found.path)


def warm_up(service: Service) -> None:
    """Do what the first request would wait for, and what a later step would: compiling, looking for garbage."""
    with contextlib.suppress(LocalLLMError):
        service.render_prompt(ChatRequest(({"role": "user", "content": "Hello"},)))
    gc.collect()
    gc.freeze()  # a collection of all that is loaded stops every thread for 10 ms


def close_in_time(service: Service, watch: BoardWatch, keep_s: float) -> None:
    """Let a model put on disk what it has kept; a step that is stuck, or a slow disk, ends the waiting."""
    if not keep_s:
        return
    with contextlib.suppress(OSError):
        os.write(2, KEEPING_LINE + b"\n")
    closing = threading.Thread(target=service.close, name="localllm-close", daemon=True)
    closing.start()
    closing.join(STEP_S)
    if closing.is_alive() and not watch.is_running:
        closing.join(keep_s)


def received(sock: socket.socket) -> Iterator[AnyFrame]:
    """Yield frames until the peer is gone. Raises BadFrame."""
    reader = FrameReader()
    with contextlib.suppress(ConnectionError):
        while data := sock.recv(_RECEIVE_BYTES):
            yield from reader.feed(data)


def _nothing() -> None:
    """No model is loaded, so nothing is kept."""


class _LogFrames(logging.Handler):
    """Sends what our own modules log; they never log text of a request."""

    def __init__(self, outgoing: Outgoing) -> None:
        super().__init__()
        self._outgoing = outgoing

    def emit(self, record: logging.LogRecord) -> None:
        self._outgoing.send(Log(record.levelname.lower(), record.getMessage()[:_MAX_LOG_CHARS]))


def tell_logs(outgoing: Outgoing) -> None:
    """Send log lines as frames, and what no one catches by its kind and place alone."""
    logging.getLogger("localllm").addHandler(_LogFrames(outgoing))

    def tell(caught: threading.ExceptHookArgs) -> None:
        thread = caught.thread.name if caught.thread else "thread"
        place = "".join(traceback.format_tb(caught.exc_traceback))
        logger.error("%s ended: %s\n%s", thread, caught.exc_type.__name__, place)

    threading.excepthook = tell


if __name__ == "__main__":
    main()
