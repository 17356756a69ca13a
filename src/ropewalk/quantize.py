"""Quantizing a model: into a GGUF file (`quantize_model`), or while it is loaded (`Requantized`).

Tensors stream through one after the other, in pieces that all threads work on, so memory stays at some tens of
megabytes (and one stored tensor, where a folder's tensors are put together from several). What mixes call for is in
`checkpoint.mixes`, how integers are chosen in `kernels.quantize`.

This module does not know engines or the command line.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from ropewalk.checkpoint.base import Checkpoint, TensorInfo
from ropewalk.checkpoint.mixes import Mix, format_for, mix_named, place_of
from ropewalk.checkpoint.quants import BlockFormat, all_finite, dequantize
from ropewalk.checkpoint.writer import NewTensor, write_gguf
from ropewalk.closing import Closing
from ropewalk.encoder import recode, threads
from ropewalk.errors import InvalidParameterError, UnsupportedModelError
from ropewalk.kernels.team import available_threads

Progress = Callable[[str, int, int], None]
Floats = NDArray[np.float32]
Pieces = Iterator[NDArray[np.uint8]]
PLAIN = ("F32", "F16", "BF16")
RELEASE_BYTES = 1 << 24
"""After so many bytes of a new tensor the mapped pages of the old one are given back: a few times as many."""

COPIED_BYTES = 1 << 20
"""Of a tensor that stays as it is so many are looked at and written at a time."""


def plan_formats(checkpoint: Checkpoint, mix: Mix) -> dict[str, BlockFormat]:
    """The format that each tensor gets."""
    tied = "output.weight" not in checkpoint.tensors
    return {
        name: format_for(mix, info, place_of(name, checkpoint.metadata, tied))
        for name, info in checkpoint.tensors.items()
    }


@dataclass(frozen=True)
class Report:
    """What `quantize_model` did.

    Attributes
    ----------
    bytes_before, bytes_after : of all tensors.
    formats : how many tensors have each format now.
    requantized : names of tensors that were quantized before, into another format.
    """

    bytes_before: int
    bytes_after: int
    formats: Mapping[str, int]
    requantized: tuple[str, ...]


def quantize_model(
    checkpoint: Checkpoint,
    path: Path,
    mix: Mix,
    *,
    importance: Mapping[str, Floats] | None = None,
    n_threads: int | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Report:
    """Write a model as a GGUF file in the formats of a mix.

    Parameters
    ----------
    checkpoint : Checkpoint
        The model; best one of float weights.
    path : pathlib.Path
        The file to write.
    importance : mapping, optional
        For names of tensors, float32 [columns] or, of experts, [experts, columns]: how much errors matter.
    overwrite : bool
        Whether a file that is there already may be replaced; never one of the model's own.

    Raises
    ------
    InvalidParameterError
        The file is there, or is one that the model is read from; an importance does not fit its tensor.
    UnsupportedModelError
        A weight is NaN, infinite, or larger than its new format holds.
    CheckpointError
        The file cannot be written.

    Warns
    -----
    UserWarning
        Tensors that were quantized already are quantized once more: what they lost stays lost.
    """
    check_target(checkpoint, path, overwrite)
    chosen = plan_formats(checkpoint, mix)
    importance = _fitting(checkpoint, importance or {})
    tensors = [NewTensor(n, checkpoint.tensors[n].shape, f) for n, f in chosen.items()]
    twice = tuple(n for n, f in chosen.items() if _was_quantized(checkpoint.tensors[n], f))
    if twice:
        kinds = Counter(checkpoint.tensors[n].format.name for n in twice)
        warnings.warn(
            f"{len(twice)} tensors are quantized already ({', '.join(kinds)}) and will be quantized once more: "
            "what they have lost stays lost",
            stacklevel=2,
        )
    metadata = dict(checkpoint.metadata)
    metadata |= {"general.file_type": mix.file_type, "general.quantization_version": 2}
    n_threads = n_threads or available_threads()
    with threads(n_threads) as pool:
        streams = _streams(checkpoint, chosen, importance, pool, n_threads, progress or (lambda *_: None))
        write_gguf(path, metadata, tensors, streams)
    return Report(
        sum(info.n_bytes for info in checkpoint.tensors.values()),
        sum(t.n_bytes for t in tensors),
        Counter(t.format.name for t in tensors),
        twice,
    )


def _was_quantized(info: TensorInfo, target: BlockFormat) -> bool:
    return info.format.name not in PLAIN and target is not info.format


def check_target(checkpoint: Checkpoint, path: Path, overwrite: bool) -> None:
    """Raise InvalidParameterError unless a file made from this model may be written there."""
    if path.is_dir():
        raise InvalidParameterError(f"{path} is a folder; name the file to write")
    if path.exists() and not path.is_file():
        raise InvalidParameterError(f"{path} is a device or pipe; name a file to write")
    if not path.parent.is_dir():
        raise InvalidParameterError(f"there is no folder {path.parent} to write {path.name} in")
    if path.exists():
        if any(source.exists() and path.samefile(source) for source in checkpoint.paths):
            raise InvalidParameterError(f"{path} is the model itself; write to another file")
        if not overwrite:
            raise InvalidParameterError(
                f"{path} is there already; remove it, or allow to replace it (--overwrite)"
            )


def _fitting(checkpoint: Checkpoint, importance: Mapping[str, Floats]) -> dict[str, Floats]:
    """Importance in the shape of its tensors: llama.cpp's older files have that of all experts in one row."""
    found = {}
    for name, values in importance.items():
        if name not in checkpoint.tensors:
            raise InvalidParameterError(f"the importance matrix names {name}, which the model does not have")
        shape = checkpoint.tensors[name].shape
        if len(shape) > 2 and values.shape == (shape[0] * shape[-1],):
            values = values.reshape(shape[0], shape[-1])
        if values.shape not in (shape[-1:], (*shape[:-2], shape[-1])):
            raise InvalidParameterError(
                f"the importance of {name} has shape {list(values.shape)}; the tensor's is {list(shape)}"
            )
        if not np.isfinite(values).all() or values.min(initial=0) < 0:
            raise InvalidParameterError(f"the importance of {name} is not finite and at least 0 everywhere")
        found[name] = values
    return found


def _streams(
    checkpoint: Checkpoint,
    chosen: Mapping[str, BlockFormat],
    importance: Mapping[str, Floats],
    pool: ThreadPoolExecutor,
    n_threads: int,
    progress: Progress,
) -> Iterator[Pieces]:
    total = sum(info.n_bytes for info in checkpoint.tensors.values())
    what, done = f"quantizing {checkpoint.path.name}", 0

    def told(pieces: Pieces, info: TensorInfo, size: int, before: int) -> Pieces:
        written = 0
        for piece in pieces:
            progress(what, before + info.n_bytes * written // max(size, 1), total)
            yield piece
            written += piece.nbytes

    for name, target in chosen.items():
        info = checkpoint.tensors[name]
        pieces = _pieces(checkpoint, info, target, importance.get(name), pool, n_threads)
        yield told(pieces, info, NewTensor(name, info.shape, target).n_bytes, done)
        done += info.n_bytes
        checkpoint.release()
    progress(what, total, total)


def _pieces(
    checkpoint: Checkpoint,
    info: TensorInfo,
    target: BlockFormat,
    importance: Floats | None,
    pool: ThreadPoolExecutor,
    n_threads: int,
) -> Pieces:
    """A tensor's rows in its new format; as they are, where that is the old one and all numbers are finite."""
    raw = checkpoint.raw(info.name)
    written = 0
    parts = raw.reshape(-1, *raw.shape[-2:]) if raw.ndim > 2 else raw.reshape(1, -1, raw.shape[-1])
    for i, rows in enumerate(parts):
        weights = importance[i] if importance is not None and importance.ndim > 1 else importance
        made = (
            _copied(rows, target)
            if target is info.format
            else recode(rows, info.format, target, pool, n_threads, weights)
        )
        try:
            for piece in made:
                yield piece
                written += piece.nbytes
                if written >= RELEASE_BYTES:
                    checkpoint.release()
                    written = 0
        except UnsupportedModelError as e:
            raise UnsupportedModelError(f"tensor {info.name}: {e}") from None


def _copied(rows: NDArray[np.uint8], fmt: BlockFormat) -> Pieces:
    """Rows uint8 [rows, row_bytes] as they are, some at a time."""
    step = max(COPIED_BYTES // rows.shape[1], 1)
    for start in range(0, len(rows), step):
        piece = rows[start : start + step]
        if not all_finite(piece, fmt):
            raise UnsupportedModelError("NaN or an infinite number is among the weights")
        yield piece


class Requantized(Closing):
    """A checkpoint whose matrices are quantized as they are read. See `checkpoint.base.Checkpoint`.

    Only what becomes smaller is changed: a tensor that has as few bits already stays as it is.

    Parameters
    ----------
    checkpoint : Checkpoint
        Closed with this one.
    name : str
        "q8", "q6", "q5" or "q4"; or the name of a mix.

    Raises
    ------
    InvalidParameterError
        The name is unknown.

    Warns
    -----
    UserWarning
        No tensor becomes smaller.
    """

    def __init__(self, checkpoint: Checkpoint, name: str, *, n_threads: int | None = None) -> None:
        mix = mix_named(name)
        self._checkpoint = checkpoint
        self._mix = mix
        self._n_threads = n_threads or available_threads()
        chosen = plan_formats(checkpoint, mix)
        self._targets = {
            n: f
            for n, f in chosen.items()
            if f.bits_per_weight < checkpoint.tensors[n].format.bits_per_weight
        }
        if not self._targets:
            warnings.warn(
                f"nothing becomes smaller as {mix.name}: the weights stay as they are", stacklevel=2
            )
        infos = dict(checkpoint.tensors)
        for n, f in self._targets.items():
            shape = infos[n].shape
            n_bytes = int(np.prod(shape[:-1], dtype=object)) * f.row_bytes(shape[-1])
            infos[n] = TensorInfo(n, shape, f, 0, n_bytes)
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(infos)
        self._embedding: NDArray[np.uint8] | None = None

    @property
    def path(self) -> Path:
        return self._checkpoint.path

    @property
    def paths(self) -> tuple[Path, ...]:
        return self._checkpoint.paths

    @property
    def metadata(self) -> Mapping[str, object]:
        return self._checkpoint.metadata

    @property
    def file_bytes(self) -> int:
        return self._checkpoint.file_bytes

    @property
    def kind(self) -> str:
        return f"{self._checkpoint.kind}, quantized to {self._mix.name}"

    def raw(self, name: str) -> NDArray[np.uint8]:
        """A tensor's rows; quantized now, if this makes them smaller."""
        if name not in self._targets:
            return self._checkpoint.raw(name)
        if name == "token_embd.weight" and self._embedding is not None:
            return self._embedding
        info, target = self._checkpoint.tensors[name], self._targets[name]
        with threads(self._n_threads) as pool:
            pieces = _pieces(self._checkpoint, info, target, None, pool, self._n_threads)
            shape = (*info.shape[:-1], target.row_bytes(info.shape[-1]))
            rows = np.concatenate(list(pieces)).reshape(shape)
        if name == "token_embd.weight":
            self._embedding = rows  # rows of it are read as long as the model runs
        return rows

    def tensor(self, name: str) -> Floats:
        """A tensor expanded to float32, as it is after quantizing."""
        return dequantize(self.raw(name), self.tensors[name].format)

    def release(self) -> None:
        """Give back the memory of the pages read so far."""
        self._checkpoint.release()

    def close(self) -> None:
        """Close what is behind it."""
        self._checkpoint.close()
