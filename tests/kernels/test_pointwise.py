"""Pointwise kernels against NumPy, on values."""

import math

import numpy as np
import pytest

from ropewalk.kernels import pointwise as P
from ropewalk.kernels import simd
from ropewalk.kernels.definition import FINE_TOKEN_GROUP_BYTES, TOKEN_GROUP_BYTES
from ropewalk.kernels.jit import kernel
from ropewalk.model import reference


def lanewise(op):
    @kernel
    def apply(x, y, n):
        for i in range(0, n, 16):
            simd.store_floats(y + 4 * i, op(simd.load_floats(x + 4 * i)))

    def run(values):
        x = np.ascontiguousarray(values, np.float32)
        padded = np.zeros(-(-x.size // 16) * 16, np.float32)
        padded[: x.size] = x
        out = np.zeros_like(padded)
        apply(padded.ctypes.data, out.ctypes.data, padded.size)
        return out[: x.size]

    return run


exp, silu, gelu, tanh = (lanewise(op) for op in (P.exp, P.silu, P.gelu_tanh, P.tanh))
WIDE = np.concatenate([np.linspace(-100, 87.9, 20_001), np.linspace(-1, 1, 2_001)]).astype(np.float32)


def test_exp_is_within_two_ulp_and_exactly_zero_far_below():
    x = WIDE[WIDE >= -87]
    exact = np.exp(x.astype(np.float64))
    assert np.max(np.abs(exp(x) - exact) / np.spacing(exact.astype(np.float32))) <= 2
    assert np.array_equal(exp([-87.01, -1000, -np.inf]), [0, 0, 0])
    assert exp([0.0])[0] == 1


def test_activations_agree_with_their_formulas():
    x = WIDE.astype(np.float64)
    with np.errstate(over="ignore"):
        exact = x / (1 + np.exp(-x))
    assert np.max(np.abs(silu(WIDE) - exact)) < 1e-5
    assert np.max(np.abs(tanh(WIDE) - np.tanh(x))) < 3e-7
    exact = 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    assert np.max(np.abs(gelu(WIDE) - exact) / (1 + np.abs(x))) < 1e-6


def test_the_error_function_and_gelu_by_it():
    exact = np.array([math.erf(v) for v in WIDE.astype(np.float64)])
    assert np.max(np.abs(lanewise(P.erf)(WIDE) - exact)) < 5e-7
    assert np.array_equal(np.signbit(lanewise(P.erf)(WIDE)), np.signbit(WIDE))


@kernel
def activate(gate, up, out, n, kind):
    for i in range(0, n, 16):
        at = 4 * i
        simd.store_floats(out + at, P.activate(simd.load_floats(gate + at), simd.load_floats(up + at), kind))


KINDS = {
    "silu": P.SILU, "gelu_tanh": P.GELU_TANH, "gelu": P.GELU, "relu2": P.RELU2, "swiglu_oai": P.SWIGLU_OAI
}  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
def test_gated_activations_are_those_of_the_reference(name):
    """The two forms of gelu differ by up to 5e-4, which the bound tells apart; gpt-oss bounds gate and up."""
    gate = np.linspace(-12, 12, 4096, dtype=np.float32)
    up = np.random.default_rng(3).uniform(-10, 10, gate.size).astype(np.float32)
    out = np.zeros_like(gate)
    activate(gate.ctypes.data, up.ctypes.data, out.ctypes.data, gate.size, KINDS[name])
    expected = reference.activate(name, gate, up, True)
    np.testing.assert_allclose(out, expected, rtol=2e-6, atol=1e-5)
    assert abs(expected).max() > 50


@kernel
def normalise(x, w, bias, n, eps, centred):
    P.normalise_floats(x, (w, bias, centred), n, eps)


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_norms_of_both_kinds(centred, has_bias):
    rng = np.random.default_rng(1)
    x, w, bias = rng.standard_normal((3, 576)).astype(np.float32) + np.float32(2)
    expected = (
        reference.layer_norm(x, w, bias if has_bias else None, 1e-5)
        if centred
        else reference.rms_norm(x, w, 1e-5) + (bias if has_bias else 0)
    )
    normalise(
        x.ctypes.data, w.ctypes.data, bias.ctypes.data if has_bias else 0, 576, np.float32(1e-5), int(centred)
    )
    np.testing.assert_allclose(x, expected, rtol=2e-6, atol=2e-6)


@kernel
def rotate(x, cos, sin, width, neighbours):
    P.rotate(x, cos, sin, width, neighbours)


@pytest.mark.parametrize(
    ("neighbours", "expected"),
    [
        (True, [-1.142640, 1.922076, 2.959851, 4.029800]),
        (False, [-1.984111, 1.959901, 2.462378, 4.019800]),
    ],
)
def test_b1_rotation_of_both_layouts(neighbours, expected):
    x = np.array([1, 2, 3, 4, 5], np.float32)
    angles = np.array([1.0, 0.01])
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    rotate(x.ctypes.data, cos.ctypes.data, sin.ctypes.data, 4, neighbours)
    assert np.allclose(x[:4], expected, atol=1e-6)
    assert x[4] == 5


@kernel
def quantize(x, at, tile, token, fine):
    a, b = simd.load_floats(x), simd.load_floats(x + 64)
    P.put_group(a, b, (at, 0, tile, token), fine, 0)


@pytest.mark.parametrize("fine", [False, True])
def test_quantized_group(fine):
    """Halves go to even, an all-zero group is zero, and the fields lie where the products look for them."""
    tile, token, steps = 4, 2, 32512 if fine else 127
    x = np.zeros(32, np.float32)
    x[:5] = np.array([steps, 2.5, 3.5, -2.5, 1]) / steps
    data = np.zeros(tile * (FINE_TOKEN_GROUP_BYTES if fine else TOKEN_GROUP_BYTES), np.uint8)
    quantize(x.ctypes.data, data.ctypes.data, tile, token, fine)
    planes = 2 if fine else 1
    parts = data[: 32 * tile * planes].view(np.int8).reshape(planes, tile, 32)[:, token].astype(int)
    q = parts[0] * 256 + parts[1] if fine else parts[0]
    assert q[:5].tolist() == [steps, 2, 4, -2, 1]
    fields = data[32 * tile * planes :].reshape(4, tile, 4)[:, token]
    assert np.isclose(fields[0].view(np.float32)[0], 1 / steps)
    assert np.isclose(fields[1].view(np.float32)[0], q.sum() / steps)
    assert [fields[i].view(np.int32)[0] for i in (2, 3)] == [-q[:16].sum(), -q[16:].sum()]
    quantize(np.zeros(32, np.float32).ctypes.data, data.ctypes.data, tile, token, fine)
    assert not data[32 * tile * planes :].reshape(4, tile, 4)[:, token].any()


@kernel
def halves(x, h, y, n):
    for i in range(0, n, 16):
        simd.store_halfs(h + 2 * i, simd.load_floats(x + 4 * i))
        simd.store_floats(y + 4 * i, simd.load_halfs(h + 2 * i))


def test_float16_conversions_are_numpys():
    """Every float16, and float32 values on and between the representable ones, subnormals and overflow included."""
    every = np.arange(2**16, dtype=np.uint16).view(np.float16)
    every = every[~np.isnan(every)].astype(np.float32)
    rng = np.random.default_rng(1)
    with np.errstate(over="ignore"):
        finite = every[np.isfinite(every)]
        ties = (finite[:-1] + finite[1:]) / 2
        x = np.concatenate(
            [every, ties, rng.standard_normal(4096).astype(np.float32) * 1e-6, [65519, 65520, 1e30, -1e30]]
        )
        x = np.resize(x, -(-x.size // 16) * 16).astype(np.float32)
        expected = x.astype(np.float16)
    h, y = np.zeros(x.size, np.float16), np.zeros_like(x)
    halves(x.ctypes.data, h.ctypes.data, y.ctypes.data, x.size)
    assert np.array_equal(h.view(np.uint16), expected.view(np.uint16))
    assert np.array_equal(y, expected.astype(np.float32))


@pytest.mark.parametrize("neighbours", [True, False])
def test_rotation_of_many_pairs_and_of_what_remains(neighbours):
    width, rng = 2 * 41, np.random.default_rng(5)
    x, angles = rng.standard_normal(100).astype(np.float32), rng.standard_normal(41)
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    first = np.arange(0, width, 2) if neighbours else np.arange(width // 2)
    second = first + (1 if neighbours else width // 2)
    expected = x.copy()
    expected[first], expected[second] = x[first] * cos - x[second] * sin, x[second] * cos + x[first] * sin
    rotate(x.ctypes.data, cos.ctypes.data, sin.ctypes.data, width, neighbours)
    assert np.array_equal(x, expected)
