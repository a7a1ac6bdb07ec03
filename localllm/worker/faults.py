"""What tests make go wrong in a worker. Imported only under LOCALLLM_FAULTS=1.

LOCALLLM_FAULT_PLAN names a JSON file, `{"faults": [...]}` with the fields of `Fault`; it is read again
when it changes. What fired stands in a file beside it (".fired", a JSON line each), which all workers
of one plan share. LOCALLLM_ENGINE ("module:factory") puts another engine into the worker.
"""

from __future__ import annotations

import fcntl
import importlib
import json
import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec

from localllm.errors import UsageError
from localllm.runtime.config import LoadConfig, RuntimeConfig
from localllm.runtime.hooks import Hooks
from localllm.runtime.service import Service
from localllm.runtime.types import Tokens
from localllm.worker.protocol import Load

Point: TypeAlias = Literal["load", "edit", "forward", "after_forward", "embed"]
Kind: TypeAlias = Literal["signal", "exit", "hang", "stall", "raise", "rc", "file", "allocation", "logit", "tokens"]


class Fault(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One thing that goes wrong, `times` times in all, in whichever workers read the plan.

    When: at `point`, the `step`-th time that a worker comes by (counted from 1), else from the
    `in_steps`-th time on after the plan was read; with `on_tokens`, only where a slot's rows hold
    them in a row. What, by `do`: "signal" `signal`; "exit" `code`; "hang" for ever (with `gil`, so that
    nothing else of the process runs either); "stall" `seconds`; "raise" `error` (EngineError, NoRoom, or a
    built-in); "rc": what a decode that returns `code` becomes; "file": the `k`-th file operation from
    here on fails with `error` (an errno's name); "allocation": the `k`-th call of a function on this
    thread raises MemoryError; "logit": logit `token` of row `row` becomes `value`; "tokens": from here on every
    answer of these slots is `tokens`, then the end.
    """

    id: str
    do: Kind
    point: Point = "forward"
    step: int | None = None
    in_steps: int = 1
    on_tokens: tuple[int, ...] = ()
    times: int = 1
    signal: str = "SIGSEGV"
    code: int = 1
    gil: bool = False
    seconds: float = 0.0
    error: str = ""
    k: int = 1
    row: int = 0
    token: int = 0
    value: float | str = "nan"
    tokens: tuple[int, ...] = ()


class _File(msgspec.Struct, forbid_unknown_fields=True):
    faults: tuple[Fault, ...] = ()


class Plan:
    """The faults still to come. Asked by one thread at a time."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._seen: tuple[int, int, int] | None = None
        self._faults: tuple[Fault, ...] = ()
        self._n_passed: Counter[str] = Counter()
        self._n_before: Counter[str] = Counter()  # when the plan was read

    def due(self, point: Point, rows: Sequence[Tokens] = ()) -> list[Fault]:
        """Return what goes wrong at `point` now, with these rows; it is written down as fired."""
        if self._path is None:
            return []
        self._read_if_changed(self._path)
        self._n_passed[point] += 1
        due = [fault for fault in self._faults if fault.point == point and self._is_met(fault, rows)]
        return [fault for fault in due if self._claim(fault, self._path)]

    def _read_if_changed(self, path: Path) -> None:
        try:
            found = path.stat()
        except FileNotFoundError:
            self._seen, self._faults = None, ()
            return
        seen = (found.st_ino, found.st_mtime_ns, found.st_size)
        if seen != self._seen:
            self._faults = msgspec.json.decode(path.read_bytes(), type=_File).faults
            self._seen, self._n_before = seen, self._n_passed.copy()

    def _is_met(self, fault: Fault, rows: Sequence[Tokens]) -> bool:
        n_passed = self._n_passed[fault.point]
        if fault.on_tokens and not any(_holds(row, fault.on_tokens) for row in rows):
            return False
        if fault.step is not None:
            return n_passed == fault.step
        return n_passed - self._n_before[fault.point] >= fault.in_steps

    def _claim(self, fault: Fault, path: Path) -> bool:
        """Write down that a fault fires here and now; False where it has fired often enough."""
        with open(f"{path}.fired", "a+", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            n_fired = sum(json.loads(line)["id"] == fault.id for line in file)
            if n_fired >= fault.times:
                self._faults = tuple(other for other in self._faults if other is not fault)
                return False
            passed = self._n_passed[fault.point]
            fired = {"id": fault.id, "pid": os.getpid(), "step": passed, "monotonic_s": time.monotonic()}
            file.write(json.dumps(fired) + "\n")
            return True


def plan_of_environment() -> Plan:
    """Return the plan that LOCALLLM_FAULT_PLAN names, or one in which nothing goes wrong."""
    named = os.environ.get("LOCALLLM_FAULT_PLAN")
    return Plan(Path(named) if named else None)


def open_named(name: str, load: Load, config: LoadConfig, runtime: RuntimeConfig, hooks: Hooks) -> Service:
    """Return a service over the engine that `name` ("module:factory") makes of `load`. Raises: UsageError."""
    module, _, factory = name.partition(":")
    try:
        make = getattr(importlib.import_module(module), factory)
    except (ImportError, AttributeError):
        raise UsageError(f"LOCALLLM_ENGINE names no factory: {name}.", "LOCALLLM_ENGINE=module:factory") from None
    model, facts, engine = make(load)
    if runtime.max_running is None:
        runtime = replace(runtime, max_running=config.parallel)
    return Service(model, facts, engine, runtime, hooks=hooks)


def _holds(row: Tokens, wanted: Sequence[int]) -> bool:
    length, wanted = len(wanted), list(wanted)
    return any(list(row[at : at + length]) == wanted for at in range(len(row) - length + 1))
