"""An engine at which a plan's faults happen. Imported only under LOCALLLM_FAULTS=1."""

from __future__ import annotations

import builtins
import ctypes
import errno
import os
import signal
import sys
import time
from collections.abc import Sequence
from types import FrameType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localllm.errors import EngineError
from localllm.models.tokenizer import Tokenizer
from localllm.runtime.engine import Batch, Edit, EditResult, EmbedChunk, Engine, EngineSpec, NoRoom, StepOutput
from localllm.worker.faults import Fault, Plan

_FILE_EVENTS = frozenset(
    ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.scandir")
)


class FaultyEngine:
    """Wraps an engine; the faults of a plan happen before, after or instead of what it does."""

    spec: EngineSpec
    tokenizer: Tokenizer

    def __init__(self, engine: Engine, plan: Plan) -> None:
        self.spec = engine.spec
        self.tokenizer = engine.tokenizer
        self._engine = engine
        self._plan = plan
        self._script: tuple[int, ...] | None = None
        self._said: dict[int, tuple[int, int]] = {}  # by slot: where its rows ended, tokens of the script so far

    def edit(self, edits: Sequence[Edit]) -> list[EditResult]:
        """Apply KV edits."""
        if edits:
            for fault in self._plan.due("edit"):
                happen(fault)
        return self._engine.edit(edits)

    def forward(self, batch: Batch) -> StepOutput:
        """Run one step."""
        rows = [item.tokens for item in batch.items]
        spoilt = []
        for fault in self._plan.due("forward", rows):
            if fault.do == "logit":
                spoilt.append(fault)
            elif fault.do == "tokens":
                self._script = fault.tokens
            else:
                happen(fault)
        output = self._engine.forward(batch)
        for fault in self._plan.due("after_forward", rows):
            happen(fault)
        if not spoilt and self._script is None:
            return output
        logits = output.logits.copy()
        self._say_script(batch, logits)
        for fault in spoilt:
            if fault.row < len(logits):
                logits[fault.row, fault.token] = float(fault.value)
        return StepOutput(logits, output.first_held, output.hidden)

    def export(self, slot: int, start: int, end: int) -> bytes:
        """Return positions of a slot as bytes."""
        return self._engine.export(slot, start, end)

    def checkpoint(self, slot: int) -> bytes:
        """Return the part of a slot's state that cannot be cut."""
        return self._engine.checkpoint(slot)

    def embed(self, chunk: EmbedChunk) -> NDArray[np.float32] | None:
        """Run rows of a text to embed."""
        for fault in self._plan.due("embed", [chunk.tokens]):
            happen(fault)
        return self._engine.embed(chunk)

    def close(self) -> None:
        """Free the engine."""
        self._engine.close()

    def _say_script(self, batch: Batch, logits: NDArray[np.float32]) -> None:
        """Make the script's next token the best one of each row, for each slot from its own place."""
        script, row = self._script, 0
        ends = self.tokenizer.vocabulary.eog_ids
        if script is None:
            return
        for item in batch.items:
            end, n_said = self._said.get(item.slot, (-1, 0))
            if item.start != end or not item.n_logits:
                n_said = 0
            for _ in range(item.n_logits):
                token = script[n_said] if n_said < len(script) else min(ends)
                logits[row, token] = logits[row].max() + 100
                row, n_said = row + 1, n_said + 1
            self._said[item.slot] = (item.start + len(item.tokens), n_said)


def happen(fault: Fault) -> None:
    """Let a fault happen on this thread, now."""
    match fault.do:
        case "signal":
            os.kill(os.getpid(), signal.Signals[fault.signal])
            time.sleep(1)  # until it is delivered
        case "exit":
            os._exit(fault.code)
        case "hang":
            _hang(fault.gil)
        case "stall":
            time.sleep(fault.seconds)
        case "raise":
            raise _error(fault.error)
        case "rc" if fault.code:
            raise NoRoom if fault.code == 1 else EngineError(f"llama.cpp failed in a forward (code {fault.code}).")
        case "file":
            _fail_file_operation(fault.k, fault.error or "EIO")
        case "allocation":
            _fail_allocation(fault.k)
        case _:
            pass


def _error(name: str) -> BaseException:
    ours: dict[str, BaseException] = {"EngineError": EngineError("a fault"), "NoRoom": NoRoom()}
    return ours.get(name) or getattr(builtins, name or "RuntimeError")("a fault")


def _hang(holds_gil: bool) -> None:
    sleep = ctypes.PyDLL(None).sleep if holds_gil else ctypes.CDLL(None).sleep
    while True:
        sleep(3600)


def _fail_file_operation(k: int, name: str) -> None:
    """Let the k-th file operation of this process from now on fail."""
    n_left, code = k, getattr(errno, name)

    def fail(event: str, _: tuple[Any, ...]) -> None:
        nonlocal n_left
        if event in _FILE_EVENTS and n_left > 0:
            n_left -= 1
            if n_left == 0:
                raise OSError(code, os.strerror(code))

    sys.addaudithook(fail)


def _fail_allocation(k: int) -> None:
    """Let the k-th call from now on, on this thread, find no memory."""
    n_left = k

    def fail(frame: FrameType, event: str, _: object) -> None:
        nonlocal n_left
        if event in ("call", "c_call"):
            n_left -= 1
            if n_left == 0:
                sys.setprofile(None)
                raise MemoryError

    sys.setprofile(fail)
