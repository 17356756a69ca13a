"""Weights as bitsandbytes stores them: int8 with a scale a row, and four-bit codes of a table, as blocks of GGUF.

    int8       weight int8 [out, in], SCB float32 [out]: a weight is q · SCB / 127
    nf4, fp4   weight uint8 [out · in / 2, 1], the first of two codes in the high nibble; quant_map float32 [16] gives
               their values, absmax one factor for each `blocksize` consecutive weights of the whole matrix.
               With double quantization absmax is uint8: nested_quant_map[absmax] · nested_absmax + nested_offset

The shape and block sizes of four-bit weights are JSON text in `quant_state.bitsandbytes__nf4` (or `fp4`). Source:
bitsandbytes' `QuantState.as_dict`, restated; the table of nf4 is in the file itself. This module does not know what
tensors mean.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ropewalk.checkpoint.assemble import Source
from ropewalk.checkpoint.cursor import show
from ropewalk.checkpoint.encode import q8_rows
from ropewalk.checkpoint.float8 import half_format, to_half
from ropewalk.checkpoint.quants import FORMATS
from ropewalk.checkpoint.safetensors import SafeTensors
from ropewalk.errors import CheckpointError, UnsupportedModelError

Array = NDArray[Any]


def bitsandbytes(
    stored: SafeTensors, wanted: Sequence[str], config: Mapping[str, Any], label: str
) -> tuple[dict[str, Source], set[str]]:
    """Join the parts of every quantized weight."""
    sources: dict[str, Source] = {}
    used = {n for n in wanted if n.endswith(".weight_format")}
    for name in wanted:
        if name.endswith(".SCB"):
            weight = name.removesuffix("SCB") + "weight"
            sources[weight] = _int8(stored, weight, name, label)
            used |= {name, weight}
        elif ".quant_state.bitsandbytes__" in name:
            weight = name.partition(".quant_state.")[0]
            sources[weight] = _four_bits(stored, weight, name, label)
            used |= {n for n in wanted if n == weight or n.startswith(weight + ".")}
    return sources, used


def _int8(stored: SafeTensors, name: str, scales: str, label: str) -> Source:
    tensor = stored.tensors.get(name)
    if tensor is None or tensor.dtype != "I8" or len(tensor.shape) != 2 or tensor.shape[1] % 32:
        raise CheckpointError(f"{label}: {scales} has no int8 matrix {name} of whole groups of 32 columns")
    if stored.tensors[scales].dtype != "F32" or stored.tensors[scales].shape != tensor.shape[:1]:
        raise CheckpointError(f"{label}: {scales} must be F32 {list(tensor.shape[:1])}")
    rows, columns = tensor.shape

    def fetch() -> Array:
        factors = stored.array(scales)[:, None] / np.float32(127)
        return q8_rows(stored.array(name), np.broadcast_to(factors, (rows, columns // 32)))

    return Source(name, tensor.shape, FORMATS["Q8_0"], fetch)


def _four_bits(stored: SafeTensors, name: str, state_name: str, label: str) -> Source:
    state = _state(stored, state_name, label)
    shape = tuple(state["shape"])
    size, block = int(np.prod(shape, dtype=object)), state["blocksize"]
    parts = {p: f"{name}.{p}" for p in ("absmax", "quant_map")}
    for part in (name, *parts.values()):
        if part not in stored.tensors:
            raise CheckpointError(f"{label}: the tensor {part} is missing")
    if stored.tensors[name].dtype != "U8" or stored.tensors[name].n_bytes != -(-size // 2):
        raise CheckpointError(f"{label}: {name} must have {-(-size // 2)} bytes for the shape {list(shape)}")
    table = stored.array(parts["quant_map"]).astype(np.float32).reshape(-1)
    factors = _factors(stored, name, state, label)  # only to be checked: they are large, and not kept
    if table.shape != (16,) or len(factors) != -(-size // block):
        raise CheckpointError(
            f"{label}: {name} has {len(table)} values and {len(factors)} factors, which do not fit it"
        )
    largest = float(np.abs(factors).max(initial=0.0) * np.abs(table).max())
    fmt = half_format(largest)

    def fetch() -> Array:
        pairs = stored.array(name).reshape(-1)
        codes = np.stack([pairs >> np.uint8(4), pairs & np.uint8(15)], axis=-1).reshape(-1)[:size]
        values = table[codes] * np.repeat(_factors(stored, name, state, label), block)[:size]
        return to_half(values, fmt).reshape(shape)

    return Source(name, shape, fmt, fetch)


def _state(stored: SafeTensors, name: str, label: str) -> dict[str, Any]:
    if not name.endswith(("__nf4", "__fp4")):
        raise UnsupportedModelError(f"{label}: {show(name)}: supported are nf4 and fp4")
    try:
        state = json.loads(stored.array(name).tobytes()[: 1 << 16])
    except (ValueError, RecursionError):
        state = None
    shape = state.get("shape") if isinstance(state, dict) else None
    sizes = [*shape, state.get("blocksize")] if isinstance(state, dict) and isinstance(shape, list) else []
    if len(sizes) != 3 or not all(type(n) is int and 0 < n < 1 << 31 for n in sizes):
        raise CheckpointError(
            f"{label}: {name} is {show(state)}; it must state a shape of two axes and a blocksize"
        )
    assert isinstance(state, dict)
    return state


def _factors(stored: SafeTensors, name: str, state: Mapping[str, Any], label: str) -> NDArray[np.float32]:
    """The factor of each block, the second quantization undone."""
    absmax = stored.array(f"{name}.absmax").reshape(-1)
    if absmax.dtype != np.uint8:
        return absmax.astype(np.float32)
    nested, values = f"{name}.nested_absmax", f"{name}.nested_quant_map"
    block, offset = state.get("nested_blocksize"), state.get("nested_offset", 0.0)
    if nested not in stored.tensors or values not in stored.tensors or type(block) is not int or block < 1:
        raise CheckpointError(
            f"{label}: {name}.absmax is quantized, and what is needed to undo that is missing"
        )
    table = stored.array(values).astype(np.float32).reshape(-1)
    outer = np.repeat(stored.array(nested).astype(np.float32).reshape(-1), block)
    if len(table) != 256 or len(outer) < len(absmax) or not isinstance(offset, int | float):
        raise CheckpointError(f"{label}: {nested} and {values} do not fit {name}.absmax")
    factors: NDArray[np.float32] = table[absmax] * outer[: len(absmax)] + np.float32(offset)
    return factors
