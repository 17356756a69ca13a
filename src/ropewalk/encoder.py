"""Rows of float32 to rows of a block format, with all threads: the kernels choose the integers, `encode` lays them out.

This module does not know files, tensors' names or mixes of formats.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ropewalk.checkpoint.encode import Parts, encode
from ropewalk.checkpoint.float8 import to_half
from ropewalk.checkpoint.quants import BlockFormat
from ropewalk.errors import UnsupportedModelError
from ropewalk.kernels import quantize as kernels

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]
F = np.float32

PIECE = 1 << 18
"""Weights that one thread works on at a time: a megabyte of float32."""


class _Scratch(threading.local):
    """Memory of one thread for the kernels, aligned to a cache line."""

    def __init__(self) -> None:
        self._memory = np.zeros(kernels.SCRATCH_BYTES + 64, np.uint8)
        self.address = self._memory.ctypes.data + -self._memory.ctypes.data % 64


_scratch = _Scratch()


def _groups(x: Floats, size: int) -> tuple[Floats, Bytes]:
    groups = x.reshape(-1, size)
    return groups, np.empty(groups.shape, np.uint8)


def _affine(name: str, levels: int) -> Callable[[Floats, Floats], Bytes]:
    def run(x: Floats, importance: Floats) -> Bytes:
        groups, codes = _groups(x, 32)
        d, m = np.empty(len(groups), F), np.empty(len(groups), F)
        kernels.quantize_affine(groups, importance, F(levels), codes, d, m, _scratch.address)
        return encode(name, Parts(codes, d, m))

    return run


def _scaled(name: str, kernel: Any, bottom: int, top: int) -> Callable[[Floats, Floats], Bytes]:
    def run(x: Floats, importance: Floats) -> Bytes:
        groups, codes = _groups(x, 32)
        d = np.empty(len(groups), F)
        kernel(groups, importance, F(bottom), F(top), codes, d, _scratch.address)
        return encode(name, Parts(codes, d))

    return run


def _affine_blocks(name: str, size: int, most: int, levels: int) -> Callable[[Floats, Floats], Bytes]:
    lanes = 256 // size

    def run(x: Floats, importance: Floats) -> Bytes:
        groups, codes = _groups(x, size)
        scales, minima = np.empty(len(groups), F), np.empty(len(groups), F)
        factors = np.empty((len(groups), 2), F)
        kernels.quantize_affine_blocks(
            groups, importance, lanes, F(most), F(levels), codes, scales, minima, factors, _scratch.address
        )
        d, m = factors[::lanes].T
        whole = (scales.reshape(-1, lanes), minima.reshape(-1, lanes))
        return encode(name, Parts(codes.reshape(-1, 256), d, m, *whole))

    return run


def _scaled_blocks(
    name: str, least: int, most: int, bottom: int, top: int
) -> Callable[[Floats, Floats], Bytes]:
    def run(x: Floats, importance: Floats) -> Bytes:
        groups, codes = _groups(x, 16)
        scales, factors = np.empty(len(groups), F), np.empty(len(groups), F)
        limits = (F(least), F(most), F(bottom), F(top))
        kernels.quantize_scale_blocks(groups, importance, *limits, codes, scales, factors, _scratch.address)
        return encode(name, Parts(codes.reshape(-1, 256), factors[::16], scales=scales.reshape(-1, 16)))

    return run


def _levels(x: Floats, importance: Floats) -> Bytes:
    groups, codes = _groups(x, 32)
    d = np.empty(len(groups), F)
    kernels.quantize_levels(groups, importance, codes, d, _scratch.address)
    return encode("IQ4_NL", Parts(codes, d))


ENCODERS: Mapping[str, Callable[[Floats, Floats], Bytes]] = {
    "Q4_0": _scaled("Q4_0", kernels.quantize_scale, -8, 7),
    "Q4_1": _affine("Q4_1", 15),
    "Q5_0": _scaled("Q5_0", kernels.quantize_scale, -16, 15),
    "Q5_1": _affine("Q5_1", 31),
    "Q8_0": _scaled("Q8_0", kernels.quantize_range, -127, 127),
    "Q2_K": _affine_blocks("Q2_K", 16, 15, 3),
    "Q3_K": _scaled_blocks("Q3_K", -32, 31, -4, 3),
    "Q4_K": _affine_blocks("Q4_K", 32, 63, 15),
    "Q5_K": _affine_blocks("Q5_K", 32, 63, 31),
    "Q6_K": _scaled_blocks("Q6_K", -128, 127, -32, 31),
    "IQ4_NL": _levels,
}
"""From float32 rows and the importance of their columns to blocks, for every format that can be quantized to."""

_HALF = 65504.0
LARGEST: Mapping[str, float] = {
    "F16": _HALF,
    "BF16": (2 - 2**-7) * 2.0**127,
    "Q4_0": 7 * _HALF,
    "Q4_1": _HALF,
    "Q5_0": 15 * _HALF,
    "Q5_1": _HALF,
    "Q8_0": 127 * _HALF,
    "Q2_K": 15 * _HALF,
    "Q3_K": 31 * 3 * _HALF,
    "Q4_K": 63 * _HALF,
    "Q5_K": 63 * _HALF,
    "Q6_K": 127 * 31 * _HALF,
    "IQ4_NL": 113 * _HALF,
}
"""The largest number of either sign that a format holds: its largest scale, or minimum, is the largest float16."""


def encode_rows(x: Floats, fmt: BlockFormat, importance: Floats | None = None) -> Bytes:
    """Quantize rows, in this thread.

    Parameters
    ----------
    x : float32 [rows, columns]
        Columns a whole number of blocks; all finite, none larger than the format holds (`LARGEST`).
    fmt : BlockFormat
    importance : float32 [columns], optional
        How much an error in each column matters, at least 0; default: all the same.

    Returns
    -------
    uint8 [rows, row_bytes]

    Raises
    ------
    UnsupportedModelError
        There is no quantizer for this format, or it cannot hold a number.
    """
    if fmt.name == "F32":
        return x.view(np.uint8)
    if fmt.name not in LARGEST:
        raise UnsupportedModelError(f"cannot quantize to {fmt.name}; allowed: F32, {', '.join(LARGEST)}")
    _check_size(x, fmt.name)
    if fmt.name in ("F16", "BF16"):
        return to_half(x, fmt).view(np.uint8)
    return ENCODERS[fmt.name](x, _weights(x.shape[1], importance)).reshape(len(x), fmt.row_bytes(x.shape[1]))


def _check_size(x: Floats, name: str) -> None:
    largest = float(max(x.max(initial=0), -x.min(initial=0)))  # NaN, if there is one
    if not math.isfinite(largest):
        raise UnsupportedModelError(f"{largest} is among the weights, which {name} cannot hold")
    if largest > LARGEST[name]:
        fits = [n for n in ("F16", "BF16") if LARGEST[n] >= largest]
        raise UnsupportedModelError(
            f"a weight of size {largest:.6g} is more than {name} holds, which is {LARGEST[name]:.6g}; "
            f"allowed: {', '.join([*fits, 'F32'])}"
        )


def _weights(columns: int, importance: Floats | None) -> Floats:
    """Importance as the kernels take it: only ratios count, so the largest becomes 1 and their sums stay finite."""
    if importance is None or not (largest := importance.max(initial=0)) > 0:
        return np.ones(columns, F)
    weights: Floats = np.maximum(importance / largest, F(1e-12))
    return weights


@contextlib.contextmanager
def threads(n: int) -> Iterator[ThreadPoolExecutor]:
    """A pool for `recode`; when an error or Ctrl-C ends its use, what has not begun is not begun."""
    pool = ThreadPoolExecutor(n)
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def recode(
    raw: Bytes,
    source: BlockFormat,
    target: BlockFormat,
    pool: ThreadPoolExecutor,
    n_threads: int,
    importance: Floats | None = None,
) -> Iterator[Bytes]:
    """Turn rows of one format into rows of another, piece by piece with all threads, in order.

    Parameters
    ----------
    raw : uint8 [rows, row_bytes]
        Of the format `source`.
    importance : float32 [columns], optional
        See `encode_rows`.

    Yields
    ------
    uint8 [some rows, row_bytes] of the format `target`; never more than two pieces a thread are in memory
    """
    columns = raw.shape[1] // source.block_bytes * source.block_size
    step = max(PIECE // columns, 1)

    def run(start: int) -> Bytes:
        return encode_rows(source.dequantize(raw[start : start + step]), target, importance)

    starts = iter(range(0, len(raw), step))
    waiting = [pool.submit(run, start) for _, start in zip(range(2 * n_threads), starts, strict=False)]
    while waiting:
        yield waiting.pop(0).result()
        if (start := next(starts, None)) is not None:
            waiting.append(pool.submit(run, start))
