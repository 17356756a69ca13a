"""The size of the KV cache: from bytes, a share, or tokens; contradictions are refused with their numbers."""

import pytest

from ropewalk.engine.budget import CacheSize, cache_size, parse_memory
from ropewalk.errors import InvalidParameterError

MACHINE = {"model_context": 4096, "page_bytes": 1000, "free_bytes": 4_000_000, "max_batch": 4}


@pytest.mark.parametrize(
    ("value", "n_bytes"),
    [
        ("2GiB", 2 * 2**30),
        ("1.5 mib", 3 * 2**19),
        ("500MB", 500_000_000),
        ("7kB", 7000),
        ("12b", 12),
        ("4096", 4096),
        (4096, 4096),
        ("25%", 250_000),
        ("100 %", 1_000_000),
        (0.5, 500_000),
        ("0.5", 500_000),
        (1.0, 1_000_000),
    ],
)
def test_memory(value, n_bytes):
    assert parse_memory(value, 1_000_000) == n_bytes


@pytest.mark.parametrize(
    "value", ["", "GiB", "-1GiB", "2 GiB 3", "2XB", "0", 0, -5, 0.0, 1.5, "1.5", "0%", "101%", True, "1e9"]
)
def test_what_is_no_amount_of_memory(value):
    with pytest.raises(InvalidParameterError, match=r"kv_memory is .*; allowed: bytes"):
        parse_memory(value, 1_000_000)


@pytest.mark.parametrize(
    ("options", "context_length", "kv_tokens"),
    [
        ({}, 4096, 16_000),  # a quarter of what is free: 1,000 pages
        ({"free_bytes": 40_000_000}, 4096, 4 * 4096),  # more than the batch can fill is of no use
        ({"free_bytes": 0}, 4096, 4096),
        ({"model_context": 100_000}, 8192, 16_000),
        ({"context_length": 100}, 100, 400),
        ({"kv_tokens": 5000}, 4096, 5000),
        ({"kv_tokens": 100}, 100, 100),
        ({"kv_tokens": 100, "context_length": 50}, 50, 100),
        ({"kv_memory": 10_999}, 160, 160),
        ({"kv_memory": "1MB"}, 4096, 16_000),
        ({"kv_memory": 0.01, "context_length": 64}, 64, 640),
    ],
)
def test_sizes(options, context_length, kv_tokens):
    assert cache_size(**(MACHINE | options)) == CacheSize(context_length, kv_tokens)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"context_length": 1}, r"context_length is 1; allowed: 2 \.\.\. 4096"),
        ({"context_length": 4097}, r"context_length is 4097; allowed: 2 \.\.\. 4096"),
        (
            {"kv_tokens": 63, "context_length": 64},
            "kv_tokens is 63; allowed: at least context_length, which is 64",
        ),
        (
            {"kv_memory": "3kB", "context_length": 64},
            "kv_memory is 3kB: room for 48 tokens, at 1000 bytes for 16; allowed: at least context_length",
        ),
        ({"kv_memory": 999}, "room for 0 tokens, at 1000 bytes for 16; allowed: at least 2 tokens"),
        ({"kv_memory": 9999, "kv_tokens": 64}, "allowed: one of them"),
        ({"kv_tokens": 10**30}, r"0 bytes; allowed: at most the 4,000,000 that are free"),
        (
            {"kv_memory": "1000TiB"},
            "kv_memory is 1000TiB: .* bytes; allowed: at most the 4,000,000 that are free",
        ),
        ({"kv_tokens": 64.5}, r"kv_tokens is 64\.5; allowed: an integer"),
        ({"context_length": "64"}, "context_length is '64'; allowed: an integer"),
        ({"context_length": 64.0}, r"context_length is 64\.0; allowed: an integer"),
        ({"max_batch": None}, "max_batch is None; allowed: an integer"),
        ({"max_batch": True}, "max_batch is True; allowed: an integer"),
    ],
)
def test_sizes_that_are_not_allowed(options, message):
    with pytest.raises(InvalidParameterError, match=message):
        cache_size(**(MACHINE | options))
