"""Blocks from their integers and scales: the inverse of what `quants` expands, format by format.

Nothing is rounded here but scales to float16. `Parts` are what a format's block is made of; `encode` lays them out.
This module does not know how the integers are chosen: `ropewalk.kernels.quantize` does.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ropewalk.checkpoint.quants import FORMATS

Bytes = NDArray[np.uint8]
Array = NDArray[Any]


@dataclass(frozen=True)
class Parts:
    """What n blocks are made of.

    Attributes
    ----------
    codes : uint8 [n, block_size]
        Integers, counted from the smallest that the format has.
    d, m : float [n]
        The block's scale, and its minimum (for blocks of 256: the factor of the minima).
    scales, minima : whole numbers [n, groups]
        Of blocks of 256: the groups' own.
    """

    codes: Bytes
    d: Array
    m: Array | None = None
    scales: Array | None = None
    minima: Array | None = None


def encode(name: str, parts: Parts) -> Bytes:
    """Return the blocks of format `name`: uint8 [n, block_bytes]."""
    fmt = FORMATS[name]
    blocks = np.zeros(len(parts.codes), fmt.layout)
    _FILL[name](blocks, parts)
    return blocks.view(np.uint8).reshape(len(blocks), fmt.block_bytes)


def _join(values: Bytes, run: int, width: int) -> Bytes:
    """uint8 [n, k] of `width` bits each to bytes [n, k · width / 8]: the inverse of `quants._runs`."""
    shifts = np.arange(0, 8, width, dtype=np.uint8)[:, None]
    spread = values.reshape(len(values), -1, 8 // width, run) << shifts
    joined: Bytes = np.bitwise_or.reduce(spread, axis=2).reshape(len(values), -1)
    return joined


def _simple(blocks: Array, parts: Parts) -> None:
    blocks["d"] = parts.d
    if parts.m is not None:
        blocks["m"] = parts.m
    blocks["qs"] = _join(parts.codes & np.uint8(15), 16, 4)


def _five_bits(blocks: Array, parts: Parts) -> None:
    _simple(blocks, parts)
    blocks["qh"] = np.packbits(parts.codes >> np.uint8(4), axis=-1, bitorder="little")


def _q8_0(blocks: Array, parts: Parts) -> None:
    blocks["d"] = parts.d
    blocks["qs"] = parts.codes.view(np.int8) - np.int8(127)


def _whole(values: Array | None) -> Bytes:
    assert values is not None
    return values.astype(np.int16).astype(np.uint8)


def _k_affine(blocks: Array, parts: Parts) -> None:
    """Eight 6-bit scales and minima in twelve bytes; see `quants.k_scales`."""
    s, m = _whole(parts.scales), _whole(parts.minima)
    four = np.uint8(4)
    blocks["scales"][:, :4] = s[:, :4] | (s[:, 4:] >> four) << np.uint8(6)
    blocks["scales"][:, 4:8] = m[:, :4] | (m[:, 4:] >> four) << np.uint8(6)
    blocks["scales"][:, 8:] = (s[:, 4:] & np.uint8(15)) | (m[:, 4:] & np.uint8(15)) << four
    blocks["d"], blocks["dmin"] = parts.d, parts.m
    blocks["qs"] = _join(parts.codes & np.uint8(15), 32, 4)


def _q5_k(blocks: Array, parts: Parts) -> None:
    _k_affine(blocks, parts)
    blocks["qh"] = _join(parts.codes >> np.uint8(4), 32, 1)


def _q6_k(blocks: Array, parts: Parts) -> None:
    blocks["d"] = parts.d
    blocks["scales"] = _whole(parts.scales).view(np.int8)
    blocks["ql"] = _join(parts.codes & np.uint8(15), 64, 4)
    blocks["qh"] = _join(parts.codes >> np.uint8(4), 32, 2)


def _q3_k(blocks: Array, parts: Parts) -> None:
    scales = _whole(parts.scales) + np.uint8(32)
    blocks["d"] = parts.d
    blocks["scales"][:, :8] = _join(scales & np.uint8(15), 8, 4)
    blocks["scales"][:, 8:] = _join(scales >> np.uint8(4), 4, 2)
    blocks["qs"] = _join(parts.codes & np.uint8(3), 32, 2)
    blocks["hmask"] = _join(parts.codes >> np.uint8(2), 32, 1)


def _q2_k(blocks: Array, parts: Parts) -> None:
    blocks["d"], blocks["dmin"] = parts.d, parts.m
    blocks["scales"] = _whole(parts.scales) | _whole(parts.minima) << np.uint8(4)
    blocks["qs"] = _join(parts.codes, 32, 2)


def _mxfp4(blocks: Array, parts: Parts) -> None:
    blocks["e"] = parts.d
    blocks["qs"] = _join(parts.codes, 16, 4)


_FILL: Mapping[str, Callable[[Array, Parts], None]] = {
    "Q4_0": _simple,
    "Q4_1": _simple,
    "Q5_0": _five_bits,
    "Q5_1": _five_bits,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _k_affine,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _simple,
    "MXFP4": _mxfp4,
}


# The same from the layouts of pre-quantized checkpoints: whole matrices, integers as they come there.


def _of_matrix(name: str, codes: Bytes, d: Array, m: Array | None = None) -> Bytes:
    """uint8 [..., row_bytes] from codes [..., columns] and scales [..., columns / 32]."""
    parts = Parts(codes.reshape(-1, 32), np.ravel(d), None if m is None else np.ravel(m))
    return encode(name, parts).reshape(*codes.shape[:-1], -1)


def q4_rows(codes: Bytes, scales: Array, minima: Array | None = None) -> Bytes:
    """Q4_0 (a weight is d (q − 8)) or, with minima, Q4_1 (d q + m); codes 0 to 15."""
    return _of_matrix("Q4_0" if minima is None else "Q4_1", codes, scales, minima)


def q8_rows(codes: NDArray[np.int8], scales: Array) -> Bytes:
    """Q8_0: a weight is d q, for any int8 q."""
    blocks = np.empty((*codes.shape[:-1], codes.shape[-1] // 32), FORMATS["Q8_0"].layout)
    blocks["qs"] = codes.reshape(*blocks.shape, 32)
    blocks["d"] = scales
    rows: Bytes = blocks.view(np.uint8)
    return rows


def mxfp4_rows(codes: Bytes, exponents: Bytes) -> Bytes:
    """MXFP4: codes 0 to 15 of the E2M1 values, one exponent of 2 (biased by 127) for 32 of them."""
    return _of_matrix("MXFP4", codes, exponents)
