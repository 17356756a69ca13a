"""Stored tensors as sources for `assemble`: plain numbers as they are, and pre-quantized weights as blocks.

This module does not know what tensors mean.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ropewalk.checkpoint.assemble import F32, Source
from ropewalk.checkpoint.cursor import show
from ropewalk.checkpoint.quants import FORMATS
from ropewalk.checkpoint.safetensors import SafeTensors
from ropewalk.errors import UnsupportedModelError


def join(
    stored: SafeTensors, wanted: Sequence[str], config: Mapping[str, Any], label: str
) -> dict[str, Source]:
    """Return the wanted tensors as sources, by their stored names.

    Raises
    ------
    UnsupportedModelError
        A method of quantization, or a type of elements, that is not implemented.
    """
    method = config.get("quantization_config")
    if method is not None:
        raise UnsupportedModelError(f"{label}: quantization_config = {show(method)} is not supported")
    return {name: plain(stored, name, label) for name in wanted}


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
