"""Rows of the simple block formats from their integers and scales: the inverse of what `quants` expands.

Nothing is rounded here but scales to float16. Codes are uint8 or int8 `[..., columns]`, scales float
`[..., columns / 32]`; the result is uint8 `[..., row_bytes]`. This module does not know how codes are chosen.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ropewalk.checkpoint.quants import FORMATS

Bytes = NDArray[np.uint8]
Array = NDArray[Any]


def q4_rows(codes: Bytes, scales: Array, minima: Array | None = None) -> Bytes:
    """Q4_0 (a weight is d (q − 8)) or, with minima, Q4_1 (d q + m); codes 0 to 15."""
    fmt = FORMATS["Q4_0" if minima is None else "Q4_1"]
    blocks = np.empty((*codes.shape[:-1], codes.shape[-1] // 32), fmt.layout)
    halves = codes.reshape(*blocks.shape, 2, 16)
    blocks["qs"] = halves[..., 0, :] | (halves[..., 1, :] << np.uint8(4))
    blocks["d"] = scales
    if minima is not None:
        blocks["m"] = minima
    return _rows(blocks)


def q8_rows(codes: NDArray[np.int8], scales: Array) -> Bytes:
    """Q8_0: a weight is d q."""
    blocks = np.empty((*codes.shape[:-1], codes.shape[-1] // 32), FORMATS["Q8_0"].layout)
    blocks["qs"] = codes.reshape(*blocks.shape, 32)
    blocks["d"] = scales
    return _rows(blocks)


def mxfp4_rows(codes: Bytes, exponents: Bytes) -> Bytes:
    """MXFP4: codes 0 to 15 of the E2M1 values, one exponent of 2 (biased by 127) for 32 of them."""
    blocks = np.empty((*codes.shape[:-1], codes.shape[-1] // 32), FORMATS["MXFP4"].layout)
    halves = codes.reshape(*blocks.shape, 2, 16)
    blocks["qs"] = halves[..., 0, :] | (halves[..., 1, :] << np.uint8(4))
    blocks["e"] = exponents
    return _rows(blocks)


def _rows(blocks: NDArray[np.void]) -> Bytes:
    rows: Bytes = blocks.reshape(*blocks.shape[:-1], -1).view(np.uint8)
    return rows
