"""The header of one GGUF file: metadata and the table of tensors, read without trusting any of it.

A GGUF file is little-endian: the magic "GGUF", the version (uint32), the number of tensors and of metadata
pairs (uint64 each), the pairs, the tensor table, padding to `general.alignment`, and the tensors' bytes.
Products of dimensions and sums of offsets are Python integers here, so none can wrap around, and each tensor
must lie inside the file, apart from the others.

This module does not know what the metadata means, apart from the alignment, nor how tensors are computed
with. Source of the format: the GGUF specification, ggml's `docs/gguf.md`.
"""

import math
import mmap
from dataclasses import dataclass, replace

from ropewalk.checkpoint.cursor import Cursor, read_value, show
from ropewalk.checkpoint.files import what_else
from ropewalk.checkpoint.quants import BlockFormat, format_by_id
from ropewalk.errors import CheckpointError, UnsupportedModelError

# Far above any real model, as the limits in `cursor`.
MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 18
MAX_DIMS = 4
DEFAULT_ALIGNMENT = 32
MIN_ALIGNMENT, MAX_ALIGNMENT = 8, 1 << 20

# The least that a metadata pair (8 length, 1 name, 4 type, 1 value) and a table row
# (8 length, 1 name, 4 count, 8 dimension, 4 type, 8 offset) can take.
_MIN_PAIR_BYTES, _MIN_ROW_BYTES = 14, 33


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
    cursor = Cursor(data, label)
    version = _read_version(cursor)
    n_tensors = cursor.count("number of tensors", _MIN_ROW_BYTES, MAX_TENSORS)
    n_pairs = cursor.count("number of metadata pairs", _MIN_PAIR_BYTES, MAX_KEYS)
    metadata: dict[str, object] = {}
    for i in range(n_pairs):
        key = cursor.name(f"the name of metadata pair {i}")
        if key in metadata:
            raise cursor.error(f"the metadata key {show(key)} appears twice")
        metadata[key] = read_value(cursor, f"the value of {show(key)}")
    alignment = _alignment(cursor, metadata)
    rows = [_read_row(cursor, i, shard) for i in range(n_tensors)]
    data_start = align(cursor.position, alignment)
    tensors: dict[str, TensorInfo] = {}
    for row in rows:
        if row.name in tensors:
            raise cursor.error(f"the tensor {show(row.name)} appears twice")
        tensors[row.name] = _place(cursor, row, data_start, alignment)
    _refuse_overlaps(cursor, tensors)
    return Header(version, metadata, tensors, alignment, data_start)


def _read_version(cursor: Cursor) -> int:
    magic = cursor.data[:4]
    if magic != b"GGUF":
        raise cursor.error(f"not a GGUF file: {what_else(cursor.data[:512])}")
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


def _alignment(cursor: Cursor, metadata: dict[str, object]) -> int:
    value = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if isinstance(value, int) and not isinstance(value, bool):
        power_of_two = value & (value - 1) == 0
        if power_of_two and MIN_ALIGNMENT <= value <= MAX_ALIGNMENT:
            return value
    allowed = f"powers of two from {MIN_ALIGNMENT} to {MAX_ALIGNMENT}"
    raise cursor.error(f"general.alignment is {show(value)}; allowed: {allowed}")


def _read_row(cursor: Cursor, i: int, shard: int) -> TensorInfo:
    """Read one row of the tensor table; its offset still counts from the start of the tensor data."""
    name = cursor.name(f"the name of tensor {i}")
    what = f"tensor {show(name)}"
    n_dims = cursor.u32(f"the number of dimensions of {what}")
    if not 1 <= n_dims <= MAX_DIMS:
        raise cursor.error(f"{what} has {n_dims} dimensions; allowed: 1 to {MAX_DIMS}")
    shape = tuple(cursor.u64(f"a dimension of {what}") for _ in range(n_dims))[::-1]
    fmt = _format(cursor, what)
    offset = cursor.u64(f"the offset of {what}")
    if 0 in shape:
        raise cursor.error(f"{what} is empty: its shape is {list(shape)}")
    if shape[-1] % fmt.block_size:
        raise cursor.error(
            f"{what} has {shape[-1]} columns, which do not fill whole {fmt.name} blocks of {fmt.block_size}"
        )
    n_bytes = math.prod(shape[:-1]) * fmt.row_bytes(shape[-1])
    return TensorInfo(name, shape, fmt, offset, n_bytes, shard)


def _format(cursor: Cursor, what: str) -> BlockFormat:
    ggml_id = cursor.u32(f"the format of {what}")
    try:
        return format_by_id(ggml_id)
    except (CheckpointError, UnsupportedModelError) as e:
        raise type(e)(f"{cursor.label}: {what}: {e}") from None


def _place(cursor: Cursor, row: TensorInfo, data_start: int, alignment: int) -> TensorInfo:
    """Check that a tensor lies inside the file, and count its offset from the start of the file."""
    what = f"tensor {show(row.name)} of shape {list(row.shape)} and format {row.format.name}"
    if row.offset % alignment:
        raise cursor.error(f"{what} lies at offset {row.offset}, no multiple of the alignment {alignment}")
    end = data_start + row.offset + row.n_bytes
    if end > cursor.size:
        raise cursor.error(f"{what} would end at byte {end}, but the file has only {cursor.size} bytes")
    return replace(row, offset=data_start + row.offset)


def _refuse_overlaps(cursor: Cursor, tensors: dict[str, TensorInfo]) -> None:
    previous: TensorInfo | None = None
    for tensor in sorted(tensors.values(), key=lambda t: t.offset):
        if previous and previous.offset + previous.n_bytes > tensor.offset:
            raise cursor.error(f"the tensors {show(previous.name)} and {show(tensor.name)} overlap")
        previous = tensor
