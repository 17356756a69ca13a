"""Safetensors files, memory-mapped: the table of tensors, checked without trusting any of it.

A file is a little-endian uint64, the length of the header; the header, a JSON object from tensor names to
`{"dtype", "shape", "data_offsets": [begin, end]}` with offsets that count from the end of the header; and the
tensors' bytes, which fill the rest of the file without a hole. The name `__metadata__` is an object of
strings. A model in several files has an index, `model.safetensors.index.json`, whose `weight_map` says which
file holds which tensor.

This module does not know what the tensors mean. Source of the format: the README of huggingface/safetensors.
"""

import json
import math
import mmap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ropewalk.checkpoint.cursor import show
from ropewalk.checkpoint.files import map_file, release_map, what_else
from ropewalk.errors import CheckpointError, UnsupportedModelError

MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""
MAX_INDEX_BYTES = 1 << 26
MAX_JSON_VALUES = 1 << 21
"""Most values in one header: ten for each of 200,000 tensors. It bounds the memory of parsing it."""
MAX_TENSORS = 1 << 18
MAX_DIMS = 8
MAX_DIM = 1 << 62

DTYPES: Mapping[str, str] = MappingProxyType(
    {
        "F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "F8_E4M3": "u1", "F8_E5M2": "u1", "F8_E8M0": "u1",
        "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1", "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "u1",
        "BOOL": "u1",
    }
)  # fmt: skip
"""Types of elements and the NumPy codes that hold their bits; NumPy itself has no bfloat16 and no 8-bit floats."""


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor of a safetensors file lies: its first byte, counted from the start of its file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    n_bytes: int
    shard: int = 0


class SafeTensors:
    """One or more safetensors files as one table of tensors; made by `open_safetensors`.

    Attributes
    ----------
    paths : tuple of pathlib.Path
    tensors : Mapping[str, StoredTensor]
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        self.paths = tuple(paths)
        self._maps: list[mmap.mmap] = []
        tensors: dict[str, StoredTensor] = {}
        try:
            for shard, path in enumerate(self.paths):
                self._maps.append(map_file(path, "safetensors"))
                for name, tensor in read_table(self._maps[-1], str(path), shard).items():
                    if name in tensors:
                        other = self.paths[tensors[name].shard]
                        raise CheckpointError(f"{path}: the tensor {show(name)} is also in {other.name}")
                    tensors[name] = tensor
        except BaseException:
            self.close()
            raise
        self.tensors: Mapping[str, StoredTensor] = MappingProxyType(tensors)

    @property
    def file_bytes(self) -> int:
        """Size of all files together."""
        return sum(len(m) for m in self._maps)

    def array(self, name: str) -> NDArray[Any]:
        """Return a tensor as a read-only view of its file: the dtype of `DTYPES`, the shape of the table.

        Raises
        ------
        CheckpointError
            If there is no such tensor, or the files were closed.
        """
        if name not in self.tensors:
            raise CheckpointError(f"{self.paths[0].parent} has no tensor {show(name)}")
        tensor = self.tensors[name]
        if not self._maps:
            raise CheckpointError(f"{self.paths[tensor.shard]} is closed")
        dtype = np.dtype(DTYPES[tensor.dtype])
        flat = np.frombuffer(
            self._maps[tensor.shard], np.uint8, tensor.n_bytes, tensor.offset if tensor.n_bytes else 0
        )
        if tensor.offset % dtype.itemsize:
            flat = flat.copy()  # the header's length need not be a multiple of anything
        return flat.view(dtype).reshape(tensor.shape)

    def release(self) -> None:
        """Give back the memory of the pages read so far."""
        for data in self._maps:
            release_map(data)

    def close(self) -> None:
        """Unmap the files, at once or when the last view of them is gone."""
        maps, self._maps = self._maps, []
        for data in maps:
            try:
                data.close()
            except BufferError:
                continue  # a view is still alive, and keeps the map until it goes


def open_safetensors(path: Path) -> SafeTensors:
    """Open a `.safetensors` file, or all files of an index `*.safetensors.index.json`.

    Raises
    ------
    ModelNotFoundError
        If there is no such file.
    CheckpointError
        If a file is not sound, one that the index names is missing, or index and files do not agree.
    UnsupportedModelError
        If a tensor has a type of elements that is not known.
    """
    if path.suffix != ".json":
        return SafeTensors([path])
    places = read_index(path)
    files = sorted(set(places.values()))
    if missing := [f for f in files if not (path.parent / f).is_file()]:
        raise CheckpointError(
            f"{path}: {len(missing)} of the {len(files)} files that it names are missing: {_some(missing)}"
        )
    opened = SafeTensors([path.parent / f for f in files])
    try:
        for name, file in places.items():
            found = opened.tensors.get(name)
            if found is None or opened.paths[found.shard].name != file:
                where = "no file has it" if found is None else f"it is in {opened.paths[found.shard].name}"
                raise CheckpointError(f"{path}: the tensor {show(name)} is to be in {file}, but {where}")
        if extra := [name for name in opened.tensors if name not in places]:
            raise CheckpointError(
                f"{path}: the files hold tensors that the index does not name: {_some(extra)}"
            )
    except BaseException:
        opened.close()
        raise
    return opened


def read_index(path: Path) -> dict[str, str]:
    """Return the `weight_map` of an index, tensor name to file name; each file lies beside the index."""
    data = map_file(path, "safetensors index")
    try:
        if len(data) > MAX_INDEX_BYTES:
            raise CheckpointError(f"{path} has {len(data)} bytes; an index may have {MAX_INDEX_BYTES}")
        index = _parse(data[:], str(path), "the index")
    finally:
        data.close()
    places = index.get("weight_map")
    if not isinstance(places, dict) or not places:
        raise CheckpointError(
            f"{path}: weight_map is {show(places)}; it must be an object with a file a tensor"
        )
    for name, file in places.items():
        if (
            not isinstance(file, str)
            or file in ("", ".", "..")
            or "/" in file
            or "\\" in file
            or "\0" in file
        ):
            raise CheckpointError(
                f"{path}: the tensor {show(name)} is to be in {show(file)}; allowed: the name of a file beside it"
            )
    return places


def read_table(data: mmap.mmap, label: str, shard: int = 0) -> dict[str, StoredTensor]:
    """Read and check the header of one file; raises as `open_safetensors` does."""
    size = len(data)
    if size < 8:
        raise CheckpointError(f"{label}: {size} bytes are no safetensors file; the shortest has 10")
    n = int.from_bytes(data[:8], "little")
    if MAX_HEADER_BYTES < n < 1 << 32:  # a larger number is the beginning of some other file
        raise CheckpointError(
            f"{label}: the header claims {n} bytes; the format allows at most {MAX_HEADER_BYTES} (100 MB)"
        )
    if data[8:9] != b"{":
        raise CheckpointError(f"{label}: not a safetensors file: {what_else(data[:512])}")
    if 8 + n > size:
        raise CheckpointError(
            f"{label}: the header claims {n} bytes, but the file ends at byte {size}: it is cut short or corrupt"
        )
    header = _parse(data[8 : 8 + n], label, "the header")
    metadata = header.pop("__metadata__", None)
    if metadata is not None and not (
        isinstance(metadata, dict) and all(isinstance(v, str) for v in metadata.values())
    ):
        raise CheckpointError(f"{label}: __metadata__ must be an object of strings")
    if len(header) > MAX_TENSORS:
        raise CheckpointError(f"{label}: {len(header)} tensors; allowed: up to {MAX_TENSORS}")
    tensors = {name: _tensor(name, row, 8 + n, size, label, shard) for name, row in header.items()}
    _check_coverage(tensors, 8 + n, size, label)
    return tensors


def _parse(raw: bytes, label: str, what: str) -> dict[str, Any]:
    """JSON of bounded cost in which no key occurs twice."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            seen: set[str] = set()
            for key, _ in pairs:
                if key in seen:
                    raise CheckpointError(f"{label}: {what} has {show(key)} twice")
                seen.add(key)
        return found

    if raw.count(b",") + raw.count(b"[") + raw.count(b"{") > MAX_JSON_VALUES:
        raise CheckpointError(f"{label}: {what} holds more than {MAX_JSON_VALUES} values")
    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=once)
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as e:
        reason = "it is nested too deeply" if isinstance(e, RecursionError) else str(e)
        raise CheckpointError(f"{label}: {what} is not JSON: {reason[:200]}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{label}: {what} is not a JSON object")
    return value


def _tensor(name: str, row: object, data_start: int, size: int, label: str, shard: int) -> StoredTensor:
    what = f"{label}: the tensor {show(name)}"
    if not isinstance(row, dict) or row.keys() != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(
            f"{what} is {show(row)}; it must have dtype, shape and data_offsets, and no more"
        )
    dtype, shape, offsets = row["dtype"], row["shape"], row["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise UnsupportedModelError(f"{what} has the dtype {show(dtype)}; supported are {', '.join(DTYPES)}")
    if not _whole_numbers(shape) or len(shape) > MAX_DIMS or max(shape, default=0) > MAX_DIM:
        raise CheckpointError(f"{what} has the shape {show(shape)}; allowed: up to {MAX_DIMS} whole numbers")
    if not _whole_numbers(offsets) or len(offsets) != 2:
        raise CheckpointError(f"{what} has the data_offsets {show(offsets)}; allowed: two whole numbers")
    begin, end = offsets
    if begin > end:
        raise CheckpointError(f"{what} begins at {begin}, after its end at {end}")
    if data_start + end > size:
        raise CheckpointError(
            f"{what} would end at byte {data_start + end}, but the file has only {size} bytes: it is cut short"
        )
    n_bytes = math.prod(shape) * np.dtype(DTYPES[dtype]).itemsize
    if end - begin != n_bytes:
        raise CheckpointError(
            f"{what} has {end - begin} bytes, but {dtype} of shape {list(shape)} takes {n_bytes}"
        )
    return StoredTensor(name, dtype, tuple(shape), data_start + begin, n_bytes, shard)


def _whole_numbers(values: object) -> bool:
    return isinstance(values, list) and all(type(v) is int and v >= 0 for v in values)


def _check_coverage(tensors: Mapping[str, StoredTensor], start: int, size: int, label: str) -> None:
    """Refuse overlaps, holes and bytes after the last tensor: the format has none of them."""
    position, previous = start, "the header"
    for tensor in sorted(tensors.values(), key=lambda t: (t.offset, t.n_bytes)):
        if tensor.offset < position:
            raise CheckpointError(f"{label}: the tensor {show(tensor.name)} overlaps {previous}")
        if tensor.offset > position:
            raise CheckpointError(
                f"{label}: {tensor.offset - position} bytes before the tensor {show(tensor.name)} belong to none"
            )
        position, previous = tensor.offset + tensor.n_bytes, f"the tensor {show(tensor.name)}"
    if position != size:
        raise CheckpointError(f"{label}: {size - position} bytes after the last tensor belong to none")


def _some(names: list[str]) -> str:
    return ", ".join(map(show, names[:5])) + (", …" if len(names) > 5 else "")
