"""Request bodies: read within limits of size and time, scanned for what JSON leaves open, decoded into structs."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final, Generic, TypeVar

import msgspec
from starlette.types import Receive, Scope

from localllm.errors import UsageError
from localllm.server.errors import HttpRefusal
from localllm.server.state import Limits, ServerState

MAX_DEPTH: Final = 128
MAX_CONTAINERS: Final = 100_000
MAX_PARTS: Final = 1_000_000
_BOM: Final = b"\xef\xbb\xbf"
_THREAD_FROM_BYTES: Final = 64 * 1024
_MIN_INT: Final = -(2**63)
_MAX_INT: Final = 2**64 - 1
_MAX_DIGITS: Final = 20

# A text (an unclosed one takes the rest, so that no text is looked at twice) with the colon that makes it a
# name; a bracket; a number that is long or has an exponent; a row of others. Whatever a part can begin with is
# one: the search for the next holds the interpreter's lock, so it must never go over much.
_PARTS: Final = re.compile(
    r'["\[{\]}0-9.-]'
    r'(?:(?<=")(?P<text>[^"\\]*+(?:\\.[^"\\]*+)*+)(?:"|\\?\Z)(?P<colon>[ \t\r\n]*+:)?'
    r"|(?<=[\[{])(?P<open>)|(?<=[\]}])(?P<close>)"
    r"|(?<=[0-9.-])(?:(?P<number>[0-9.]*+[eE][-+]?[0-9]++|[0-9.]{16,})"
    r"|(?P<row>[0-9.]*+(?:[, \t\r\n]*+[0-9.-][0-9.]{0,15}+(?![0-9.eE])){0,1000}+)))",
    re.DOTALL,
)
_SURROGATE: Final = re.compile(r"\\u[dD][89a-fA-F]")
_PATH: Final = re.compile(r" - at (?:`key` in )?`\$(?P<path>[^`]*)`\Z")
_STEP: Final = re.compile(r"\.([^.\[]+)|\[([^\]]*)\]")

Struct = TypeVar("Struct")


class ClientGone(Exception):
    """The client closed the connection before it was answered."""


@dataclass(frozen=True, slots=True)
class Body(Generic[Struct]):
    """A decoded body: its struct, the names that stand at its top level, and its JSON."""

    value: Struct
    names: tuple[str, ...]
    data: bytes = field(repr=False)

    def values(self, names: Iterable[str]) -> dict[str, Any]:
        """Return the values of some names, of those that are there."""
        wanted = set(names).intersection(self.names)
        if not wanted:
            return {}
        parts: dict[str, msgspec.Raw] = msgspec.json.decode(self.data, type=dict[str, msgspec.Raw])
        return {name: msgspec.json.decode(parts[name]) for name in sorted(wanted)}


async def read(scope: Scope, receive: Receive, state: ServerState, kind: type[Struct]) -> Body[Struct]:
    """Read and decode the body of a request (in an endpoint: `request.scope, request.receive`).

    From here on the request counts as at work. Raises: HttpRefusal (408, 413, 503), Unavailable while
    draining, UsageError whose `field` and `pointer` say what is wrong where, ClientGone.
    """
    state.refuse_while_draining()
    data = await receive_body(scope, receive, state.settings.limits)
    state.enter(scope)
    if len(data) >= _THREAD_FROM_BYTES:
        return await asyncio.to_thread(decode, data, kind)
    return decode(data, kind)


async def until_gone(receive: Receive) -> None:
    """Wait until the client closes the connection; what else it sends is passed over."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def receive_body(scope: Scope, receive: Receive, limits: Limits) -> bytes:
    """Return the whole body. Raises: HttpRefusal for one that is too large (413) or too slow (408), ClientGone."""
    declared = next((int(value) for name, value in scope["headers"] if name == b"content-length"), 0)
    _check_size(declared, limits)
    started_s = asyncio.get_running_loop().time()
    data = bytearray()
    try:
        async with asyncio.timeout_at(started_s + limits.body_s) as timeout:
            while True:
                message = await receive()
                if message["type"] != "http.request":
                    raise ClientGone
                data += message["body"]
                _check_size(len(data), limits)
                if not message["more_body"]:
                    return bytes(data)
                timeout.reschedule(started_s + limits.body_s + len(data) / limits.body_rate)
    except TimeoutError:
        raise HttpRefusal(408, "body_too_slow", "The body did not come in time.") from None


def decode(data: bytes, kind: type[Struct]) -> Body[Struct]:
    """Return the body as a struct of this kind, and the names at its top level.

    Raises: UsageError. It never quotes the body: only where in it something is wrong.
    """
    data = data.removeprefix(_BOM)
    if not data.strip():
        raise UsageError("The body is empty.", "send a JSON object")
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"The body is not UTF-8 (byte {error.start}).", "send it as UTF-8") from None
    names = scan(text)
    try:
        return Body(msgspec.json.decode(data, type=kind), names, data)
    except msgspec.ValidationError as error:
        raise _invalid(str(error)) from None
    except msgspec.DecodeError as error:
        raise UsageError(_malformed(str(error)), "send a JSON object") from None
    except RecursionError:
        raise _too_deep() from None


def scan(text: str) -> tuple[str, ...]:
    """Return the names at the top level of a JSON text.

    Raises: UsageError for nesting beyond `MAX_DEPTH`, a number that no float or 64-bit integer
    holds, a name given twice in one object, half a surrogate pair, and far too many parts. Other
    mistakes are left to the decoder. Linear in the text.
    """
    levels: list[set[str]] = []
    top: set[str] = set()
    n_containers = 0
    for n_parts, part in enumerate(_PARTS.finditer(text)):
        kind = part.lastgroup
        if n_parts > MAX_PARTS:
            raise UsageError(f"The body has more than {MAX_PARTS} parts.", "send less at once")
        if kind == "open":
            n_containers += 1
            if len(levels) >= MAX_DEPTH:
                raise _too_deep()
            if n_containers > MAX_CONTAINERS:
                raise UsageError(f"The body has more than {MAX_CONTAINERS} objects and lists.", "send less at once")
            levels.append(set())
            if len(levels) == 1:
                top = levels[0]
        elif kind == "close":
            if levels:
                levels.pop()
        elif kind == "number":
            _check_number(part[0])
        elif kind != "row":
            _check_text(part, levels)
    return tuple(sorted(top))


def _check_text(part: re.Match[str], levels: list[set[str]]) -> None:
    text = part["text"]
    if "\\" in text and (part["colon"] or _SURROGATE.search(text)):
        try:
            text = msgspec.json.decode(f'"{text}"', type=str)
        except msgspec.DecodeError:
            raise UsageError("The body holds a text that is not valid JSON or Unicode.", "send it as UTF-8") from None
    if part["colon"] and levels:
        if text in levels[-1]:
            raise UsageError(f"A name is given twice in one object (character {part.start()}).", "give it once")
        levels[-1].add(text)


def _check_number(number: str) -> None:
    digits = number.lstrip("-")
    if digits.isdigit():
        is_held = len(digits) <= _MAX_DIGITS and _MIN_INT <= int(number) <= _MAX_INT
    else:
        try:
            is_held = math.isfinite(float(number))
        except ValueError:  # no number at all: the decoder says so
            return
    if not is_held:
        raise UsageError("The body holds a number that is out of range.", "send one that a 64-bit number holds")


def _check_size(n_bytes: int, limits: Limits) -> None:
    if n_bytes > limits.body_bytes:
        raise HttpRefusal(
            413, "body_too_large", f"The body is larger than {limits.body_bytes} bytes.", limit_bytes=limits.body_bytes
        )


def _invalid(message: str) -> UsageError:
    """Return the decoder's complaint with the place as a JSON pointer, and as clients spell it."""
    if message.startswith(("Invalid enum value ", "Invalid value ")):  # the value, which is quoted there, is left out
        message = "A value that is not one of those that are taken" + message[message.rfind(" - at ") :]
    found = _PATH.search(message)
    if found is None:
        return UsageError(f"The body is not what this route takes: {message}.", "see /openapi.json")
    steps = [name or index for name, index in _STEP.findall(found["path"])]
    steps = ["*" if step == "..." else step for step in steps]
    pointer = "".join("/" + step.replace("~", "~0").replace("/", "~1") for step in steps)
    what = message[: found.start()]
    details: dict[str, Any] = {"field": _spelled(steps), "pointer": pointer} if steps else {}
    return UsageError(f"{what} at {pointer or 'the top'} of the body.", "see /openapi.json", **details)


def _spelled(steps: list[str]) -> str:
    """Return a path as OpenAI's errors spell it: messages[0].role."""
    head, *rest = steps
    return head + "".join(f"[{step}]" if step.isdigit() or step == "*" else f".{step}" for step in rest)


def _malformed(message: str) -> str:
    reason = message.removeprefix("JSON is malformed: ")
    return f"The body is not valid JSON: {reason}."


def _too_deep() -> UsageError:
    return UsageError(f"The body nests objects and lists deeper than {MAX_DEPTH}.", "send flatter JSON")
