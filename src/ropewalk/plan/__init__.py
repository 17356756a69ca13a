"""The arithmetic of inference before anything runs: what a model takes, what fits, and how fast it can be at best.

    from ropewalk.plan import find_machine, make_plan, shape_of_numbers, weight_type

    llama = shape_of_numbers(layers=32, heads=32, kv_heads=8, head_dim=128, params=8_030_261_248,
                             weight_type=weight_type("BF16"))
    plan = make_plan(llama, find_machine("H100-SXM"), contexts=[8192], batches=[1, 32])
    plan.bytes_per_token, plan.largest_batch(8192), plan.decode(8192, 32).tokens_per_s

Knows configurations and files, and nothing of kernels or the engine; a test holds the bytes of the cache to what the
engine allocates.
"""

from ropewalk.plan.hf import shape_of_config, shape_of_hf
from ropewalk.plan.machine import Machine, find_machine
from ropewalk.plan.memory import (
    CACHE_TYPES,
    PAGE_SIZE,
    WEIGHT_TYPES,
    CacheType,
    WeightType,
    cache_bytes,
    cache_read_bytes,
    cache_type,
    crossing_tokens,
    largest_batch,
    largest_context,
    page_bytes,
    token_bytes,
    weight_type,
)
from ropewalk.plan.report import Plan, make_plan
from ropewalk.plan.roofline import Bound, decode_bound, prefill_bound, takeover_batch
from ropewalk.plan.shape import LayerShape, ModelShape, Part, Weights, shape_of_gguf, shape_of_numbers
from ropewalk.plan.units import parse_bandwidth, parse_bytes, parse_count, parse_rate

__all__ = [
    "CACHE_TYPES",
    "PAGE_SIZE",
    "WEIGHT_TYPES",
    "Bound",
    "CacheType",
    "LayerShape",
    "Machine",
    "ModelShape",
    "Part",
    "Plan",
    "WeightType",
    "Weights",
    "cache_bytes",
    "cache_read_bytes",
    "cache_type",
    "crossing_tokens",
    "decode_bound",
    "find_machine",
    "largest_batch",
    "largest_context",
    "make_plan",
    "page_bytes",
    "parse_bandwidth",
    "parse_bytes",
    "parse_count",
    "parse_rate",
    "prefill_bound",
    "shape_of_config",
    "shape_of_gguf",
    "shape_of_hf",
    "shape_of_numbers",
    "takeover_batch",
    "token_bytes",
    "weight_type",
]
