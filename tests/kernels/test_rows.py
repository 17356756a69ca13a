"""Sixteen rows at once have the bits of each row by itself."""

import numpy as np
import pytest

from ropewalk.kernels import pointwise as P
from ropewalk.kernels import rows as R
from ropewalk.kernels import simd
from ropewalk.kernels.definition import FINE_TOKEN_GROUP_BYTES, TOKEN_GROUP_BYTES
from ropewalk.kernels.jit import kernel

TILES = [(16, 0), (32, 16), (64, 48)] if R.TILE_ROWS == 16 else [(R.TILE_ROWS, 0)]


def awkward(groups, seed):
    """Float32 [16, 32 * groups] of all magnitudes, with halves between integers, rows of zeros, of large
    ones and of some whose reciprocal is infinite."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((16, 32 * groups)) * 10.0 ** rng.integers(-20, 20, (16, 1))
    x[3], x[5], x[7, ::2], x[9] = (
        rng.integers(-254, 255, x.shape[1]) / 2,
        0,
        1e20,
        x[9] * 1e-37 / abs(x[9]).max(),
    )
    return x.astype(np.float32)


@kernel
def sums(x, out):
    simd.store_floats(out, R.sum_rows(x))
    for r in range(16):
        simd.store_f32(out + 64 + 4 * r, simd.sum_tree(simd.load_floats(x + 64 * r)))


def test_sums_go_by_the_same_tree():
    x, out = awkward(1, 1)[:, :16].copy(), np.zeros((2, 16), np.float32)
    sums(x.ctypes.data, out.ctypes.data)
    assert out[0].tobytes() == out[1].tobytes()
    assert not out[0, 5] and out[0, 3] == x[3].sum()


@kernel
def put(x, n, norm, eps, fine, at, floats, tile, place, next_tile, together):
    """All groups of 16 tokens into tiles, together or one by one."""
    if together:
        P.norm_rows(x, norm, n, eps, fine, (at, floats, tile, place))
    else:
        for r in range(16):
            t = r // R.TILE_ROWS
            to = at + t * next_tile, floats + t * n * tile * 4, tile, place + r % R.TILE_ROWS
            P.norm_to_tile(x + 4 * n * r, norm, n, eps, fine, to)


@pytest.mark.parametrize(("tile", "place"), TILES)
@pytest.mark.parametrize("fine", [False, True])
@pytest.mark.parametrize("kind", ["no norm", "rms", "layer norm with bias"])
def test_norms_and_tiles(kind, fine, tile, place):
    groups = 3
    x, n_tiles = awkward(groups, 2), 16 // R.TILE_ROWS
    weights, bias = np.random.default_rng(3).standard_normal((2, 32 * groups)).astype(np.float32)
    norm = (0, 0, 0)
    if kind != "no norm":
        is_layer_norm = kind.startswith("layer")
        norm = (weights.ctypes.data, bias.ctypes.data if is_layer_norm else 0, int(is_layer_norm))
    size = tile * groups * (FINE_TOKEN_GROUP_BYTES if fine else TOKEN_GROUP_BYTES)
    results = []
    for together in (True, False):
        data = np.zeros(n_tiles * size, np.uint8)
        floats = np.zeros((n_tiles, groups, tile, 32), np.float32)
        at = data.ctypes.data, floats.ctypes.data
        put(x.ctypes.data, 32 * groups, norm, np.float32(1e-5), fine, *at, tile, place, size, together)
        results.append((data.tobytes(), floats.tobytes()))
        assert data.any() and floats.any()
    assert results[0] == results[1]


@kernel
def activate(gate, up, out, which):
    if which == 0:
        P.silu_rows(gate, up, 256, 16, out)
    elif which == 1:
        P.gelu_tanh_rows(gate, up, 256, 16, out)
    else:
        for r in range(16):
            for i in (0, 64):
                g, u = simd.load_floats(gate + 256 * r + i), simd.load_floats(up + 256 * r + i)
                simd.store_floats(out + 128 * r + i, P.activate(g, u, P.SILU if which == 2 else P.GELU_TANH))


def test_activations():
    gate, up = np.random.default_rng(4).standard_normal((2, 16, 64)).astype(np.float32) * np.float32(8)
    out = np.zeros((4, 16, 32), np.float32)
    for which in range(4):
        activate(gate.ctypes.data, up.ctypes.data, out[which].ctypes.data, which)
    assert out[0].tobytes() == out[2].tobytes() and out[1].tobytes() == out[3].tobytes()
    x = gate[:, :32].astype(np.float64)
    np.testing.assert_allclose(out[0], x / (1 + np.exp(-x)) * up[:, :32], rtol=1e-6, atol=1e-9)
