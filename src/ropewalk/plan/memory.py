"""What a model and its KV cache take: bytes of weights by type, bytes of keys and values by context and batch.

The KV cache of n tokens holds 2 · layers · KV heads · head_dim elements for each of them (keys and values). Ropewalk
allocates it in pages of 16 tokens, the same for all layers, and an int8 cache has a float32 scale for the key and
one for the value of each token and KV head. Multi-head latent attention has one vector in place of all heads, which is
the key and whose end is the value: an int8 cache has one scale for that end and one for the rest. A layer with a
sliding window *reads* no more than its window; what is allocated is the whole context.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ropewalk.checkpoint.quants import FORMATS
from ropewalk.errors import InvalidParameterError

if TYPE_CHECKING:
    from ropewalk.plan.shape import LayerShape, ModelShape

PAGE_SIZE = 16
"""Tokens in a page of the KV cache."""

MOST = 10**15
"""Of anything that is counted."""


@dataclass(frozen=True)
class CacheType:
    """How the elements of a KV cache are kept.

    Attributes
    ----------
    element_bytes
        Of one element of a key or a value.
    scale_bytes
        For the key of one token and KV head, and as many for its value.
    ours
        Whether Ropewalk has such a cache; others are there to plan with.
    """

    name: str
    element_bytes: int
    scale_bytes: int = 0
    ours: bool = False


_CACHES = (
    CacheType("float16", 2, ours=True),
    CacheType("int8", 1, 4, ours=True),
    CacheType("bfloat16", 2),
    CacheType("float8", 1),
    CacheType("float32", 4),
)
CACHE_TYPES = {cache.name: cache for cache in _CACHES}
_CACHE_ALIASES = {"fp16": "float16", "f16": "float16", "bf16": "bfloat16", "fp8": "float8", "fp32": "float32"}


def cache_type(name: str) -> CacheType:
    """The cache type of that name; raises InvalidParameterError."""
    known = CACHE_TYPES | {alias: CACHE_TYPES[real] for alias, real in _CACHE_ALIASES.items()}
    if name.lower() not in known:
        raise InvalidParameterError(f"cache type is {name!r}; allowed: {', '.join(CACHE_TYPES)}")
    return known[name.lower()]


@dataclass(frozen=True)
class WeightType:
    """A type of weights, with its bits for one weight, scales of its blocks included."""

    name: str
    bits: float

    def n_bytes(self, n_weights: int) -> int:
        """Bytes of so many weights, rounded up."""
        return -int(-n_weights * self.bits // 8)


WEIGHT_TYPES = {name: WeightType(name, 8 * f.block_bytes / f.block_size) for name, f in FORMATS.items()} | {
    "FP8": WeightType("FP8", 8.0),
    "INT8": WeightType("INT8", 8.0),
}
_WEIGHT_ALIASES = {"FP32": "F32", "FLOAT32": "F32", "FP16": "F16", "FLOAT16": "F16", "BFLOAT16": "BF16"}


def weight_type(name: str) -> WeightType:
    """The weight type of that name, in letters of any case; raises InvalidParameterError with near matches."""
    key = _WEIGHT_ALIASES.get(name.upper(), name.upper())
    if key not in WEIGHT_TYPES:
        near = difflib.get_close_matches(key, WEIGHT_TYPES, 3, 0.5)
        raise InvalidParameterError(
            f"weight type is {name!r}; "
            + (f"did you mean {' or '.join(near)}? " if near else "")
            + f"allowed: {', '.join(WEIGHT_TYPES)}"
        )
    return WEIGHT_TYPES[key]


def check_count(name: str, value: object, least: int = 1) -> int:
    """The value, if it is an integer from `least` to `MOST`; raises InvalidParameterError."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MOST:
        raise InvalidParameterError(f"{name} is {value!r}; allowed: an integer from {least} to {MOST:,}")
    return value


def cache_elements(layer: LayerShape) -> int:
    """Elements that a layer keeps for one token: keys and values together, or a latent, which is both."""
    return layer.latent or layer.n_kv_heads * (layer.key_dim + layer.value_dim)


def layer_token_bytes(layer: LayerShape, cache: CacheType) -> int:
    """Bytes that a layer keeps for one token, scales included."""
    vectors = 2 if layer.latent else 2 * layer.n_kv_heads
    return cache_elements(layer) * cache.element_bytes + vectors * cache.scale_bytes


def token_bytes(model: ModelShape, cache: CacheType) -> int:
    """Bytes of the KV cache for one token over all layers, scales included."""
    return sum(layer_token_bytes(layer, cache) for layer in model.layers)


def page_bytes(model: ModelShape, cache: CacheType) -> int:
    """Bytes of one page of the KV cache over all layers: what the engine allocates by."""
    return PAGE_SIZE * token_bytes(model, cache)


def n_pages(n_tokens: int) -> int:
    """Pages that a sequence of so many tokens takes."""
    return -(-n_tokens // PAGE_SIZE)


def cache_bytes(model: ModelShape, cache: CacheType, context: int, batch: int = 1) -> int:
    """Bytes that are allocated for `batch` sequences of `context` tokens each.

    Raises
    ------
    InvalidParameterError
        A number below 1.
    """
    return check_count("batch", batch) * n_pages(check_count("context", context)) * page_bytes(model, cache)


def cache_read_bytes(model: ModelShape, cache: CacheType, context: int) -> int:
    """Bytes of the KV cache that the last of `context` tokens looks at: a window's worth in layers that have one."""
    return sum(
        layer_token_bytes(layer, cache) * (min(context, layer.window) if layer.window else context)
        for layer in model.layers
    )


def crossing_tokens(weight_bytes: float, bytes_per_token: float) -> float:
    """Tokens of one sequence at which its KV cache is as large as the weights."""
    return weight_bytes / bytes_per_token


def largest_context(model: ModelShape, cache: CacheType, free_bytes: float, batch: int = 1) -> int:
    """The most tokens that each of `batch` sequences can have in `free_bytes`; 0 if not one page fits."""
    return max(0, int(free_bytes / check_count("batch", batch) // page_bytes(model, cache))) * PAGE_SIZE


def largest_batch(model: ModelShape, cache: CacheType, free_bytes: float, context: int) -> int:
    """The most sequences of `context` tokens that fit into `free_bytes`."""
    return max(0, int(free_bytes // cache_bytes(model, cache, context)))
