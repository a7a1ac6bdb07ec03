"""Decodes metadata values; arrays stay bytes until somebody asks for their elements."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat
from typing import NoReturn, TypeAlias, overload

from localllm.models.gguf.source import Source, refusal
from localllm.models.gguf.types import ARRAY, BOOL, SCALARS, STRING, VALUE_NAMES

MAX_STRINGS = 2_000_000
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")

Scalar: TypeAlias = int | float | bool | str
Value: TypeAlias = "Scalar | GgufArray"


class GgufArray(Sequence[Scalar]):
    """An array whose bounds are checked and whose elements are decoded when they are read.

    `type_name` is the element type as the file declares it ("i32", "string", ...). Holds on to
    the header's buffer. Strings with broken UTF-8 show U+FFFD.
    """

    __slots__ = ("_buffer", "_count", "_decoded", "_end", "_start", "_type")

    def __init__(self, buffer: bytearray, element_type: int, start: int, end: int, count: int) -> None:
        self._buffer = buffer
        self._type = element_type
        self._start = start
        self._end = end
        self._count = count
        self._decoded: list[Scalar] | None = None

    @property
    def type_name(self) -> str:
        """The element type by its GGUF name."""
        return VALUE_NAMES[self._type]

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Scalar: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Scalar]: ...

    def __getitem__(self, index: int | slice) -> Scalar | Sequence[Scalar]:
        return self.to_list()[index]

    def __iter__(self) -> Iterator[Scalar]:
        return iter(self.to_list())

    def __repr__(self) -> str:
        return f"GgufArray({self.type_name}[{self._count}])"

    def to_list(self) -> list[Scalar]:
        """Return the elements; decoded once, do not mutate."""
        if self._decoded is None:
            self._decoded = self._strings() if self._type == STRING else self._numbers()
        return self._decoded

    def positions_of(self, values: Iterable[int]) -> tuple[int, ...]:
        """Return where any of a few small `values` (0 to 127) stand, ascending; only for arrays of 32-bit integers.

        Found in C by their low bytes, since a vocabulary has 150 000 elements and few special ones.
        """
        data = bytes(self._buffer[self._start : self._end])
        low_bytes, found = data[::4], list[int]()
        for value in values:
            wanted = _U32.pack(value)
            at = low_bytes.find(value)
            while at >= 0:
                if data[4 * at : 4 * at + 4] == wanted:
                    found.append(at)
                at = low_bytes.find(value, at + 1)
        return tuple(sorted(found))

    def first_repeat(self) -> bytes | None:
        """Return a non-empty string that stands here twice, or None. Only for arrays of strings."""
        pieces = self._pieces()
        if len(set(pieces)) == len(pieces):
            return None
        seen: set[bytes] = set()
        for piece in pieces:
            if piece and piece in seen:
                return piece
            seen.add(piece)
        return None

    def _numbers(self) -> list[Scalar]:
        code = SCALARS[self._type].format[1:]
        values = struct.unpack_from(f"<{self._count}{code}", self._buffer, self._start)
        return [bool(value) for value in values] if self._type == BOOL else list(values)

    def _strings(self) -> list[Scalar]:
        return [piece.decode("utf-8", "replace") for piece in self._pieces()]

    def _pieces(self) -> list[bytes]:
        buffer, unpack, end = bytes(self._buffer[self._start : self._end]), _U64.unpack_from, 0
        return [buffer[(begin := end + 8) : (end := begin + unpack(buffer, end)[0])] for _ in repeat(None, self._count)]


class Cursor:
    """A position in a Source that moves over one value at a time. Every method refuses by `field`."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.position = 0
        self._strings_left = MAX_STRINGS

    def refuse(self, field: str, what: str) -> NoReturn:
        """Raise the refusal of this file."""
        raise refusal(self.source.name, field, what)

    @property
    def remaining(self) -> int:
        """Bytes of the file behind the cursor."""
        return self.source.file_bytes - self.position

    def take(self, n_bytes: int, field: str) -> int:
        """Move over `n_bytes` and return where they begin; they are in the buffer."""
        begin = self.position
        self.source.need(begin + n_bytes, field)
        self.position = begin + n_bytes
        return begin

    def u32(self, field: str) -> int:
        """Read a u32."""
        begin = self.take(4, field)
        return int(_U32.unpack_from(self.source.buffer, begin)[0])

    def u64(self, field: str) -> int:
        """Read a u64."""
        begin = self.take(8, field)
        return int(_U64.unpack_from(self.source.buffer, begin)[0])

    def count(self, field: str, min_bytes: int, limit: int, noun: str) -> int:
        """Read how many things follow: at most `limit`, each at least `min_bytes` long."""
        value = self.u64(field)
        if value > self.remaining // min_bytes:
            self.refuse(field, f"is {value:,}, but only {self.remaining:,} bytes follow")
        if value > limit:
            self.refuse(field, f"is {value:,}; at most {limit:,} {noun} are read")
        return value

    def raw_string(self, field: str, limit: int | None = None) -> bytes:
        """Read a length and that many bytes."""
        n_bytes = self.u64(field)
        if n_bytes > self.remaining:
            self.refuse(field, f"says it is {n_bytes:,} bytes long, but only {self.remaining:,} remain")
        if limit is not None and n_bytes > limit:
            self.refuse(field, f"is {n_bytes:,} bytes long; at most {limit:,} are allowed")
        begin = self.take(n_bytes, field)
        return bytes(self.source.buffer[begin : begin + n_bytes])

    def value(self, value_type: int, field: str) -> Value:
        """Read one value of a declared type."""
        if value_type == STRING:
            return self.raw_string(field).decode("utf-8", "replace")
        if value_type == ARRAY:
            return self._array(field)
        scalar = SCALARS.get(value_type)
        if scalar is None:
            self.refuse(field, f"has the unknown value type {value_type}")
        begin = self.take(scalar.size, field)
        number: Scalar = scalar.unpack_from(self.source.buffer, begin)[0]
        if value_type != BOOL:
            return number
        if number not in (0, 1):
            self.refuse(field, f"is a bool with the value {number}")
        return bool(number)

    def _array(self, field: str) -> GgufArray:
        element_type = self.u32(field)
        if element_type == ARRAY:
            self.refuse(field, "is an array of arrays, which GGUF does not allow")
        scalar = SCALARS.get(element_type)
        if scalar is None and element_type != STRING:
            self.refuse(field, f"is an array of the unknown value type {element_type}")
        size = 8 if scalar is None else scalar.size
        n_values = self.u64(field)
        if n_values > self.remaining // size:
            self.refuse(field, f"says it has {n_values:,} elements, but only {self.remaining:,} bytes remain")
        begin = self.position
        if scalar is not None:
            self.take(n_values * size, field)
        else:
            self._skip_strings(n_values, field)
        return GgufArray(self.source.buffer, element_type, begin, self.position, n_values)

    def _skip_strings(self, n_values: int, field: str) -> None:
        """Walk over the lengths alone: this loop is most of the time a header takes."""
        if n_values > self._strings_left:
            self.refuse(field, f"has {n_values:,} strings; at most {MAX_STRINGS:,} are read from one file")
        self._strings_left -= n_values
        position, buffer, unpack = self.position, self.source.buffer, _U64.unpack_from
        indices, index = iter(range(n_values)), 0
        while True:
            try:
                for index in indices:  # noqa: B007
                    position += 8 + unpack(buffer, position)[0]
                break
            except (struct.error, OverflowError, IndexError):
                self.source.need(position + 8, f"{field} (element {max(0, index - 1)})")
                position += 8 + unpack(buffer, position)[0]
        self.source.need(position, f"{field} (element {max(0, n_values - 1)})")
        self.position = position
