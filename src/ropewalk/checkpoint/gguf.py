"""GGUF model files, memory-mapped: metadata, tensor table, and each tensor as bytes or as float32.

`open_gguf` checks everything in the header (see `header`), so that a `GGUF` in hand has only tensors that lie
inside their file. A model split over several files opens as one. Nothing is read from the tensors until
they are asked for, and views of them are read-only.

This module does not know what metadata keys or tensor names mean, apart from the keys of split files.

The files must not be cut short while they are open: reading a mapped page that no longer exists stops the
process, as with any memory map.
"""

import contextlib
import mmap
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from ropewalk.checkpoint.cursor import StringArray, show
from ropewalk.checkpoint.files import map_file, release_map
from ropewalk.checkpoint.header import Header, TensorInfo, read_header
from ropewalk.checkpoint.quants import dequantize
from ropewalk.closing import Closing
from ropewalk.errors import CheckpointError

__all__ = ["GGUF", "StringArray", "TensorInfo", "open_gguf"]

_SHARD_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)


class GGUF(Closing):
    """An open model file, or set of split files; made by `open_gguf`. A context manager.

    Attributes
    ----------
    path : pathlib.Path
        The file, or the first of the split files.
    paths : tuple of pathlib.Path
        All files, in order.
    version : int
        GGUF version, 2 or 3.
    metadata : Mapping[str, object]
        Values by key: int, float, bool, str, read-only NumPy arrays of numbers, `StringArray` of strings.
    tensors : Mapping[str, TensorInfo]
        The tensor table by name, in the order of the file.
    """

    def __init__(self, files: "list[_File]") -> None:
        self.paths = tuple(f.path for f in files)
        self.path = self.paths[0]
        self.version = files[0].header.version
        self.metadata: Mapping[str, object] = MappingProxyType(files[0].header.metadata)
        tensors: dict[str, TensorInfo] = {}
        for file in files:
            for name, info in file.header.tensors.items():
                if name in tensors:
                    raise CheckpointError(
                        f"{file.path}: the tensor {show(name)} is also in another part of the model"
                    )
                tensors[name] = info
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(tensors)
        self._maps = [f.data for f in files]

    @property
    def kind(self) -> str:
        """The format, for people."""
        return f"GGUF version {self.version}"

    @property
    def file_bytes(self) -> int:
        """Size of all files together."""
        return sum(len(m) for m in self._maps)

    def raw(self, name: str) -> NDArray[np.uint8]:
        """Return a tensor's bytes as they lie in the file.

        Returns
        -------
        numpy.ndarray
            uint8 `[*shape[:-1], row_bytes]`, a read-only view of the memory map.

        Raises
        ------
        CheckpointError
            If there is no such tensor, or the file was closed.
        """
        info = self._info(name)
        flat = np.frombuffer(self._maps[info.shard], np.uint8, info.n_bytes, info.offset)
        return flat.reshape(*info.shape[:-1], info.format.row_bytes(info.shape[-1]))

    def tensor(self, name: str) -> NDArray[np.float32]:
        """Return a tensor expanded to float32 `shape`, freshly allocated; raises as `raw` does."""
        return dequantize(self.raw(name), self._info(name).format)

    def release(self) -> None:
        """Give back the memory of the pages read so far; they are read again from the file when needed.

        Packing calls this as it goes, so that a model in memory is not counted twice.
        """
        for data in self._maps:
            release_map(data)

    def close(self) -> None:
        """Unmap the files, at once or when the last array from `raw` is gone. Metadata stays usable."""
        maps, self._maps = self._maps, []
        for data in maps:
            # A view is still alive: its own reference keeps the map until it goes.
            with contextlib.suppress(BufferError):
                data.close()

    def __repr__(self) -> str:
        return f"<GGUF {self.path.name}: {len(self.tensors)} tensors, {len(self.metadata)} metadata keys>"

    def _info(self, name: str) -> TensorInfo:
        if not self._maps:
            raise CheckpointError(f"{self.path} is closed")
        try:
            return self.tensors[name]
        except KeyError:
            raise CheckpointError(f"{self.path} has no tensor {name!r}") from None


def open_gguf(path: str | os.PathLike[str]) -> GGUF:
    """Open a GGUF file, or a split model by any of its files.

    Parameters
    ----------
    path : str or os.PathLike
        The file. Of a split model the other files, `NAME-00001-of-0000N.gguf` and so on, are next to it.

    Raises
    ------
    ModelNotFoundError
        If there is no such file.
    CheckpointError
        If it is not a sound little-endian GGUF file of version 2 or 3, or a part of the model is missing.
    UnsupportedModelError
        If a tensor has a format that Ropewalk does not implement.
    """
    path = Path(path)
    with contextlib.ExitStack() as undo:
        file = _open_file(path, 0, undo)
        count = _split_number(file, "split.count") or 1
        files = [file]
        if count > 1:
            files = [_open_file(p, i, undo) for i, p in enumerate(_shard_paths(file, count))]
            _check_split(files)
        opened = GGUF(files)
        undo.pop_all()
    if count > 1:
        file.data.close()
    return opened


@dataclass(frozen=True)
class _File:
    path: Path
    data: mmap.mmap
    header: Header


def _open_file(path: Path, shard: int, undo: contextlib.ExitStack) -> _File:
    data = undo.enter_context(map_file(path, "GGUF"))
    return _File(path, data, read_header(data, str(path), shard))


def _split_number(file: _File, key: str) -> int | None:
    value = file.header.metadata.get(key)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise CheckpointError(f"{file.path}: {key} is {show(value)}; allowed: whole numbers from 0")
    return value


def _shard_paths(file: _File, count: int) -> list[Path]:
    """Find the files of a split model from one of them; refuses when one is missing."""
    match = _SHARD_NAME.fullmatch(file.path.name)
    if not match or int(match["count"]) != count:
        raise CheckpointError(
            f"{file.path} is part of a model split into {count} files, so its name must end in "
            f"-00001-of-{count:05d}.gguf or the like for the others to be found"
        )
    paths = [file.path.with_name(f"{match['stem']}-{i + 1:05d}-of-{count:05d}.gguf") for i in range(count)]
    if missing := [p.name for p in paths if not p.exists()]:
        raise CheckpointError(
            f"{file.path} is part of a split model of which {len(missing)} of {count} files are missing: "
            f"{', '.join(missing[:5])}{', …' if len(missing) > 5 else ''}"
        )
    return paths


def _check_split(files: list[_File]) -> None:
    count = len(files)
    for i, file in enumerate(files):
        for key, want in (("split.count", count), ("split.no", i)):
            if (got := _split_number(file, key)) != want:
                raise CheckpointError(
                    f"{file.path}: {key} is {got}; part {i + 1} of {count} must have {want}"
                )
    total = _split_number(files[0], "split.tensors.count")
    found = sum(len(f.header.tensors) for f in files)
    if total not in (None, found):
        raise CheckpointError(
            f"{files[0].path}: split.tensors.count is {total}, but the {count} files have {found} tensors"
        )
