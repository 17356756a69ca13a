"""Blocks from integers and scales: what `quants` expands them to is what they stand for, bit for bit."""

import numpy as np
import pytest

from ropewalk.checkpoint.encode import Parts, encode
from ropewalk.checkpoint.quants import FORMATS, IQ4_LEVELS, MXFP4_LEVELS

N = 5


def blocks_of(name, rng):
    """Random parts of a format, and the float32 numbers that its definition gives them."""
    half = lambda: (rng.standard_normal(N) * 0.01).astype(np.float16)  # noqa: E731
    d, m = half(), half()
    df, mf = d.astype(np.float32)[:, None], m.astype(np.float32)[:, None]
    size = FORMATS[name].block_size
    levels = {"Q4": 16, "Q5": 32, "Q6": 64, "Q3": 8, "Q2": 4, "Q8": 255, "IQ": 16, "MX": 16}[name[:2]]
    codes = rng.integers(0, levels, (N, size)).astype(np.uint8)
    q = codes.astype(np.float32)
    if name in ("Q4_1", "Q5_1"):
        return Parts(codes, d, m), df * q + mf
    if name in ("Q4_0", "Q5_0", "Q8_0"):
        return Parts(codes, d), df * (q - {"Q4_0": 8, "Q5_0": 16, "Q8_0": 127}[name])
    if name == "IQ4_NL":
        return Parts(codes, d), df * IQ4_LEVELS.astype(np.float32)[codes]
    if name == "MXFP4":
        e = rng.integers(100, 140, N).astype(np.uint8)
        return Parts(codes, e), MXFP4_LEVELS[codes] * 2.0 ** (e.astype(np.float32)[:, None] - 128)
    if name in ("Q3_K", "Q6_K"):
        least, most, zero = {"Q3_K": (-32, 31, 4), "Q6_K": (-128, 127, 32)}[name]
        scales = rng.integers(least, most + 1, (N, 16))
        each = (df * scales.astype(np.float32)).repeat(16, axis=1)
        return Parts(codes, d, scales=scales), each * (q - zero)
    groups, most = {"Q2_K": (16, 15), "Q4_K": (8, 63), "Q5_K": (8, 63)}[name]
    scales, minima = (rng.integers(0, most + 1, (N, groups)) for _ in range(2))
    s = (df * scales.astype(np.float32)).repeat(256 // groups, axis=1)
    low = (mf * minima.astype(np.float32)).repeat(256 // groups, axis=1)
    return Parts(codes, d, m, scales, minima), s * q - low


@pytest.mark.parametrize(
    "name",
    ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"],
)
def test_encoding_is_the_inverse_of_expanding(name):
    parts, expected = blocks_of(name, np.random.default_rng(7))
    found = FORMATS[name].dequantize(encode(name, parts))
    assert np.array_equal(found, expected.astype(np.float32))
