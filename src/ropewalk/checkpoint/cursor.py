"""A bounds-checked walk over the header of a GGUF file: counts, names, and metadata values of every type.

Every count, length and position is a Python integer, so none can wrap around, and is compared with what is
left of the file before anything is read or allocated for it.

This module does not know keys, tensors or files; its caller maps the file and gives it a name for errors.

Metadata is little-endian: a string is a uint64 length and its bytes; an array is a uint32 element type, a
uint64 count and the elements. Source: the GGUF specification, ggml's `docs/gguf.md`.
"""

import itertools
import mmap
import struct
from array import array
from collections.abc import Iterator, Sequence
from typing import overload

import numpy as np

from ropewalk.errors import CheckpointError

# Limits far above any real model, so that a file that is large as well as hostile costs neither memory nor
# minutes. The largest vocabularies (262k tokens, 500k merges) need headers of 10 to 20 MB.
HEADER_LIMIT = 1 << 27
MAX_STRINGS = 1 << 22
MAX_STRING_BYTES = 1 << 24
MAX_NAME_BYTES = (1 << 16) - 1

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_BOOL, _STRING, _ARRAY = 7, 8, 9
# Number types of metadata values, by GGUF number, as NumPy codes.
_NUMBERS = {
    0: "u1",
    1: "i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}


class StringArray(Sequence[str]):
    """The strings of a metadata array, decoded when asked for.

    Items are `str`, with U+FFFD in place of bytes that are not UTF-8; `raw` gives the bytes themselves.
    """

    __slots__ = ("_data", "_starts")

    def __init__(self, data: bytes, starts: Sequence[int]) -> None:
        # String i is data[starts[i] : starts[i + 1] - 8]: the strings with their 8-byte lengths in between.
        self._data = data
        self._starts = starts

    def __len__(self) -> int:
        return len(self._starts) - 1

    def raw(self, i: int) -> bytes:
        """Return the bytes of string `i`; raises IndexError as a list does."""
        n = len(self)
        if not -n <= i < n:
            raise IndexError(f"string {i} of {n}")
        i %= n
        return self._data[self._starts[i] : self._starts[i + 1] - 8]

    def raw_items(self) -> list[bytes]:
        """Return the bytes of all strings."""
        data, starts = self._data, self._starts
        return [data[a : b - 8] for a, b in itertools.pairwise(starts)]

    @overload
    def __getitem__(self, i: int) -> str: ...
    @overload
    def __getitem__(self, i: slice) -> list[str]: ...
    def __getitem__(self, i: int | slice) -> str | list[str]:
        if isinstance(i, slice):
            return [self[j] for j in range(*i.indices(len(self)))]
        return self.raw(i).decode("utf-8", "replace")

    def __iter__(self) -> Iterator[str]:
        return (item.decode("utf-8", "replace") for item in self.raw_items())

    def __repr__(self) -> str:
        shown = ", ".join(repr(s) for s in self[:3])
        return f"<StringArray of {len(self)}: {shown}{', …' if len(self) > 3 else ''}>"


class Cursor:
    """A position in a file that only moves forward, after checking that the bytes are there."""

    def __init__(self, data: mmap.mmap, label: str) -> None:
        self.data = data
        self.label = label
        self.size = len(data)
        self.limit = min(self.size, HEADER_LIMIT)
        self.position = 0

    def error(self, message: str) -> CheckpointError:
        """Make the error that says `message` of this file."""
        return CheckpointError(f"{self.label}: {message}")

    def take(self, n: int, what: str) -> int:
        """Move past `n` bytes and return where they start."""
        start = self.position
        if n > self.limit - start:
            raise self._too_far(f"{what} needs {n} bytes at byte {start}")
        self.position = start + n
        return start

    def _too_far(self, problem: str) -> CheckpointError:
        if self.limit < self.size:
            return self.error(f"{problem}, which passes the {HEADER_LIMIT} bytes that a header may take")
        return self.error(f"{problem}, but the file ends at byte {self.size}: it is cut short or corrupt")

    def u32(self, what: str) -> int:
        """Read a number of four bytes; errors call it `what`."""
        value: int = _U32.unpack_from(self.data, self.take(4, what))[0]
        return value

    def u64(self, what: str) -> int:
        """Read a number of eight bytes; errors call it `what`."""
        value: int = _U64.unpack_from(self.data, self.take(8, what))[0]
        return value

    def count(self, what: str, item_bytes: int, allowed: int) -> int:
        """Read a uint64 count of items of at least `item_bytes` bytes each, of which `allowed` are sane."""
        n = self.u64(f"the {what}")
        room = (self.limit - self.position) // item_bytes
        if n > room:
            whole = "the file" if self.limit == self.size else "a header"
            raise self.error(f"the {what} is {n}, but the rest of {whole} holds at most {room}")
        if n > allowed:
            raise self.error(f"the {what} is {n}; at most {allowed} are allowed")
        return n

    def string(self, what: str, allowed: range = range(MAX_STRING_BYTES + 1)) -> bytes:
        """Read a string with its length before it, which has to be in `allowed`."""
        n = self.u64(f"the length of {what}")
        if n not in allowed:
            raise self.error(f"the length of {what} is {n}; allowed: {allowed.start} to {allowed.stop - 1}")
        start = self.take(n, what)
        return self.data[start : start + n]

    def name(self, what: str) -> str:
        """Read a string that is a key or the name of a tensor: short, not empty, UTF-8."""
        data = self.string(what, range(1, MAX_NAME_BYTES + 1))
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            raise self.error(f"{what} is not UTF-8: {show(data)}") from None

    def strings(self, what: str) -> StringArray:
        """Read the strings of an array: only their bounds, 30 ms for 262,144 of them."""
        n = self.count(f"number of strings in {what}", 8, MAX_STRINGS)
        data, length_at, position = self.data, _U64.unpack_from, self.position
        base = position - 8
        starts = array("q")
        append = starts.append
        try:
            for _ in range(n):
                (length,) = length_at(data, position)
                append(position - base)
                position += 8 + length
        except (struct.error, OverflowError):
            raise self._too_far(f"string {len(starts)} of {what} would start at byte {position}") from None
        if position > self.limit:
            raise self._too_far(f"the strings of {what} would end at byte {position}")
        append(position - base)
        self.position = position
        return StringArray(data[base + 8 : position], starts)


def read_value(cursor: Cursor, what: str) -> object:
    """Read a value of metadata with its type before it: a number, boolean or text, or an array of them.

    Raises
    ------
    CheckpointError
        If the type is unknown, or the file ends before the value does.
    """
    kind = cursor.u32(f"the type of {what}")
    if kind == _ARRAY:
        return _read_array(cursor, what)
    if kind == _STRING:
        return cursor.string(what).decode("utf-8", "replace")
    if kind == _BOOL:
        byte = cursor.data[cursor.take(1, what)]
        if byte > 1:
            raise cursor.error(f"{what} is the boolean {byte}; allowed: 0, 1")
        return bool(byte)
    dtype = _number(cursor, kind, what)
    start = cursor.take(dtype.itemsize, what)
    return np.frombuffer(cursor.data[start : cursor.position], dtype)[0].item()


def _read_array(cursor: Cursor, what: str) -> object:
    kind = cursor.u32(f"the element type of {what}")
    if kind == _ARRAY:
        raise cursor.error(
            f"{what} is an array of arrays, which is not read; allowed: arrays of numbers or strings"
        )
    if kind == _STRING:
        return cursor.strings(what)
    dtype = np.dtype(np.uint8) if kind == _BOOL else _number(cursor, kind, what)
    n = cursor.count(f"number of elements of {what}", dtype.itemsize, HEADER_LIMIT)
    start = cursor.take(n * dtype.itemsize, what)
    values = np.frombuffer(cursor.data[start : cursor.position], dtype)
    if kind != _BOOL:
        return values
    if n and values.max() > 1:
        raise cursor.error(f"{what} has the boolean {values.max()}; allowed: 0, 1")
    return values.view(np.bool_)


def _number(cursor: Cursor, kind: int, what: str) -> np.dtype[np.generic]:
    if kind not in _NUMBERS:
        raise cursor.error(f"{what} has the unknown type {kind}; allowed: 0 to 12")
    return np.dtype(_NUMBERS[kind])


def show(value: object) -> str:
    """Quote something from the file, safely: no control characters, no endless names."""
    text = ascii(value)[1:] if isinstance(value, bytes) else repr(value)
    return text if len(text) <= 80 else f"{text[:60]}… ({len(text)} characters)"
