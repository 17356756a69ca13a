"""Stored tensors as sources for `assemble`: plain numbers as they are, pre-quantized weights as blocks of GGUF.

`join` looks at `quantization_config` and joins what belongs to one weight (codes, scales, zero points) into a
source named like the weight. Nothing is quantized again. What comes out, and how far it is from the numbers
that the layout stands for:

    layout                                   becomes   error
    GPTQ, AWQ, compressed-tensors int4       Q4_0      none, where every zero point is 8 (symmetric)
                                             Q4_1      minimum rounded to float16: up to 2^-7 of one step
    GPTQ and compressed-tensors int8         Q8_0      none, where every zero point is 128 (0 if signed)
    bitsandbytes int8                        Q8_0      scale rounded to float16: 2^-11
    MXFP4                                    MXFP4     none
    FP8, bitsandbytes nf4 and fp4; columns   F16       rounded to float16: 2^-11 of a number, 2^-25 below 6e-5
    out of order (act-order), odd groups

Scales that are stored as float16 stay as they are; float32 and bfloat16 ones are rounded to float16 (2^-11). Where
float16 cannot hold the largest number, bfloat16 takes its place (2^-8). What these files say about quantizing
activations is not followed: activations have our own precision.

This module does not know what tensors mean.
"""

import difflib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from ropewalk.checkpoint import bitsandbytes, packed_int
from ropewalk.checkpoint.assemble import F32, Source
from ropewalk.checkpoint.cursor import show
from ropewalk.checkpoint.encode import mxfp4_rows
from ropewalk.checkpoint.float8 import float8_source
from ropewalk.checkpoint.quants import FORMATS
from ropewalk.checkpoint.safetensors import SafeTensors
from ropewalk.errors import CheckpointError, UnsupportedModelError

Joined = tuple[dict[str, Source], set[str]]
"""Sources by name, and the names of stored tensors that are part of one."""


def join(
    stored: SafeTensors, wanted: Sequence[str], config: Mapping[str, Any], label: str
) -> dict[str, Source]:
    """Return the wanted tensors as sources, by their stored names or the names that plain weights would have.

    Raises
    ------
    UnsupportedModelError
        A method of quantization, a parameter of it, or a type of elements that is not implemented.
    CheckpointError
        Parts of a weight are missing or do not fit each other.
    """
    method = config.get("quantization_config") or config.get("compression_config")
    sources: dict[str, Source] = {}
    used: set[str] = set()
    if method is not None:
        sources, used = _method(method, label)(stored, wanted, method, label)
    for name in wanted:
        if name not in used:
            sources[name] = plain(stored, name, label)
    return sources


def _method(config: object, label: str) -> Callable[[SafeTensors, Sequence[str], Any, str], Joined]:
    name = config.get("quant_method") if isinstance(config, Mapping) else None
    if isinstance(name, str) and name in METHODS:
        return METHODS[name]
    near = difflib.get_close_matches(str(name), METHODS, n=1, cutoff=0.5)
    raise UnsupportedModelError(
        f"{label}: quant_method = {show(name)} is not supported{'; did you mean ' + near[0] + '?' if near else ''}; "
        f"supported are {', '.join(METHODS)}"
    )


def plain(stored: SafeTensors, name: str, label: str) -> Source:
    """One stored tensor of numbers."""
    tensor = stored.tensors[name]
    if tensor.dtype in ("F32", "F16", "BF16"):
        return Source(name, tensor.shape, FORMATS[tensor.dtype], lambda: stored.array(name))
    if tensor.dtype == "F64":
        return Source(name, tensor.shape, F32, lambda: stored.array(name).astype(np.float32))
    raise UnsupportedModelError(
        f"{label}: the tensor {show(name)} has the dtype {tensor.dtype}; supported for weights: F32, F16, BF16, F64"
    )


def _fp8(stored: SafeTensors, wanted: Sequence[str], config: Mapping[str, Any], label: str) -> Joined:
    """8-bit floats with a scale for the tensor, each row, or each block."""
    sources: dict[str, Source] = {}
    used = {n for n in wanted if n.endswith((".input_scale", ".activation_scale"))}
    for name in wanted:
        if stored.tensors[name].dtype not in ("F8_E4M3", "F8_E5M2"):
            continue
        scales = next((s for s in (f"{name}_scale_inv", f"{name}_scale") if s in stored.tensors), None)
        if scales is None:
            raise CheckpointError(f"{label}: {name} consists of 8-bit floats, but there is no {name}_scale")
        sources[name] = float8_source(stored, name, scales, config.get("weight_block_size"), label)
        used |= {name, scales}
    return sources, used


def _mxfp4(stored: SafeTensors, wanted: Sequence[str], config: Mapping[str, Any], label: str) -> Joined:
    """Blocks of 32 four-bit floats: sixteen bytes, the even columns in the low nibbles, and a power of two."""
    sources: dict[str, Source] = {}
    used: set[str] = set()
    for blocks in wanted:
        stem = blocks.removesuffix("_blocks")
        if stem == blocks:
            continue
        scales = f"{stem}_scales"
        shape = stored.tensors[blocks].shape
        fits = scales in stored.tensors and stored.tensors[scales].shape == shape[:-1]
        if not fits or shape[-1:] != (16,) or {stored.tensors[n].dtype for n in (blocks, scales)} != {"U8"}:
            raise CheckpointError(
                f"{label}: {blocks} has shape {list(shape)}; it must be bytes [..., 16] with {scales}"
            )
        name = f"{stem}.weight"
        out = (*shape[:-2], shape[-2] * 32)
        sources[name] = Source(name, out, FORMATS["MXFP4"], partial(_mxfp4_rows, stored, blocks, scales))
        used |= {blocks, scales}
    return sources, used


def _mxfp4_rows(stored: SafeTensors, blocks: str, scales: str) -> Any:
    """Expert by expert, so that the codes of only one are there as bytes."""
    pairs, exponents = stored.array(blocks), stored.array(scales)
    row_bytes = FORMATS["MXFP4"].row_bytes(32 * pairs.shape[-2])
    out = np.empty((*pairs.shape[:-2], row_bytes), np.uint8)
    for index in np.ndindex(pairs.shape[:-3]):
        part = pairs[index]
        codes = np.stack([part & np.uint8(15), part >> np.uint8(4)], axis=-1)
        out[index] = mxfp4_rows(codes.reshape(*part.shape[:-2], -1), exponents[index])
    return out


METHODS: Mapping[str, Callable[[SafeTensors, Sequence[str], Any, str], Joined]] = {
    "gptq": packed_int.gptq,
    "awq": packed_int.awq,
    "compressed-tensors": packed_int.compressed_tensors,
    "fp8": _fp8,
    "fbgemm_fp8": _fp8,
    "mxfp4": _mxfp4,
    "bitsandbytes": bitsandbytes.bitsandbytes,
}
"""Every method that is read, by its name in `quantization_config`."""
