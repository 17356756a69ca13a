"""Choosing integers and scales: at least as good as a NumPy search over many scales, exact where that is possible."""

import numpy as np
import pytest

from ropewalk.checkpoint.quants import FORMATS, IQ4_LEVELS
from ropewalk.encoder import ENCODERS, LARGEST, encode_rows
from ropewalk.errors import UnsupportedModelError


def rows(rng, n=6, columns=512):
    """Weights like a model's: some rows with a few large numbers, one of zeros, one constant."""
    x = rng.standard_normal((n, columns)).astype(np.float32) * np.float32(0.02)
    x[0] *= 1 + 10 * (rng.random(columns) < 0.01)
    x[1, 32:300] = 0
    x[2, :256] = 0.25
    return x


def weights(x, size):
    groups = x.reshape(-1, size)
    return np.sqrt((groups**2).mean(1, keepdims=True) + groups**2)


def error(x, y, size):
    """Weighted squared error of each group of `size` weights."""
    return (weights(x, size) * (y - x).reshape(-1, size) ** 2).sum(1)


def searched(x, name):
    """The smallest error of each group over a fine grid of scales (and minima), in NumPy, with exact scales."""
    groups, w = x.reshape(-1, 32).astype(np.float64), weights(x, 32).astype(np.float64)
    low, high = np.minimum(groups.min(1), 1e9), groups.max(1)
    best = np.full(len(groups), np.inf)
    if name in ("Q4_1", "Q5_1"):
        levels = 15 if name == "Q4_1" else 31
        for stretch in np.linspace(0.8, 1.1, 31):
            d = np.maximum((high - low) * stretch / levels, 1e-12)[:, None]
            for shift in np.linspace(-1, 1, 11):
                m = low[:, None] + shift * d
                q = np.clip(np.rint((groups - m) / d), 0, levels)
                best = np.minimum(best, (w * (q * d + m - groups) ** 2).sum(1))
        return best
    bottom, top = {"Q4_0": (-8, 7), "Q5_0": (-16, 15)}[name]
    reach = np.maximum(np.abs(low), np.abs(high))[:, None]
    for divisor in np.concatenate(
        [np.linspace(bottom * 1.2, bottom * 0.7, 121), np.linspace(top * 0.7, top * 1.2, 121)]
    ):
        d = np.maximum(reach, 1e-12) / divisor
        for sign in (1, -1):
            q = np.clip(np.rint(groups / (sign * d)), bottom, top)
            best = np.minimum(best, (w * (q * sign * d - groups) ** 2).sum(1))
    return best


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_as_good_as_a_grid_of_scales(name):
    x = rows(np.random.default_rng(1))
    y = FORMATS[name].dequantize(encode_rows(x, FORMATS[name]))
    found, best = error(x, y, 32), searched(x, name)
    assert found.sum() <= 1.01 * best.sum()
    assert (found <= 1.3 * best + 1e-9).all()


BOUNDS = {
    "Q2_K": 0.28,
    "Q3_K": 0.15,
    "Q4_K": 0.075,
    "Q5_K": 0.037,
    "Q6_K": 0.018,
    "IQ4_NL": 0.078,
    "Q8_0": 0.006,
}


@pytest.mark.parametrize(("name", "bound"), BOUNDS.items())
def test_relative_error_of_normal_weights(name, bound):
    """Bounds are the errors of llama.cpp's quantizers on such numbers, or a little less."""
    x = np.random.default_rng(2).standard_normal((16, 1024)).astype(np.float32)
    y = FORMATS[name].dequantize(encode_rows(x, FORMATS[name]))
    assert np.sqrt(((y - x) ** 2).sum() / (x**2).sum()) < bound


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL"])
def test_what_the_format_can_hold_comes_back_exactly(name):
    """Numbers that are on the grid of a format with an even scale lose nothing."""
    rng = np.random.default_rng(3)
    if name == "IQ4_NL":
        x = IQ4_LEVELS.astype(np.float32)[rng.integers(0, 16, (4, 256))]
        x[:, ::32], x[:, 1::32] = -127, 113
    else:
        low, high = {
            "Q4_0": (-8, 7),
            "Q4_1": (0, 15),
            "Q5_0": (-16, 15),
            "Q5_1": (0, 31),
            "Q8_0": (-127, 127),
        }[name]
        x = rng.integers(low, high + 1, (4, 256)).astype(np.float32)
        x[:, ::32], x[:, 1::32] = low, high
    x *= np.float32(2**-7)
    assert np.array_equal(FORMATS[name].dequantize(encode_rows(x, FORMATS[name])), x)


@pytest.mark.parametrize("name", ENCODERS)
def test_zeros_huge_and_tiny_numbers_stay_finite(name):
    x = np.zeros((4, 256), np.float32)
    x[1, 3], x[2] = 60000, 1e-9
    x[3, 200:] = -1e-3
    y = FORMATS[name].dequantize(encode_rows(x, FORMATS[name]))
    assert np.isfinite(y).all()
    assert (y[0] == 0).all()
    assert abs(y[1, 3] / 60000 - 1) < 0.02


@pytest.mark.parametrize("name", ["Q4_K", "Q3_K", "Q4_0", "Q5_1", "IQ4_NL"])
def test_importance_moves_the_error_to_where_it_matters_less(name):
    x = rows(np.random.default_rng(4))
    importance = np.ones(512, np.float32)
    importance[::4] = 400
    plain, weighted = (FORMATS[name].dequantize(encode_rows(x, FORMATS[name], i)) for i in (None, importance))
    at = lambda y: ((y - x)[:, ::4] ** 2).sum()  # noqa: E731
    assert at(weighted) < 0.9 * at(plain)
    assert ((weighted - x) ** 2).sum() > ((plain - x) ** 2).sum()


def test_pieces_and_lanes_do_not_show():
    x = rows(np.random.default_rng(5), n=7, columns=256)
    for name in ENCODERS:
        whole = encode_rows(x, FORMATS[name])
        assert np.array_equal(np.concatenate([encode_rows(r[None], FORMATS[name]) for r in x]), whole)


@pytest.mark.parametrize("name", LARGEST)
def test_the_largest_number_of_a_format_comes_back_and_a_larger_one_is_refused(name):
    x = np.zeros((2, 256), np.float32)
    x[0, 100], x[1, 7] = LARGEST[name], -LARGEST[name]
    y = FORMATS[name].dequantize(encode_rows(x, FORMATS[name]))
    assert np.abs(y - x).max() < 0.02 * LARGEST[name]
    x[1, 7] *= np.float32(1.001)
    with pytest.raises(UnsupportedModelError, match=rf"is more than {name} holds, .*allowed: .*F32"):
        encode_rows(x, FORMATS[name])


@pytest.mark.parametrize("name", ENCODERS)
def test_only_ratios_of_importance_count(name):
    x = rows(np.random.default_rng(6))
    importance = np.random.default_rng(7).random(512, np.float32) + np.float32(0.01)
    importance[:64] = 0
    first = encode_rows(x, FORMATS[name], importance)
    for power in (-120, 60, 120):
        assert np.array_equal(encode_rows(x, FORMATS[name], importance * np.float32(2.0**power)), first)
    assert np.array_equal(encode_rows(x, FORMATS[name], 0 * importance), encode_rows(x, FORMATS[name]))


def test_what_is_not_finite_and_formats_without_a_quantizer_are_refused():
    x = np.zeros((1, 256), np.float32)
    with pytest.raises(UnsupportedModelError, match="cannot quantize to IQ4_XS; allowed: F32"):
        encode_rows(x, FORMATS["IQ4_XS"])
    for number in (np.nan, -np.inf):
        x[0, 5] = number
        for name in LARGEST:
            with pytest.raises(UnsupportedModelError, match=f"(nan|inf) is among the weights, which {name} "):
                encode_rows(x, FORMATS[name])
