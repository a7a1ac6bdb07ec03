"""The log: a request a line, as text or JSON. Ids, counts, codes and times; never text of a request.

A thread of its own writes, so a terminal that stands still or a full pipe never holds the server up.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from datetime import UTC, datetime
from typing import Any, Literal, TextIO, TypeAlias

from localllm.server.record import RequestRecord

LogFormat: TypeAlias = Literal["text", "json"]

_MAX_WAITING_LINES = 10_000


class RequestLog:
    """Writes lines to `out` in the order in which they came; drops, and says how many, while `out` takes none."""

    def __init__(self, log_format: LogFormat, out: TextIO) -> None:
        self._is_json = log_format == "json"
        self._out = out
        self._lines: queue.Queue[str | None] = queue.Queue(_MAX_WAITING_LINES)
        self._n_dropped = 0
        self._writer = threading.Thread(target=self._write_lines, name="log", daemon=True)
        self._writer.start()

    def write(self, record: RequestRecord) -> None:
        """Log a request that ended."""
        facts = facts_of(record)
        self._put(self._line("info", facts, " ".join(f"{name}={_text(value)}" for name, value in facts.items())))

    def note(self, level: str, text: str) -> None:
        """Log a line in words of ours."""
        self._put(self._line(level, {"event": "note", "text": text}, _one_line(text)))

    def close(self, timeout_s: float = 1.0) -> None:
        """Write what is left, as far as `out` takes it in time. Idempotent."""
        if self._writer.is_alive():
            try:
                self._lines.put(None, timeout=timeout_s)
            except queue.Full:
                return
            self._writer.join(timeout_s)

    def _line(self, level: str, facts: dict[str, Any], text: str) -> str:
        at = datetime.fromtimestamp(time.time(), UTC).isoformat(timespec="milliseconds")
        if self._is_json:
            return json.dumps({"time": at, "level": level, **facts}, ensure_ascii=True)
        return f"{at} {level} {text}"

    def _put(self, line: str) -> None:
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            self._n_dropped += 1

    def _write_lines(self) -> None:
        while (line := self._lines.get()) is not None:
            try:
                self._out.write(line + "\n")
                if self._n_dropped and not self._lines.full():
                    n_dropped, self._n_dropped = self._n_dropped, 0
                    text = f"{n_dropped} log lines were dropped: nobody read them"
                    self._out.write(self._line("warning", {"event": "note", "text": text}, text) + "\n")
                if self._lines.empty():
                    self._out.flush()
            except (OSError, ValueError):  # the reader of the log is gone: the server is not
                continue


def facts_of(record: RequestRecord) -> dict[str, Any]:
    """Return what the log tells of a request; names without a value are left out."""
    itl, ttft_s = record.itl, record.ttft_s
    facts: dict[str, Any] = {
        "event": "request",
        "request_id": record.request_id,
        "method": record.method,
        "route": record.route,
        "code": record.code,
        "error": record.error or None,
        "model": record.model or None,
        "client": record.client or None,
        "stream": record.is_stream or None,
        "finish_reason": record.finish_reason or None,
        "cancelled": record.is_cancelled or None,
        "prompt_tokens": record.n_prompt_tokens or None,
        "cached_tokens": sum(record.cached_tokens.values()) if record.n_prompt_tokens else None,
        "completion_tokens": record.n_completion_tokens or None,
        "inputs": record.n_inputs or None,
        "queue_ms": _ms(record.queue_s),
        "ttft_ms": _ms(ttft_s),
        "itl_ms": _ms(itl.total / itl.n) if itl.n else None,
        "itl_max_ms": _ms(record.itl_max_s) if itl.n else None,
        "ipc_ms": _ms(record.phases_s.get("ipc")),
        "total_ms": _ms(record.total_s),
    }
    return {name: value for name, value in facts.items() if value is not None}


def _ms(elapsed_s: float | None) -> float | None:
    return None if elapsed_s is None else round(elapsed_s * 1000, 3)


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    text = str(value)
    return text if text.isprintable() and " " not in text and '"' not in text else json.dumps(text)


def _one_line(text: str) -> str:
    return " ".join(text.split())
