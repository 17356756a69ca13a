"""Writing GGUF files: header first, then tensor after tensor as they come, whole at the end or not at all.

The file grows under a temporary name in the target's folder and is moved to its own name by one rename once it is
complete and on the disk. What a killed process leaves of it is removed when the same file is written again. Numbers of
metadata get the types that readers expect: whole numbers from 0 as uint32 (uint64 where they need it), others as int32
or int64, floats as float32; arrays keep their own.

This module does not know what keys and tensors mean. Source of the format: ggml's `docs/gguf.md`.
"""

import contextlib
import fcntl
import glob
import os
import secrets
import struct
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from ropewalk.checkpoint.header import DEFAULT_ALIGNMENT, align
from ropewalk.checkpoint.quants import BlockFormat
from ropewalk.errors import CheckpointError

VERSION = 3
_ARRAY_TYPES = {
    "u1": 0, "i1": 1, "u2": 2, "i2": 3, "u4": 4, "i4": 5, "f4": 6, "b1": 7, "u8": 10, "i8": 11, "f8": 12,
}  # fmt: skip
JUST_MADE_S = 10.0
"""A temporary file younger than this may be one that is about to be locked."""
_STRING, _ARRAY, _BOOL, _F32 = 8, 9, 7, 6


@dataclass(frozen=True)
class NewTensor:
    """A tensor that will be written: its name, shape (slowest axis first) and format."""

    name: str
    shape: tuple[int, ...]
    format: BlockFormat

    @property
    def n_bytes(self) -> int:
        """Bytes that it takes in the file, padding aside."""
        return int(np.prod(self.shape[:-1], dtype=object)) * self.format.row_bytes(self.shape[-1])


def _text(value: str | bytes) -> bytes:
    raw = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def _value(key: str, value: object) -> bytes:
    """A metadata value with its type in front."""
    if isinstance(value, bool):
        return struct.pack("<I?", _BOOL, value)
    if isinstance(value, int):
        if 0 <= value < 1 << 32:
            return struct.pack("<II", 4, value)
        if -(1 << 31) <= value < 0:
            return struct.pack("<Ii", 5, value)
        return struct.pack("<IQ", 10, value) if value >= 0 else struct.pack("<Iq", 11, value)
    if isinstance(value, float):
        return struct.pack("<If", _F32, value)
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _text(value)
    if isinstance(value, np.ndarray) and (kind := _ARRAY_TYPES.get(value.dtype.str[1:])) is not None:
        little = value.astype(value.dtype.newbyteorder("<"), copy=False)
        return struct.pack("<IIQ", _ARRAY, kind, value.size) + little.tobytes()
    if isinstance(value, Sequence):
        raw_items = getattr(value, "raw_items", None)
        items = raw_items() if raw_items else list(value)
        if all(isinstance(item, str | bytes) for item in items):
            return struct.pack("<IIQ", _ARRAY, _STRING, len(items)) + b"".join(map(_text, items))
    raise CheckpointError(
        f"metadata key {key} has a value of a type that GGUF files cannot hold: {type(value)}"
    )


def header(metadata: Mapping[str, object], tensors: Sequence[NewTensor]) -> bytes:
    """Everything up to the first tensor's bytes, padding included."""
    parts = [b"GGUF", struct.pack("<IQQ", VERSION, len(tensors), len(metadata))]
    parts += [_text(key) + _value(key, value) for key, value in metadata.items()]
    offset = 0
    for tensor in tensors:
        dims = tensor.shape[::-1]
        parts.append(_text(tensor.name) + struct.pack(f"<I{len(dims)}Q", len(dims), *dims))
        parts.append(struct.pack("<IQ", tensor.format.ggml_id, offset))
        offset += align(tensor.n_bytes, DEFAULT_ALIGNMENT)
    raw = b"".join(parts)
    return raw + bytes(align(len(raw), DEFAULT_ALIGNMENT) - len(raw))


def write_gguf(
    path: Path,
    metadata: Mapping[str, object],
    tensors: Sequence[NewTensor],
    data: Iterable[Iterable[NDArray[np.uint8]]],
) -> None:
    """Write a file.

    Parameters
    ----------
    path : pathlib.Path
        Replaced if there is one: the caller asks before.
    metadata : Mapping[str, object]
        `general.alignment` and the keys of split files are the writer's own and left out.
    tensors : sequence of NewTensor
    data : iterable of iterables of uint8 arrays
        For each tensor, in order, its bytes in pieces.

    Raises
    ------
    CheckpointError
        The disk refuses, a value cannot be written, or a tensor's pieces have another size than announced.
    """
    kept = {k: v for k, v in metadata.items() if k != "general.alignment" and not k.startswith("split.")}
    with _replacing(path) as f:
        f.write(header(kept, tensors))
        for tensor, pieces in zip(tensors, data, strict=True):
            written = 0
            for piece in pieces:
                f.write(np.ascontiguousarray(piece).data)
                written += piece.nbytes
            if written != tensor.n_bytes:
                raise CheckpointError(
                    f"tensor {tensor.name} came with {written} bytes instead of {tensor.n_bytes}"
                )
            f.write(bytes(align(written, DEFAULT_ALIGNMENT) - written))


def _remove_left(path: Path) -> None:
    """Remove what a process left that was killed while it wrote this file: nobody has it locked any more."""
    for left in path.parent.glob(f".{glob.escape(path.name)}.????????.part"):
        with contextlib.suppress(OSError), left.open("rb") as f:
            fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if time.time() - left.stat().st_mtime > JUST_MADE_S:
                left.unlink()


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """A file that takes its place only when everything was written; devices and pipes are not replaced by one."""
    if path.exists() and not path.is_file():
        raise CheckpointError(f"cannot write {path}: it is a folder, device or pipe")
    _remove_left(path)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        with temporary.open("xb") as f:
            fcntl.flock(f, fcntl.LOCK_EX)
            yield f
            f.flush()
            os.fsync(f.fileno())
        temporary.replace(path)
    except OSError as e:
        raise CheckpointError(f"cannot write {path}: {e.strerror or e}") from e
    finally:
        with contextlib.suppress(OSError):  # a read-only disk refuses even what is not there
            temporary.unlink(missing_ok=True)
