"""The file of a recording: a header line, then a line for each request in the order in which they ended."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from localllm.errors import UsageError

VERSION: Final = 1
MAX_FILE_BYTES: Final = 4 << 30
MAX_LINE_BYTES: Final = 128 << 20
PATHS: Final = ("/v1/chat/completions", "/v1/completions")

Ended = Literal["answer", "refused", "cancelled", "broken"]


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """The first line. `began_at`: UTC, ISO 8601. `texts`: whether they are filler or what was written."""

    localllm_trace: int
    began_at: str
    texts: Literal["filler", "kept"]


class Recorded(msgspec.Struct, frozen=True, kw_only=True):
    """One request. Times in seconds; `at_s` from the start of the recording.

    `ended`: "cancelled" by whoever asked, "broken" by the server. Tokens as `usage` told them, None
    where it did not; `n_pieces`: events with text. `n_left_out`: fields of the body that are not in it.
    """

    at_s: float
    path: str
    body: dict[str, Any]
    status: int | None
    ended: Ended
    duration_s: float
    first_s: float | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    n_pieces: int = 0
    n_left_out: int = 0


@dataclass(frozen=True, slots=True)
class Trace:
    """A recording that was read: requests by the time at which they were sent.

    `sha256`: of the file. `is_cut`: its last line does not end, as after a kill; it is not among them.
    """

    header: Header
    requests: tuple[Recorded, ...]
    sha256: str
    is_cut: bool


def line_of(value: Header | Recorded) -> bytes:
    """Return a line of the file, with its end."""
    return msgspec.json.encode(value) + b"\n"


def read_trace(path: Path) -> Trace:
    """Read a recording. Raises UsageError that names the line at fault."""
    digest, requests, header, is_cut = hashlib.sha256(), [], None, False
    decoder = msgspec.json.Decoder(Recorded)
    try:
        with path.open("rb") as file:
            if path.stat().st_size > MAX_FILE_BYTES:
                raise UsageError(f"{path} is too large for a trace.", "record for a shorter time")
            number = 0
            while line := file.readline(MAX_LINE_BYTES):
                number += 1
                digest.update(line)
                is_cut = not line.endswith(b"\n")
                if header is None:
                    header = _header(path, line)
                elif not is_cut:
                    requests.append(_request(path, number, line, decoder))
                elif len(line) == MAX_LINE_BYTES:
                    raise UsageError(f"{path}, line {number} is too long.", "localllm bench record URL -o FILE")
    except OSError as error:
        raise UsageError(
            f"The trace {path} cannot be read: {error.strerror}.", "localllm bench record URL -o FILE"
        ) from None
    if header is None:
        raise UsageError(f"{path} is empty.", "localllm bench record URL -o FILE")
    return Trace(header, tuple(sorted(requests, key=lambda one: one.at_s)), digest.hexdigest(), is_cut)


def _header(path: Path, line: bytes) -> Header:
    try:
        header = msgspec.json.decode(line, type=Header)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise UsageError(f"{path} is no trace.", "localllm bench record URL -o FILE") from None
    if header.localllm_trace != VERSION:
        raise UsageError(
            f"{path} is a trace of version {header.localllm_trace}; this reads version {VERSION}.",
            "localllm bench record URL -o FILE",
        )
    return header


def _request(path: Path, number: int, line: bytes, decoder: msgspec.json.Decoder[Recorded]) -> Recorded:
    try:
        found = decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        # Of what a message of the decoder says only the place: a trace may hold what was written.
        place = str(error).rpartition(" - at ")[2] if " - at " in str(error) else ""
        where = f" ({place})" if place.startswith("`$") else ""
        raise UsageError(
            f"{path}, line {number} is no recorded request{where}.", "localllm bench record URL -o FILE"
        ) from None
    if found.path not in PATHS or not 0 <= found.at_s < float("inf"):
        raise UsageError(f"{path}, line {number} is no request that can be sent again.", "take the line out")
    return found
