"""The header of one GGUF file: metadata and the table of tensors, read without trusting any of it.

A GGUF file is little-endian: the magic "GGUF", the version (uint32), the number of tensors and of metadata
pairs (uint64 each), the pairs, the tensor table, padding to `general.alignment`, and the tensors' bytes.
Every count, length, offset and product of dimensions is a Python integer here, so none can wrap around, and
is compared with the size of the file before anything is read or allocated for it.

This module does not know what the metadata means, apart from the alignment, nor how tensors are computed
with. Source of the format: the GGUF specification in ggml's `docs/gguf.md`.
"""

import itertools
import math
import mmap
import struct
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np

from ropewalk.checkpoint.quants import BlockFormat, format_by_id
from ropewalk.errors import CheckpointError, UnsupportedModelError

# Limits far above any real model, so that a file that is large as well as hostile costs neither memory nor
# minutes. The largest vocabularies (262k tokens, 500k merges) need headers of 10 to 20 MB.
HEADER_LIMIT = 1 << 28
MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 18
MAX_STRINGS = 1 << 22
MAX_NAME_BYTES = (1 << 16) - 1
MAX_DIMS = 4
DEFAULT_ALIGNMENT = 32
MIN_ALIGNMENT, MAX_ALIGNMENT = 8, 1 << 20

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_BOOL, _STRING, _ARRAY = 7, 8, 9
# Number types of metadata values, by GGUF number, as struct and NumPy codes alike.
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
# The least that a metadata pair (8 length, 1 name, 4 type, 1 value) and a table row
# (8 length, 1 name, 4 count, 8 dimension, 4 type, 8 offset) can take.
_MIN_PAIR_BYTES, _MIN_ROW_BYTES = 14, 33


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


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies and how it is stored.

    Attributes
    ----------
    name : str
        The canonical GGUF name, such as "blk.0.attn_q.weight".
    shape : tuple of int
        In NumPy's order, slowest axis first: `(rows, columns)` for a matrix. GGUF stores the reverse.
    format : BlockFormat
        How the numbers are stored.
    offset : int
        First byte, counted from the start of its file.
    n_bytes : int
        Size in the file.
    shard : int
        Which file of a split model holds it, from 0.
    """

    name: str
    shape: tuple[int, ...]
    format: BlockFormat
    offset: int
    n_bytes: int
    shard: int = 0

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Header:
    """What the header of one file says: version, metadata, tensor table, first byte of tensor data."""

    version: int
    metadata: dict[str, object]
    tensors: dict[str, TensorInfo]
    alignment: int
    data_start: int


def align(offset: int, alignment: int) -> int:
    """Round `offset` up to a multiple of `alignment`."""
    return -(-offset // alignment) * alignment


def read_header(data: mmap.mmap, label: str, shard: int = 0) -> Header:
    """Read and check the header of a GGUF file.

    Parameters
    ----------
    data : mmap.mmap
        The whole file.
    label : str
        What error messages call the file.
    shard : int
        The number that the tensors' `TensorInfo.shard` gets.

    Raises
    ------
    CheckpointError
        If the file is not GGUF, or anything in its header is malformed or contradicts its size.
    UnsupportedModelError
        If a tensor has a format of ggml that Ropewalk does not implement.
    """
    cursor = _Cursor(data, label)
    version = _read_version(cursor)
    n_tensors = cursor.count("number of tensors", _MIN_ROW_BYTES, MAX_TENSORS)
    n_pairs = cursor.count("number of metadata pairs", _MIN_PAIR_BYTES, MAX_KEYS)
    metadata: dict[str, object] = {}
    for i in range(n_pairs):
        key = cursor.name(f"the name of metadata pair {i}")
        if key in metadata:
            raise cursor.error(f"the metadata key {_show(key)} appears twice")
        metadata[key] = _read_value(cursor, f"the value of {_show(key)}")
    alignment = _alignment(cursor, metadata)
    rows = [_read_row(cursor, i) for i in range(n_tensors)]
    data_start = align(cursor.position, alignment)
    tensors: dict[str, TensorInfo] = {}
    for name, shape, fmt, offset in rows:
        if name in tensors:
            raise cursor.error(f"the tensor {_show(name)} appears twice")
        tensors[name] = _place(cursor, name, shape, fmt, offset, data_start, alignment, shard)
    _refuse_overlaps(cursor, tensors)
    return Header(version, metadata, tensors, alignment, data_start)


class _Cursor:
    """A position in a file that only moves forward, after checking that the bytes are there."""

    def __init__(self, data: mmap.mmap, label: str) -> None:
        self.data = data
        self.label = label
        self.size = len(data)
        self.limit = min(self.size, HEADER_LIMIT)
        self.position = 0

    def error(self, message: str) -> CheckpointError:
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
        value: int = _U32.unpack_from(self.data, self.take(4, what))[0]
        return value

    def u64(self, what: str) -> int:
        value: int = _U64.unpack_from(self.data, self.take(8, what))[0]
        return value

    def count(self, what: str, item_bytes: int, allowed: int) -> int:
        """Read a uint64 count of items of at least `item_bytes` bytes each, of which `allowed` are sane."""
        n = self.u64(f"the {what}")
        room = (self.limit - self.position) // item_bytes
        if n > room:
            raise self.error(f"the {what} is {n}, but the rest of the file holds at most {room}")
        if n > allowed:
            raise self.error(f"the {what} is {n}; at most {allowed} are allowed")
        return n

    def string(self, what: str) -> bytes:
        n = self.u64(f"the length of {what}")
        start = self.take(n, what)
        return self.data[start : start + n]

    def name(self, what: str) -> str:
        n = self.u64(f"the length of {what}")
        if not 1 <= n <= MAX_NAME_BYTES:
            raise self.error(f"the length of {what} is {n}; allowed: 1 to {MAX_NAME_BYTES}")
        start = self.take(n, what)
        try:
            return self.data[start : start + n].decode("utf-8")
        except UnicodeDecodeError:
            raise self.error(f"{what} is not UTF-8: {_show(self.data[start : start + n])}")

    def strings(self, what: str) -> StringArray:
        """Read the strings of an array: only their bounds, 50 ms for 262,144 of them."""
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
            position = self.size + 1
        if position > self.limit:
            raise self._too_far(f"string {len(starts) - 1} of {what} ends at byte {position}")
        append(position - base)
        self.position = position
        return StringArray(self.data[base + 8 : position], starts)


def _read_version(cursor: _Cursor) -> int:
    magic = cursor.data[:4]
    if magic != b"GGUF":
        raise cursor.error(f"not a GGUF file: {_what_else(cursor.data[:512])}")
    cursor.take(4, "the magic")
    version = cursor.u32("the version")
    if version & 0xFFFF == 0 and version:
        raise cursor.error("this GGUF file is big-endian; only little-endian files are read")
    if version == 1:
        raise cursor.error(
            "this is GGUF version 1, outdated since August 2023; allowed: 2, 3. Convert the model again"
        )
    if version not in (2, 3):
        raise cursor.error(f"GGUF version {version} is unknown; allowed: 2, 3")
    return version


def _what_else(start: bytes) -> str:
    """Say what a file that is not GGUF seems to be, from its first bytes."""
    text = start.lstrip().lower()
    if start.startswith(b"version https://git-lfs"):
        return "it is a Git LFS pointer; fetch the real file with `git lfs pull`"
    if text.startswith((b"<!doctype", b"<html", b"<?xml")):
        return "it is a web page, probably an error page saved under the model's name; download it again"
    if start[8:10] == b'{"' and int.from_bytes(start[:8], "little") < 1 << 32:
        return "it is a safetensors file; convert it to GGUF first"
    if start.startswith(b"PK\x03\x04"):
        return "it is a zip archive (a PyTorch checkpoint, or a wheel that still holds the model)"
    if start[:4] in (b"lmgg", b"fmgg", b"tjgg", b"algg"):
        return "it is a GGML file from before GGUF; convert the model again"
    if start[:4] == b"FUGG":
        return "its magic is reversed: a big-endian file; only little-endian files are read"
    return f"it starts with {_show(start[:8])}"


def _read_value(cursor: _Cursor, what: str) -> object:
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


def _read_array(cursor: _Cursor, what: str) -> object:
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


def _number(cursor: _Cursor, kind: int, what: str) -> np.dtype[np.generic]:
    if kind not in _NUMBERS:
        raise cursor.error(f"{what} has the unknown type {kind}; allowed: 0 to 12")
    return np.dtype(_NUMBERS[kind])


def _alignment(cursor: _Cursor, metadata: dict[str, object]) -> int:
    value = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if isinstance(value, int) and not isinstance(value, bool):
        power_of_two = value & (value - 1) == 0
        if power_of_two and MIN_ALIGNMENT <= value <= MAX_ALIGNMENT:
            return value
    allowed = f"powers of two from {MIN_ALIGNMENT} to {MAX_ALIGNMENT}"
    raise cursor.error(f"general.alignment is {_show(value)}; allowed: {allowed}")


def _read_row(cursor: _Cursor, i: int) -> tuple[str, tuple[int, ...], BlockFormat, int]:
    name = cursor.name(f"the name of tensor {i}")
    what = f"tensor {_show(name)}"
    n_dims = cursor.u32(f"the number of dimensions of {what}")
    if not 1 <= n_dims <= MAX_DIMS:
        raise cursor.error(f"{what} has {n_dims} dimensions; allowed: 1 to {MAX_DIMS}")
    dims = [cursor.u64(f"a dimension of {what}") for _ in range(n_dims)]
    if 0 in dims:
        raise cursor.error(f"{what} has an empty dimension: {dims}")
    try:
        fmt = format_by_id(cursor.u32(f"the format of {what}"))
    except UnsupportedModelError as e:
        raise UnsupportedModelError(f"{cursor.label}: {what}: {e}") from None
    except CheckpointError as e:
        raise CheckpointError(f"{cursor.label}: {what}: {e}") from None
    return name, tuple(reversed(dims)), fmt, cursor.u64(f"the offset of {what}")


def _place(
    cursor: _Cursor,
    name: str,
    shape: tuple[int, ...],
    fmt: BlockFormat,
    offset: int,
    data_start: int,
    alignment: int,
    shard: int,
) -> TensorInfo:
    what = f"tensor {_show(name)} of shape {list(shape)} and format {fmt.name}"
    if shape[-1] % fmt.block_size:
        raise cursor.error(
            f"{what} has {shape[-1]} columns, which do not fill whole blocks of {fmt.block_size}"
        )
    n_bytes = math.prod(shape[:-1]) * fmt.row_bytes(shape[-1])
    if offset % alignment:
        raise cursor.error(
            f"{what} lies at offset {offset}, which is no multiple of the alignment {alignment}"
        )
    end = data_start + offset + n_bytes
    if end > cursor.size:
        raise cursor.error(f"{what} would end at byte {end}, but the file has only {cursor.size} bytes")
    return TensorInfo(name, shape, fmt, data_start + offset, n_bytes, shard)


def _refuse_overlaps(cursor: _Cursor, tensors: dict[str, TensorInfo]) -> None:
    previous: TensorInfo | None = None
    for tensor in sorted(tensors.values(), key=lambda t: t.offset):
        if previous and previous.offset + previous.n_bytes > tensor.offset:
            raise cursor.error(f"the tensors {_show(previous.name)} and {_show(tensor.name)} overlap")
        previous = tensor


def _show(value: object) -> str:
    """Quote something from the file, safely: no control characters, no endless names."""
    text = ascii(value) if isinstance(value, bytes) else repr(value)
    return text if len(text) <= 80 else f"{text[:60]}… ({len(text)} characters)"
