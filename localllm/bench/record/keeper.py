"""Writes what was seen of each request into the trace, from a thread of its own, away from what is passed on."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from localllm.bench.client.answers import Answer, StreamFold, fold_body
from localllm.bench.workloads.filler import Filler
from localllm.bench.workloads.filler_body import BodyFiller
from localllm.bench.workloads.trace import VERSION, Ended, Header, Recorded, line_of
from localllm.errors import LocalLLMError, UsageError


@dataclass(slots=True)
class Seen:
    """What passed through of one request. Times in seconds from the start of the recording.

    `events`: of a stream, and when each came; `answer`: the body of another answer. `is_whole`: the
    answer ended as HTTP ends it. `ended`: why it did not.
    """

    at_s: float
    path: str
    body: bytes
    status: int | None = None
    events: list[tuple[float, bytes]] = field(default_factory=list)
    answer: list[bytes] = field(default_factory=list)
    rest: bytes = b""
    is_stream: bool = False
    is_whole: bool = False
    ended: Ended = "broken"
    ended_s: float = 0.0


class Keeper:
    """One trace file. `keep` hands over and returns at once; the file grows by whole lines.

    `keeps_text`: bodies are written as they came, without filler. `n_kept`: requests in the file;
    `n_passed_over`: requests that are no JSON object; `failure`: why nothing is written any more.
    """

    def __init__(
        self, path: Path, *, keeps_text: bool = False, on_kept: Callable[[int], None] = lambda n_kept: None
    ) -> None:
        """Make the file, for this user alone. Raises UsageError where it exists or cannot be made."""
        self._path = path
        self._filler = None if keeps_text else BodyFiller(Filler())
        self._on_kept = on_kept
        self._queue: queue.SimpleQueue[Seen | None] = queue.SimpleQueue()
        self.n_kept = 0
        self.n_passed_over = 0
        self.failure = ""
        began_at = datetime.now(UTC).isoformat(timespec="seconds")
        self._file = _create(path)
        self._write(Header(localllm_trace=VERSION, began_at=began_at, texts="kept" if keeps_text else "filler"))
        self._thread = threading.Thread(target=self._run, name="localllm-trace", daemon=True)
        self._thread.start()

    def keep(self, seen: Seen) -> None:
        """Have a request written that has ended."""
        self._queue.put(seen)

    def close(self) -> None:
        """Write what is left and close the file. Idempotent."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _run(self) -> None:
        while (seen := self._queue.get()) is not None:
            try:
                recorded = self._recorded(seen)
            except Exception as error:  # what it says may hold text of the request
                self.failure = self.failure or f"{type(error).__name__} while it was written down"
                continue
            if recorded is None:
                self.n_passed_over += 1
            elif self._write(recorded):
                self.n_kept += 1
                self._on_kept(self.n_kept)

    def _write(self, value: Header | Recorded) -> bool:
        """Append one line at once, so that a kill leaves whole lines behind."""
        if self.failure:
            return False
        try:
            line = memoryview(line_of(value))
            while line:
                line = line[os.write(self._file, line) :]
        except OSError as error:
            self.failure = error.strerror or "the file could not be written"
            return False
        return True

    def _recorded(self, seen: Seen) -> Recorded | None:
        body = _object(seen.body)
        if body is None:
            return None
        n_left_out = 0
        if self._filler is not None:
            before = self._filler.n_left_out
            body = self._filler.body(body)
            n_left_out = self._filler.n_left_out - before
        answer = _folded(seen)
        return Recorded(
            at_s=round(seen.at_s, 6),
            path=seen.path,
            body=body,
            status=seen.status,
            ended=_ended(seen, answer),
            duration_s=round(seen.ended_s - seen.at_s, 6),
            first_s=round(answer.token_s[0] - seen.at_s, 6) if answer.token_s else None,
            prompt_tokens=answer.prompt_tokens,
            completion_tokens=answer.completion_tokens,
            cached_tokens=answer.cached_tokens,
            n_pieces=len(answer.token_s),
            n_left_out=n_left_out,
        )


def _create(path: Path) -> int:
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise UsageError(f"{path} is there already.", "name another file with -o") from None
    except FileNotFoundError:
        raise UsageError(f"There is no folder {path.parent}.", f"mkdir -p {path.parent}") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}.", "name another file with -o") from None
    with suppress(OSError):
        os.fchmod(file, 0o600)
    return file


def _object(body: bytes) -> dict[str, Any] | None:
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _folded(seen: Seen) -> Answer:
    if not seen.is_stream:
        return fold_body(seen.status or 0, b"".join(seen.answer)) if seen.is_whole else Answer()
    fold = StreamFold()
    for arrived_s, event in seen.events:
        fold.take(arrived_s, event)
    return fold.finished(seen.rest)


def _ended(seen: Seen, answer: Answer) -> Ended:
    """Return how it ended for who asked: many hang up at [DONE], before HTTP's own end."""
    if seen.status is not None and seen.status >= 400:
        return "refused"
    if "error" in answer.terminals:
        return "broken"
    return "answer" if answer.terminals else seen.ended


class TraceNotWritten(LocalLLMError):
    """The recording went on, but its file did not take it."""

    code = "trace_not_written"
