"""Reads HTTP/1.1 answers and event streams as they arrive, without a socket: bytes in, pieces out.

For a client that measures: nothing is decoded here that can be decoded after the answer ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import h11

from localllm.errors import UsageError

MAX_HEAD_BYTES = 64 << 10
MAX_EVENT_BYTES = 16 << 20
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class Malformed(Exception):
    """The bytes are no HTTP/1.1 answer, or no event stream. The message quotes nothing of them."""


class AnswerReader:
    """One request and its answer: status, headers (names lower case) and the body cut out of its framing."""

    def __init__(self) -> None:
        self.status: int | None = None
        self.headers: dict[str, str] = {}
        self.is_complete = False
        self.has_begun = False
        """Whether any byte of the answer came."""
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEAD_BYTES)
        self._is_at_end = False

    def request(self, method: str, path: str, headers: Iterable[tuple[str, str]], body: bytes) -> bytes:
        """Return the bytes of the request whose answer is read here. Raises UsageError: what HTTP cannot carry."""
        try:
            head = self._http.send(h11.Request(method=method, target=path, headers=list(headers)))
            sent = (head, self._http.send(h11.Data(data=body)) if body else b"", self._http.send(h11.EndOfMessage()))
        except (h11.LocalProtocolError, UnicodeEncodeError):
            raise UsageError(
                "The path or a header of this request holds what HTTP cannot carry.",
                "look for line breaks and letters beyond ASCII in the URL and the key",
            ) from None
        return b"".join(part for part in sent if part)

    @property
    def keeps_alive(self) -> bool:
        """Whether the connection may carry another answer after this one."""
        return self.is_complete and not self._is_at_end and self._http.their_state is h11.DONE

    def feed(self, data: bytes) -> list[bytes]:
        """Take what arrived, b"" nothing; return the pieces of the body in it. Raises Malformed."""
        if not data:
            return []
        self.has_begun = True
        self._http.receive_data(data)
        return list(self._pieces())

    def end(self) -> bool:
        """Note that the connection ended; return whether that was a proper end of the answer."""
        if not self.is_complete:
            self._is_at_end = True
            self._http.receive_data(b"")
            try:
                list(self._pieces())
            except Malformed:
                return False
        return self.is_complete

    def _pieces(self) -> Iterator[bytes]:
        while True:
            try:
                event = self._http.next_event()
            except h11.RemoteProtocolError as error:
                # h11 quotes the bytes after a colon: they may hold text of a prompt.
                raise Malformed(f"no HTTP/1.1 answer: {str(error).partition(':')[0]}") from None
            if isinstance(event, h11.Data):
                yield bytes(event.data)
            elif isinstance(event, h11.Response):
                self.status = event.status_code
                self.headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in event.headers}
            elif isinstance(event, h11.EndOfMessage):
                self.is_complete = True
            elif event is h11.PAUSED:
                self._is_at_end = True  # nothing that follows can be told apart
                raise Malformed("bytes after the end of the answer")
            elif event is h11.NEED_DATA or isinstance(event, h11.ConnectionClosed):
                return


class EventSplitter:
    """Cuts a server-sent event stream into its events, however it arrives."""

    def __init__(self) -> None:
        self._held = b""
        self._has_begun = False
        self._is_after_cr = False

    def feed(self, data: bytes) -> list[bytes]:
        """Return the events that `data` completes, without the empty lines between. Raises Malformed."""
        if self._is_after_cr and data:  # its line has ended: a "\n" now is the rest of that end
            data, self._is_after_cr = data.removeprefix(b"\n"), False
        if b"\r" in data:
            self._is_after_cr = data.endswith(b"\r")
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        held = self._held + data if self._held else data
        if not self._has_begun and len(held) >= len(_BYTE_ORDER_MARK):
            held, self._has_begun = held.removeprefix(_BYTE_ORDER_MARK), True
        *events, rest = held.split(b"\n\n")
        if len(rest) > MAX_EVENT_BYTES:
            raise Malformed("an event does not end")
        self._held = rest
        return [event for event in events if event]

    @property
    def rest(self) -> bytes:
        """What came after the last complete event: empty at a proper end."""
        return self._held.strip()


def is_done(event: bytes) -> bool:
    """Say whether an event is the API's end of a stream."""
    data = data_of(event)
    return data is not None and data.strip() == b"[DONE]"


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
