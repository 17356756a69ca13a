"""The KV cache of the CPU backend: memory for pages of 16 tokens, laid out as in `kernels.pages`."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ropewalk.backend.base import PAGE_SIZE
from ropewalk.errors import InvalidParameterError
from ropewalk.kernels.pages import SCALES_BYTES, head_page_bytes
from ropewalk.model.config import ModelConfig

CACHE_DTYPES = ("float16", "int8")


class CpuCache:
    """Keys and values of all layers, laid out as in `kernels.pages`.

    Parameters
    ----------
    config : ModelConfig
    n_pages : int
        Pages of 16 tokens.
    dtype : str
        "float16", or "int8" with one float32 scale for the key and one for the value of each token and KV head.

    Attributes
    ----------
    data : uint8 [n_layers, n_kv_heads, 2 (keys, values), n_pages, bytes]
        With latent attention 1 in place of 2: values are the ends of keys.
    scales : float32 [n_layers, n_kv_heads, 2, n_pages, 16]
        Of an int8 cache; else the last axis is empty.
    """

    def __init__(self, config: ModelConfig, n_pages: int, dtype: str) -> None:
        self.n_pages = n_pages
        self.bytes_per_page = cache_page_bytes(config, dtype)
        self.is_int8 = dtype == "int8"
        heads, page = (config.n_layers, config.n_kv_heads), head_page_bytes(config.head_dim, self.is_int8)
        self.data = _untouched((*heads, 1 if config.latent else 2, n_pages, page), np.uint8)
        self.scales = _untouched((*heads, 2, n_pages, PAGE_SIZE if self.is_int8 else 0), np.float32)

    @property
    def n_bytes(self) -> int:
        """Bytes allocated for all pages."""
        return self.data.nbytes + self.scales.nbytes

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole pages, all layers, from the first to the second of each pair, one pair after the other."""
        for source, target in pairs:
            for pages in (self.data, self.scales):
                pages[:, :, :, target] = pages[:, :, :, source]

    def read_page(self, page: int) -> NDArray[np.uint8]:
        """Copy a page, all layers: `data`, then `scales`, as uint8 [bytes_per_page]."""
        parts = [pages[:, :, :, page].reshape(-1).view(np.uint8) for pages in (self.data, self.scales)]
        return np.concatenate(parts)

    def write_page(self, page: int, contents: NDArray[np.uint8]) -> None:
        """Make a page what `read_page` returned."""
        start = 0
        for pages in (self.data, self.scales):
            part = pages[:, :, :, page]
            part[...] = contents[start : start + part.nbytes].view(part.dtype).reshape(part.shape)
            start += part.nbytes


def _untouched(shape: tuple[int, ...], dtype: type[np.generic]) -> NDArray[Any]:
    """Zeros that take memory as they are written, in the system's smallest pages.

    NumPy asks for huge pages. A page of ours is 2 kB in each of hundreds of distant streams, so its first token would
    make the system clear 2 MB for each: on SmolLM2-135M 360 MB and up to 0.9 s, for nothing that we could measure.
    """
    n_bytes = math.prod(shape) * np.dtype(dtype).itemsize
    memory = mmap.mmap(-1, max(n_bytes, 1))
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, dtype, math.prod(shape)).reshape(shape)


def check_cache_dtype(dtype: str) -> None:
    """Refuse a type of elements that no KV cache has; raises InvalidParameterError."""
    if dtype not in CACHE_DTYPES:
        raise InvalidParameterError(f"cache_dtype is {dtype!r}; allowed: {', '.join(CACHE_DTYPES)}")


def cache_page_bytes(config: ModelConfig, dtype: str) -> int:
    """Bytes of one page of a KV cache over all layers, scales included.

    Raises
    ------
    InvalidParameterError
        If there are no such caches.
    """
    check_cache_dtype(dtype)
    is_int8 = dtype == "int8"
    head_bytes = head_page_bytes(config.head_dim, is_int8) * (1 if config.latent else 2)
    return config.n_layers * config.n_kv_heads * (head_bytes + (2 * SCALES_BYTES if is_int8 else 0))
