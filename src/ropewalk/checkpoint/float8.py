"""8-bit floats with scales, as float16 rows: for the whole tensor, for each row, or for blocks of rows and columns.

Source of E4M3 (no infinities, one NaN each sign) and E5M2: Micikevicius et al. 2022, "FP8 formats for deep
learning", arXiv:2209.05433. This module does not know what tensors mean.
"""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ropewalk.checkpoint.assemble import Source
from ropewalk.checkpoint.cursor import show
from ropewalk.checkpoint.quants import FORMATS, BlockFormat
from ropewalk.checkpoint.safetensors import SafeTensors, StoredTensor
from ropewalk.errors import CheckpointError

Floats = NDArray[np.float32]
LARGEST = {"F8_E4M3": 448.0, "F8_E5M2": 57344.0}
_ROWS = 1024


def _e4m3() -> Floats:
    """The number of each byte: 1 sign, 4 exponent bits biased by 7, 3 mantissa bits."""
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, code & 7
    size = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7))
    size[(code & 127) == 127] = np.nan
    return np.where(code & 128, -size, size).astype(np.float32)


TABLES = {
    "F8_E4M3": _e4m3(),
    "F8_E5M2": (np.arange(256, dtype=np.uint16) << np.uint16(8)).view(np.float16).astype(np.float32),
}
"""float32 [256] by dtype."""


def half_format(largest: float) -> BlockFormat:
    """float16, or bfloat16 where numbers may be larger than float16 holds."""
    return FORMATS["F16" if largest <= float(np.finfo(np.float16).max) else "BF16"]


def to_half(values: Floats, fmt: BlockFormat) -> NDArray[Any]:
    """Round to nearest even: float16, or the bits of bfloat16 as uint16."""
    if fmt.name == "F16":
        return values.astype(np.float16)
    bits = values.view(np.uint32)
    rounded: NDArray[Any] = (
        bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))
    ) >> np.uint32(16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded.astype(np.uint16))


def float8_source(stored: SafeTensors, name: str, scales_name: str, block: object, label: str) -> Source:
    """A weight of 8-bit floats; raises CheckpointError if its scales do not fit it."""
    tensor, scales = stored.tensors[name], stored.tensors[scales_name]
    steps = _steps(tensor, scales, block, label)
    factors = floats(stored, scales_name).reshape(scales.shape if len(scales.shape) == 2 else (-1, 1))
    if not np.isfinite(factors).all():
        raise CheckpointError(f"{label}: {scales_name} holds numbers that are not finite")
    fmt = half_format(LARGEST[tensor.dtype] * float(np.abs(factors).max(initial=0.0)))
    table = TABLES[tensor.dtype]

    def fetch() -> NDArray[Any]:
        codes = stored.array(name)
        out = np.empty(codes.shape, "<f2" if fmt.name == "F16" else "<u2")
        columns = np.arange(codes.shape[1]) // steps[1]
        for start in range(0, len(codes), _ROWS):
            rows = np.arange(start, min(start + _ROWS, len(codes)))
            factor = factors[rows // steps[0]][:, columns]
            out[rows] = to_half(table[codes[rows]] * factor, fmt)
        return out

    return Source(name, tensor.shape, fmt, fetch)


def _steps(tensor: StoredTensor, scales: StoredTensor, block: object, label: str) -> tuple[int, int]:
    """How many rows and columns share a scale."""
    rows, columns = tensor.shape if len(tensor.shape) == 2 else (0, 0)
    if math.prod(scales.shape) == 1 and rows:
        return rows, columns
    if scales.shape in ((rows,), (rows, 1)) and rows:
        return 1, columns
    given = isinstance(block, list) and len(block) == 2 and all(type(b) is int and b > 0 for b in block)
    steps = (block[0], block[1]) if given and isinstance(block, list) else (128, 128)
    if scales.shape == (-(-rows // steps[0]), -(-columns // steps[1])):
        return steps
    raise CheckpointError(
        f"{label}: {scales.name} has shape {list(scales.shape)}, which does not fit {tensor.name} of shape "
        f"{list(tensor.shape)} with blocks of {show(block)}"
    )


def floats(stored: SafeTensors, name: str) -> Floats:
    """A small tensor of floats as float32."""
    dtype, array = stored.tensors[name].dtype, stored.array(name)
    if dtype == "BF16":
        return (array.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if dtype not in ("F32", "F16", "F64"):
        raise CheckpointError(f"{name} has the dtype {dtype}; scales must be F32, F16 or BF16")
    return array.astype(np.float32)
