"""Reads HTTP/1.1 answers and event streams as they arrive, without a socket: bytes in, pieces out.

For a client that measures: nothing is decoded here that can be decoded after the answer ended.
"""

from __future__ import annotations

from collections.abc import Iterator

MAX_HEAD_BYTES = 64 << 10
MAX_EVENT_BYTES = 16 << 20


class Malformed(Exception):
    """The bytes are no HTTP/1.1 answer, or no event stream. The message quotes nothing of them."""


class AnswerReader:
    """One answer: its status, its headers (names lower case) and the body cut out of its framing."""

    def __init__(self) -> None:
        self.status: int | None = None
        self.headers: dict[str, str] = {}
        self.is_complete = False
        self._held = b""
        self._left: int | None = None  # bytes of the body, or of its present chunk; None = until the end
        self._is_chunked = False
        self._phase = self._head

    @property
    def has_begun(self) -> bool:
        """Whether any byte of it came."""
        return self.status is not None or bool(self._held)

    @property
    def keeps_alive(self) -> bool:
        """Whether the connection may carry another answer after this one."""
        known_end = self._is_chunked or "content-length" in self.headers
        return self.is_complete and known_end and self.headers.get("connection", "").lower() != "close"

    def feed(self, data: bytes) -> list[bytes]:
        """Take what arrived; return the pieces of the body in it. Raises Malformed."""
        held = self._held + data if self._held else data
        pieces: list[bytes] = []
        while held and not self.is_complete:
            rest = self._phase(held, pieces)
            if rest is None:
                break
            held = rest
        if self.is_complete and held:
            raise Malformed("bytes after the end of the answer")
        self._held = held
        return pieces

    def end(self) -> bool:
        """Note that the connection ended; return whether that was a proper end of the answer."""
        if self.status is not None and self._phase == self._body and self._left is None and not self._is_chunked:
            self.is_complete = True
        return self.is_complete

    # --- phases: each takes what is held and returns what it left, or None where it needs more

    def _head(self, held: bytes, pieces: list[bytes]) -> bytes | None:
        end = held.find(b"\r\n\r\n")
        if end < 0:
            if len(held) > MAX_HEAD_BYTES:
                raise Malformed("the headers do not end")
            return None
        lines = held[:end].decode("latin-1").split("\r\n")
        rest = held[end + 4 :]
        status = _status(lines[0])
        if 100 <= status < 200:
            return rest
        self.status = status
        for line in lines[1:]:
            name, colon, value = line.partition(":")
            if not colon:
                raise Malformed("a header without a colon")
            self.headers[name.strip().lower()] = value.strip()
        self._begin_body()
        return rest

    def _begin_body(self) -> None:
        self._is_chunked = "chunked" in self.headers.get("transfer-encoding", "").lower()
        length = self.headers.get("content-length")
        if self.status in (204, 304):
            self._left, self.is_complete = 0, True
        elif self._is_chunked:
            self._phase = self._chunk_size
            return
        elif length is not None:
            if not length.isdigit():
                raise Malformed("a length that is no number")
            self._left = int(length)
            self.is_complete = self._left == 0
        self._phase = self._body

    def _body(self, held: bytes, pieces: list[bytes]) -> bytes:
        if self._left is None:
            pieces.append(held)
            return b""
        taken = held[: self._left]
        pieces.append(taken)
        self._left -= len(taken)
        self.is_complete = self._left == 0
        return held[len(taken) :]

    def _chunk_size(self, held: bytes, pieces: list[bytes]) -> bytes | None:
        end = held.find(b"\r\n")
        if end < 0:
            if len(held) > MAX_HEAD_BYTES:
                raise Malformed("the size of a chunk does not end")
            return None
        try:
            self._left = int(held[:end].partition(b";")[0], 16)
        except ValueError:
            raise Malformed("the size of a chunk is no number") from None
        self._phase = self._chunk if self._left else self._trailer
        return held[end + 2 :]

    def _chunk(self, held: bytes, pieces: list[bytes]) -> bytes | None:
        assert self._left is not None
        if self._left:
            taken = held[: self._left]
            pieces.append(taken)
            self._left -= len(taken)
            return held[len(taken) :]
        if len(held) < 2:
            return None
        if held[:2] != b"\r\n":
            raise Malformed("a chunk does not end where it said")
        self._phase = self._chunk_size
        return held[2:]

    def _trailer(self, held: bytes, pieces: list[bytes]) -> bytes | None:
        end = held.find(b"\r\n")
        if end < 0:
            return None
        self.is_complete = end == 0
        return held[end + 2 :]


def _status(line: str) -> int:
    version, _, rest = line.partition(" ")
    code = rest[:3]
    if not version.startswith("HTTP/1.") or not code.isdigit():
        raise Malformed("no HTTP/1.1 status line")
    return int(code)


class EventSplitter:
    """Cuts a server-sent event stream into its events, however it arrives."""

    def __init__(self) -> None:
        self._held = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Return the events that `data` completes, without the empty lines between. Raises Malformed."""
        held = self._held + data if self._held else data
        if b"\r" in held:
            held = held.replace(b"\r\n", b"\n")
        *events, rest = held.split(b"\n\n")
        if len(rest) > MAX_EVENT_BYTES:
            raise Malformed("an event does not end")
        self._held = rest
        return [event for event in events if event]

    @property
    def rest(self) -> bytes:
        """What came after the last complete event: empty at a proper end."""
        return self._held.strip()


def data_of(event: bytes) -> bytes | None:
    """Return the data of an event; None for a comment (`: ping`) or one without data."""
    if event.startswith(b"data: ") and b"\n" not in event:
        return event[6:]
    parts = list(_data_lines(event))
    return b"\n".join(parts) if parts else None


def _data_lines(event: bytes) -> Iterator[bytes]:
    for line in event.split(b"\n"):
        if line.startswith(b"data:"):
            yield line[5:].removeprefix(b" ")
