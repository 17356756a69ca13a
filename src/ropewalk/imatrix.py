"""Importance matrices: how much the inputs of each column of each matrix matter, from a calibration text.

The importance of a column is the mean square of what it is multiplied by, over the tokens of the text; an error in a
weight moves the output by as much. `collect` runs the NumPy reference and takes the means on the way. Files are
llama.cpp's: GGUF with `NAME.in_sum2` (sums of squares, [matrices, columns]) and `NAME.counts` ([matrices, 1]), which
`write_imatrix` writes; the older layout (`.dat`) is read too.

This module does not know how importance is used.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ropewalk.checkpoint.base import Checkpoint
from ropewalk.checkpoint.gguf import GGUF, open_gguf
from ropewalk.checkpoint.quants import FORMATS
from ropewalk.checkpoint.store import Progress, no_progress
from ropewalk.checkpoint.writer import NewTensor, write_gguf
from ropewalk.errors import CheckpointError, PromptError
from ropewalk.model.config import ModelConfig
from ropewalk.model.reference import Reference

Floats = NDArray[np.float32]
MAX_ENTRIES = 1 << 18
MAX_VALUES = 1 << 28


@dataclass
class Sums:
    """Sums of squares `[matrices, columns]` and numbers of tokens `[matrices]` of one tensor, float64."""

    squares: NDArray[np.float64]
    counts: NDArray[np.float64]

    def importance(self) -> Floats:
        """Means: float32 [columns], of experts [experts, columns]; 1 for those that no token went through."""
        counts = self.counts[:, None]
        means = np.where(counts > 0, self.squares / np.maximum(counts, 1), 1.0).astype(np.float32)
        return means[0] if len(means) == 1 else means


def collect(
    checkpoint: Checkpoint,
    config: ModelConfig,
    windows: Sequence[Sequence[int]],
    progress: Progress = no_progress,
) -> dict[str, Sums]:
    """Run a model over a text and sum the squares of what every matrix is multiplied by.

    Parameters
    ----------
    windows : token ids, each list read on its own

    Raises
    ------
    PromptError
        There is no window, or one with a token outside the vocabulary.
    """
    if not windows:
        raise PromptError("the calibration text is too short for a single window")
    sums: dict[str, Sums] = {}

    def observe(stem: str, x: Floats, expert: int | None) -> None:
        name = f"{stem}.weight"
        if name not in sums:
            shape = checkpoint.tensors[name].shape
            n = shape[0] if len(shape) > 2 else 1
            sums[name] = Sums(np.zeros((n, shape[-1])), np.zeros(n))
        row = expert or 0
        sums[name].squares[row] += np.einsum("ij,ij->j", x, x, dtype=np.float64)
        sums[name].counts[row] += len(x)

    reference = Reference(config, checkpoint, observe=observe)
    for number, window in enumerate(windows):
        progress("reading the text", number, len(windows))
        reference.logits(window)
        checkpoint.release()
    progress("reading the text", len(windows), len(windows))
    return sums


def write_imatrix(path: Path, sums: Mapping[str, Sums], *, text: str, n_windows: int, window: int) -> None:
    """Write a file that llama.cpp reads too; raises CheckpointError if the disk refuses."""
    arrays: dict[str, Floats] = {}
    for name in sorted(sums):
        arrays[f"{name}.in_sum2"] = sums[name].squares.astype(np.float32)
        arrays[f"{name}.counts"] = sums[name].counts[:, None].astype(np.float32)
    metadata: dict[str, object] = {
        "general.type": "imatrix",
        "imatrix.datasets": [text],
        "imatrix.chunk_count": n_windows,
        "imatrix.chunk_size": window,
    }
    tensors = [NewTensor(name, array.shape, FORMATS["F32"]) for name, array in arrays.items()]
    write_gguf(path, metadata, tensors, ([array.view(np.uint8)] for array in arrays.values()))


def read_imatrix(path: Path) -> dict[str, Floats]:
    """Read the importance of columns, by the names of tensors.

    Raises
    ------
    ModelNotFoundError
        There is no such file.
    CheckpointError
        It is no importance matrix, or one with numbers that cannot be.
    """
    if _is_old(path):
        sums = dict(_read_old(path))
    else:
        with open_gguf(path) as file:
            sums = dict(_read_gguf(file))
    if not sums:
        raise CheckpointError(f"{path} holds no importance matrix")
    for name, each in sums.items():
        sound = np.isfinite(each.squares).all() and np.isfinite(each.counts).all()
        if not sound or each.squares.min() < 0 or each.counts.min() < 0:
            raise CheckpointError(f"{path}: the numbers of {name} are not all finite and from 0")
    return {name: each.importance() for name, each in sums.items()}


def _is_old(path: Path) -> bool:
    """Whether it is a file, and none of GGUF."""
    try:
        with path.open("rb") as file:
            return file.read(4) != b"GGUF"
    except OSError:
        return False


def _read_gguf(file: GGUF) -> Iterator[tuple[str, Sums]]:
    for name in file.tensors:
        stem = name.removesuffix(".in_sum2")
        if stem == name:
            continue
        if f"{stem}.counts" not in file.tensors:
            raise CheckpointError(f"{file.path}: the tensor {stem}.counts is missing")
        squares = np.atleast_2d(file.tensor(name).astype(np.float64))
        counts = file.tensor(f"{stem}.counts").astype(np.float64).reshape(-1)
        squares = squares.reshape(-1, squares.shape[-1])
        if len(counts) != len(squares):
            raise CheckpointError(f"{file.path}: {stem} has {len(squares)} rows and {len(counts)} counts")
        yield stem, Sums(squares, counts)


def _read_old(path: Path) -> Iterator[tuple[str, Sums]]:
    """int32 number of entries; for each the name (int32 length first), int32 calls, int32 values, float32 values."""
    data, at = path.read_bytes(), 0

    def take(n: int) -> bytes:
        nonlocal at
        if n < 0 or at + n > len(data):
            raise CheckpointError(f"{path} is no importance matrix, or cut short at byte {at}")
        at += n
        return data[at - n : at]

    def number(most: int) -> int:
        value = int(struct.unpack("<i", take(4))[0])
        if not 0 <= value <= most:
            raise CheckpointError(f"{path} is no importance matrix: {value} at byte {at - 4}")
        return value

    for _ in range(number(MAX_ENTRIES)):
        name = take(number(1 << 12)).decode("utf-8", "replace")
        calls = number(2**31 - 1)
        values = np.frombuffer(take(4 * number(MAX_VALUES)), "<f4")
        if values.size:
            yield name, Sums(values.astype(np.float64)[None], np.array([float(max(calls, 1))]))


def split_windows(ids: Sequence[int], start: Sequence[int], size: int, most: int | None) -> list[list[int]]:
    """Cut token ids into whole windows of `size`, each with the `start` tokens first; at most `most` of them."""
    step = size - len(start)
    count = len(ids) // step if step > 0 else 0
    count = count if most is None else min(count, most)
    return [[*start, *ids[i * step : (i + 1) * step]] for i in range(count)]
